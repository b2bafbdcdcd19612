"""The one retry policy of everything that talks to a store: what passes by itself, how long to wait, what to say.

A store that is late, throttled or away for minutes must not cost a job its work, and a store that refuses must not be
asked again. `trouble` sorts errors, `Patience` repeats a request while its trouble may pass, with growing and jittered
pauses. Credentials that expired count as passing: whoever renews them lets the run go on. Nothing of draftmill is
imported, so that the storage plugin for Snakemake can take it along.

A lost answer makes a request ambiguous: after a conditional put that says 412, look whether the object that is there is
the one that was put before the race counts as lost. The client's own limits stay short, because patience is here.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from boto3.exceptions import Boto3Error
from botocore import exceptions as boto
from urllib3 import exceptions as http

Result = TypeVar("Result")
Say = Callable[[str], None]
# late: nobody has to do anything. expired: once somebody renewed the credentials the same request succeeds.
Trouble = Literal["late", "expired"]

_SAY_EVERY_S = 30.0
_DEPTH = 8
_CODES_LATE = frozenset(
    [
        *("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "RequestTimeoutException"),
        *("Throttling", "RequestThrottled", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"),
        *("BandwidthLimitExceeded", "OperationAborted", "IncompleteBody"),
    ]
)
_CODES_EXPIRED = frozenset(["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"])
_STATUS_LATE, _STATUS_NEVER = frozenset((408, 429)), frozenset((501, 505))
_EXPIRED = (boto.CredentialRetrievalError, boto.TokenRetrievalError, boto.SSOError)
_LATE = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    http.HTTPError,
    ConnectionError,
    TimeoutError,
)


def trouble(error: BaseException) -> Trouble | None:
    """What kind of passing trouble an error is; None for one that would only repeat itself."""
    return next((found for one in _chain(error) if (found := _trouble(one)) is not None), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was made from: a transfer wraps the error of the request that failed."""
    one: BaseException | None = error
    for _ in range(_DEPTH):
        if one is None:
            return
        yield one
        wrapped = one.__context__ if isinstance(one, Boto3Error) else None
        one = getattr(one, "last_exception", None) or one.__cause__ or wrapped


def _trouble(error: BaseException) -> Trouble | None:
    if isinstance(error, boto.ClientError):
        return _reply(error)
    # A handshake that broke off may succeed, a certificate that does not fit never will.
    if isinstance(error, boto.SSLError | http.SSLError) and "CERTIFICATE" in str(error).upper():
        return None
    if isinstance(error, _EXPIRED):
        return "expired"
    return "late" if isinstance(error, _LATE) else None


def _reply(error: boto.ClientError) -> Trouble | None:
    code = code_of(error)
    # The reply to a HEAD names no code, and what makes it a bare 400 is an expired token.
    if code in _CODES_EXPIRED or code == "400":
        return "expired"
    status = status_of(error)
    late = status in _STATUS_LATE or (status >= 500 and status not in _STATUS_NEVER)
    return "late" if code in _CODES_LATE or late else None


def code_of(error: Any) -> str:
    """S3's name of an error; of a HEAD request it is only the number."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def status_of(error: Any) -> int:
    """The reply's HTTP status."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def brief(error: BaseException) -> str:
    """An error in a few words, to stand inside a sentence."""
    if isinstance(error, boto.ClientError):
        return f"{status_of(error)} {code_of(error)}"
    return " ".join(str(error).split()).rstrip(". ") or type(error).__name__


class Notices:
    """What a person hears while a process waits: a sentence at a wait's beginning, every half minute, and at its end.

    One for each store of a process, however many threads wait for it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        # Store -> since when it is awaited, when that was last said.
        self._waits: dict[str, tuple[float, float]] = {}

    def waiting(self, store: str, kind: Trouble, error: BaseException, say: Say) -> None:
        """Note that a request failed and will be repeated."""
        with self._lock:
            now = self._clock()
            since, said = self._waits.get(store, (now, float("-inf")))
            due = now - said >= _SAY_EVERY_S
            self._waits[store] = (since, now if due else said)
        if due:
            say(_sentence(store, kind, error, now - since))

    def answered(self, store: str, say: Say) -> None:
        """Note that a request succeeded."""
        if store not in self._waits:
            return
        with self._lock:
            found = self._waits.pop(store, None)
        if found is not None:
            say(f"{store} answers again after {self._clock() - found[0]:.0f} s.")

    def gave_up(self, store: str) -> None:
        """Note that nobody waits any more."""
        with self._lock:
            self._waits.pop(store, None)


def _sentence(store: str, kind: Trouble, error: BaseException, waited: float) -> str:
    since = f" for {waited:.0f} s" if waited >= 1 else ""
    if kind == "expired":
        return f"{store}: the credentials have expired{since} ({brief(error)}): renew them, this run waits."
    return f"{store} does not answer{since} ({brief(error)}): waiting for it."


_NOTICES = Notices()


@dataclass(frozen=True)
class Patience:
    """Repeats a request for so many seconds while its trouble may pass; `limit_s` 0 asks once.

    Pauses double from `first_s` to `most_s`, each shortened by up to half at random, so that the jobs of a build do not
    come back all at once. `renew` is called before a request is repeated after expired credentials.
    """

    limit_s: float
    say: Say
    store: str
    renew: Callable[[], None] = field(default=lambda: None)
    first_s: float = 0.5
    most_s: float = 15.0
    notices: Notices = _NOTICES
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random

    def __call__(self, request: Callable[[], Result]) -> Result:
        """The request's result. Raises its last error when time is up, and one that will not pass at once."""
        start, attempt = self.clock(), 0
        while True:
            try:
                result = request()
            except Exception as error:
                self._wait_out(error, attempt, start + self.limit_s - self.clock())
                attempt += 1
            else:
                self.notices.answered(self.store, self.say)
                return result

    def _wait_out(self, error: Exception, attempt: int, left_s: float) -> None:
        """Sleep before the next attempt, or raise the error."""
        kind = trouble(error)
        if kind is None or left_s <= 0:
            self.notices.gave_up(self.store)
            raise error
        self.notices.waiting(self.store, kind, error, self.say)
        self.sleep(min(self.pause(attempt), left_s))
        if kind == "expired":
            self.renew()

    def pause(self, attempt: int) -> float:
        """Seconds to wait after the failed attempt of that number, counted from 0."""
        return min(self.most_s, self.first_s * 2.0 ** min(attempt, 32)) * (1.0 - 0.5 * self.chance())
