"""Who works on a job now, so that two builds over one store do not do the same work twice where it can be avoided.

A claim is one small object a job: conditional creation gives it to one of those who ask, a thread renews it, and it is
free again when its holder is seen dead on this host, or when nobody renewed it for its time. A claim saves work and
decides nothing: with two holders the work is done twice, and names and conditional publication keep that harmless. So
nothing here may stop a job: a renewal that fails is tried again, a claim that is lost is let go.

Clocks of two hosts differ. A claim of another host counts as left when it did not change while this host looked on for
its whole time; only one that ran out long ago by its own words is taken at once.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Protocol

PREFIX = "claims/"
# Seconds that a claim lasts without renewal, between looks at another's, and by which clocks of hosts may differ.
LASTS_S, LOOK_S, SKEW_S = 120.0, 3.0, 600.0
_SAY_EVERY_S = 60.0


class ClaimStore(Protocol):
    """What claims ask of a store (store/base.py)."""

    def get(self, key: str) -> bytes:
        """An object's bytes. Raises KeyError if there is none."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Publish an object unless one exists."""
        ...

    def replace(self, key: str, data: bytes, old: bytes) -> bool:
        """Publish an object in the place of one that still has those bytes."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; no error if there is none."""
        ...


@dataclass(frozen=True)
class Holder:
    """A process as other processes find it: its pid and start mean something on the same boot and pid namespace only."""

    pid: int
    start: int
    boot: str | None
    namespace: str | None


