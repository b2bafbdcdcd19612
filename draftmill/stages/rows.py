"""The rows of one shard on their way: what is asked, what was answered or failed, and the journal that keeps both.

Rows are found by prompt and sample, never by counting. A row is answered at most once: whatever comes later for its key,
from a repeated request or from another machine's segments, is passed over. Rows of a server carry a stamp, so that those
since its last good canary can be voided when it turns out sick; a void is a record of the journal like any other, so
that it holds for every reader.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftmill.config import GenerateConfig
from draftmill.engines.base import Failure, Key, Request, Result, Stamp, row_seed
from draftmill.engines.sampling import Setting
from draftmill.store.journal import Journal


@dataclass(frozen=True, slots=True)
class RowRules:
    """What a valid row keeps: the limits of sampling, the ids that end an answer, the size of the vocabulary."""

    sampling: GenerateConfig
    stop_ids: frozenset[int]
    vocabulary: int

    def fault(self, result: Result, limit: int | None = None) -> tuple[str, str] | None:
        """The typed reason and detail for which a row is refused, or None. `limit`: the row's own, in tokens."""
        ids, limit = result.output_ids, limit or self.sampling.max_new_tokens
        if result.finish_reason not in ("stop", "length"):
            return "finish_reason", f"the engine ended the row with {result.finish_reason!r}"
        if not ids:
            return "empty", "no token was generated"
        if len(ids) > limit or (result.finish_reason == "length" and len(ids) != limit):
            return "length", f"{len(ids)} tokens with finish reason {result.finish_reason}, limit {limit}"
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            return "bad_ids", f"an id lies outside the vocabulary of {self.vocabulary}"
        if result.finish_reason == "stop" and ids[-1] not in self.stop_ids:
            return "finish_reason", f"the row stopped at token {ids[-1]}, which ends no answer"
        run = self.sampling.max_token_run
        if len(ids) >= run and len(set(ids[-run:])) == 1:
            return "token_run", f"the last {run} tokens are all {ids[-1]}"
        return None

    def check(self, request: Request, result: Result | Failure) -> Result | Failure:
        """The result, or the failure that it is."""
        if isinstance(result, Failure):
            return result
        fault = self.fault(result, request.sampling.max_new_tokens)
        return result if fault is None else Failure(result.key, *fault)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt that the target is to answer: where it came from, its token ids, and the setting it is asked under."""

    key: Key
    source: str
    prompt_ids: tuple[int, ...]
    setting: Setting

    def request(self, seed: int, attempt: int) -> Request:
        """The row as an engine wants it; `seed` is the base seed."""
        return Request(self.key, self.prompt_ids, row_seed(seed, self.key, attempt), self.setting.sampling)


Try = tuple[Key, int]


class Ledger:
    """Answers and failures of one shard by row and attempt, in memory and in the journal."""

    def __init__(self, config: GenerateConfig, journal: Journal) -> None:
        self.answers: dict[Key, Result] = {}
        self.failures: dict[Try, Failure] = {}
        self._config, self._journal = config, journal
        self._stamps: dict[Try, Stamp] = {}
        self._voids: set[tuple[str, int]] = set()
        self._unflushed: list[dict[str, Any]] = []
        self._flushed = time.monotonic()

    def load(self) -> None:
        """Take what the journal holds; what is not yet flushed stays."""
        records = self._journal.rows()
        self._voids |= {_void_of(record["void"]) for record in records if "void" in record}
        for record in records:
            if "void" not in record:
                self._take(record)

    def note(self, result: Result | Failure, attempt: int, stamp: Stamp | None = None) -> bool:
        """Keep a row's answer or failure; False if it is known already, or of an era that is void."""
        record: dict[str, Any] = {"key": list(result.key), "attempt": attempt}
        if stamp is not None:
            record |= {"server": stamp.server, "epoch": stamp.epoch, "era": stamp.era, "span": stamp.span}
        if isinstance(result, Failure):
            record |= {"reason": result.reason, "detail": result.detail}
        else:
            record |= {"output_ids": list(result.output_ids), "finish_reason": result.finish_reason}
        if not self._take(record):
            return False
        self._unflushed.append(record)
        return True

    def void(self, era: str, span: int) -> int:
        """Forget the rows of an era of a server from a span on; how many. The journal learns it at the next flush."""
        self._voids.add((era, span))
        gone = {row for row, stamp in self._stamps.items() if _voided(stamp, era, span)}
        for key, attempt in gone:
            del self._stamps[key, attempt]
            if self.failures.pop((key, attempt), None) is None:
                del self.answers[key]
        self._unflushed = [r for r in self._unflushed if not _voided(_stamp(r), era, span)]
        if gone:
            self._unflushed.append({"void": {"era": era, "span": span}})
        return len(gone)

    def stamps(self) -> Iterable[Stamp]:
        """The stamps of all rows that have one."""
        return self._stamps.values()

    def next_attempt(self, key: Key) -> int | None:
        """The attempt that a row is at; None when it is answered or refused for good."""
        if key in self.answers:
            return None
        for attempt in range(self._config.attempts):
            failure = self.failures.get((key, attempt))
            if failure is None:
                return attempt
            if failure.reason in FINAL:
                return None
        return None

    def rejection(self, key: Key) -> Failure:
        """Why a row without an answer failed the last time it was tried. Raises RuntimeError if it was never tried."""
        for attempt in reversed(range(self._config.attempts)):
            if (key, attempt) in self.failures:
                return self.failures[key, attempt]
        raise RuntimeError(f"row {key} was neither answered nor refused")

    def due(self) -> bool:
        """Whether rows wait that should be flushed now."""
        late = time.monotonic() - self._flushed >= self._config.flush_seconds
        return len(self._unflushed) >= self._config.flush_rows or (late and bool(self._unflushed))

    def flush(self) -> None:
        """Write what waits to the journal as one segment."""
        self.write(self.take())

    def take(self) -> list[dict[str, Any]]:
        """What waits to be written, which waits no longer: for a writer in another thread."""
        taken, self._unflushed, self._flushed = self._unflushed, [], time.monotonic()
        return taken

    def give_back(self, records: Sequence[dict[str, Any]]) -> None:
        """Take back what could not be written."""
        self._unflushed = [*records, *self._unflushed]

    def absorb(self, records: Iterable[dict[str, Any]]) -> None:
        """Take over what another ledger of this shard has not written."""
        for record in records:
            if "void" in record:
                self.void(*_void_of(record["void"]))
            elif self._take(record):
                self._unflushed.append(record)

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write records that were taken. One at a time."""
        self._journal.append(records)

    def _take(self, record: Mapping[str, Any]) -> bool:
        key: Key = (record["key"][0], record["key"][1])
        row, stamp = (key, int(record["attempt"])), _stamp(record)
        if key in self.answers or row in self.failures or any(_voided(stamp, *void) for void in self._voids):
            return False
        if "reason" in record:
            self.failures[row] = Failure(key, record["reason"], record["detail"])
        else:
            self.answers[key] = Result(key, tuple(record["output_ids"]), record["finish_reason"])
        if stamp is not None:
            self._stamps[row] = stamp
        return True


# Failures that no other seed can mend, or none that is worth a server.
FINAL = frozenset({"too_long", "refused", "server_death"})


def _stamp(record: Mapping[str, Any]) -> Stamp | None:
    if "era" not in record:
        return None
    return Stamp(record["server"], record["epoch"], record["era"], record["span"])


def _void_of(void: Mapping[str, Any]) -> tuple[str, int]:
    return void["era"], void["span"]


def _voided(stamp: Stamp | None, era: str, span: int) -> bool:
    return stamp is not None and stamp.era == era and stamp.span >= span