@dataclass(frozen=True)
class Claim:
    """What stands in the store: `owner` names this very claim, `expires` is in seconds since 1970."""

    owner: str
    holder: Holder
    host: str
    run: str
    expires: float

    def encode(self) -> bytes:
        """The object's bytes."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def decode(data: bytes) -> Claim | None:
        """The claim, or None for bytes that are none: nobody honours those."""
        try:
            value = json.loads(data)
            claim = Claim(**{**value, "holder": Holder(**value["holder"])})
            return claim if _well_typed(claim) else None
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None


def _well_typed(claim: Claim) -> bool:
    """Whether the fields are of their types, which JSON does not promise. A number may be too large for a float."""
    holder, expires = claim.holder, claim.expires
    return (
        all(type(number) is int for number in (holder.pid, holder.start))
        and all(text is None or isinstance(text, str) for text in (holder.boot, holder.namespace))
        and all(isinstance(text, str) for text in (claim.owner, claim.host, claim.run))
        and type(expires) in (int, float)
        and math.isfinite(expires)
    )


# Whether a process of this host lives; None where this host cannot know (another boot, another pid namespace).
Alive = Callable[[Holder], bool | None]


def vacant(claim: Claim | None, alive: Alive, now: float) -> bool:
    """Whether a claim binds nobody any more, as far as one look tells."""
    if claim is None:
        return True
    living = alive(claim.holder)
    return not living if living is not None else claim.expires + SKEW_S < now


@dataclass
class Claims:
    """The claims of one process of a build."""

    store: ClaimStore
    run: str
    me: Holder
    alive: Alive
    say: Callable[[str], None] = lambda text: print(text, flush=True)
    lasts_s: float = LASTS_S
    look_s: float = LOOK_S
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    @contextmanager
    def claimed(self, key: str, finished: Callable[[], bool]) -> Iterator[bool]:
        """Hold the claim `key` inside; True if the work is to be done, False if another has finished it by now.

        `finished` says whether the outputs are in the store, where they must be before the block ends.
        """
        mine = self._wait_for(key)
        keeper = _Keeper(self, key, mine)
        try:
            yield not finished()
        finally:
            keeper.end()
            # A store that is away keeps a claim that runs out, which is no reason to fail a finished job.
            with suppress(Exception):
                self._let_go(key, mine)

    def _wait_for(self, key: str) -> Claim:
        watch, said = _Watch(self), float("-inf")
        while True:
            mine = self._mine()
            if self.store.create(key, mine.encode()):
                return mine
            while (found := self._look(key)) is not None:
                data, claim = found
                if claim is not None and claim.owner == mine.owner:
                    return mine
                if not watch.left(data, claim):
                    if claim is not None and self.clock() - said >= _SAY_EVERY_S:
                        said = self.clock()
                        self.say(f"Another build ({claim.host}, run {claim.run}) works on this job: waiting for it.")
                    self.sleep(self.look_s)
                elif self.store.replace(key, (mine := self._mine()).encode(), data):
                    return mine

    def rival(self, key: str) -> Callable[[], bool]:
        """What tells, asked again and again, whether another process holds the claim `key` and has not left it."""
        watch = _Watch(self)

        def holds() -> bool:
            found = self._look(key)
            if found is None:
                return False
            data, claim = found
            return claim is not None and claim.holder != self.me and not watch.left(data, claim)

        return holds

    def _mine(self) -> Claim:
        return Claim(secrets.token_hex(8), self.me, socket.gethostname(), self.run, self.clock() + self.lasts_s)

    def _look(self, key: str) -> tuple[bytes, Claim | None] | None:
        try:
            data = self.store.get(key)
        except KeyError:
            return None
        return data, Claim.decode(data)

    def renew(self, key: str, mine: Claim) -> bool:
        """Prolong our claim; False if it is not ours any more."""
        found = self._look(key)
        if found is None or found[1] is None or found[1].owner != mine.owner:
            return False
        return self.store.replace(key, replace(mine, expires=self.clock() + self.lasts_s).encode(), found[0])

    def sweep(self, keys: Iterable[str], ended: str | None = None) -> list[str]:
        """Remove claims among `keys` that bind nobody, and those of the run `ended`; returns what was removed.

        Each is taken over first: whoever waits for it and would take it over too either has it or waits until it is gone.
        """
        return [key for key in keys if self._swept(key, ended)]

    def _swept(self, key: str, ended: str | None) -> bool:
        found = self._look(key)
        if found is None:
            return False
        data, claim = found
        if not (vacant(claim, self.alive, self.clock()) or (claim is not None and claim.run == ended)):
            return False
        mine = self._mine()
        if not self.store.replace(key, mine.encode(), data):
            return False
        self._let_go(key, mine)
        return True

    def _let_go(self, key: str, mine: Claim) -> None:
        found = self._look(key)
        if found is not None and found[1] is not None and found[1].owner == mine.owner:
            self.store.delete(key)


class _Watch:
    """Looks at another's claim again and again, and tells when it is left."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._data, self._unchanged_s, self._looked = b"", 0.0, 0.0

    def left(self, data: bytes, claim: Claim | None) -> bool:
        """Whether the claim that stands there now is left by its holder."""
        now = self._claims.clock()
        if data != self._data:
            self._data, self._unchanged_s = data, 0.0
        else:
            # While the store was away neither side could write or look: that time does not count.
            self._unchanged_s += min(max(now - self._looked, 0.0), 2 * self._claims.look_s)
        self._looked = now
        if vacant(claim, self._claims.alive, now):
            return True
        unseen = claim is not None and self._claims.alive(claim.holder) is None
        return unseen and self._unchanged_s > self._claims.lasts_s


class _Keeper:
    """Renews a claim from a thread for as long as its job works."""

    def __init__(self, claims: Claims, key: str, mine: Claim) -> None:
        self._claims, self._key, self._mine = claims, key, mine
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="claim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._claims.lasts_s / 3):
            try:
                if not self._claims.renew(self._key, self._mine):
                    return
            except Exception as error:  # a store that is away takes no renewal, and the job goes on without
                self._claims.say(f"The claim {self._key} was not renewed ({type(error).__name__}).")

    def end(self) -> None:
        """Stop renewing; a renewal on its way finds the claim gone."""
        self._ended.set()
