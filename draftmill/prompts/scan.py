"""The first pass over all sources: which records are good, new, train or held out, and how they form shards.

Only ids, places and sizes are kept, about 150 bytes a record, so that a million prompts fit anywhere; the second pass
(write.py) reads the records of missing shards again. Pieces of the sources (examine.py) may come from several processes
and are joined in their order, so that the result is the same as that of one.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftmill.config import PromptsConfig
from draftmill.errors import UserError
from draftmill.prompts.bad import BadKind, BadRecord, Kind, Tally, describe
from draftmill.prompts.examine import Doubtful, Piece, Refused, Source, examine, spans, stream
from draftmill.prompts.files import OnBytes
from draftmill.prompts.read import no_records, place
from draftmill.prompts.shard import boundary_hash, cut, is_held_out, reach_of, shard_name
from draftmill.prompts.workers import Workers

Split = Literal["train", "held_out"]
CountTokens = Callable[[dict[str, Any]], int]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard: its name, records, split, and the UTF-8 bytes of its canonical records."""

    name: str
    rows: int
    split: Split
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of every record read: read = train + held_out + duplicates + beyond_max_prompts + bad."""

    read: int
    train: int
    held_out: int
    duplicates: int
    beyond_max_prompts: int
    bad: dict[str, BadKind]

    @property
    def judged(self) -> int:
        """Records that were looked at: all but those beyond max_prompts."""
        return self.read - self.beyond_max_prompts


@dataclass(slots=True)
class Scan:
    """The good records in reading order, and the shards as (entry, records by number)."""

    sources: Sequence[Source]
    ids: list[bytes] = field(default_factory=list)
    origin: array[int] = field(default_factory=lambda: array("l"))
    positions: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("l"))
    shards: list[tuple[ShardEntry, array[int]]] = field(default_factory=list)
    counts: Counts = field(default_factory=lambda: Counts(0, 0, 0, 0, 0, {}))

    def add(self, prompt: bytes, origin: int, position: int, size: int) -> None:
        """Take one good record: its id, its source by number, its position there and its size."""
        self.ids.append(prompt)
        self.origin.append(origin)
        self.positions.append(position)
        self.sizes.append(size)


def scan(
    sources: Sequence[Source],
    config: PromptsConfig,
    limit_tokens: int,
    count_tokens: CountTokens,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> Scan:
    """Read all sources once. Raises UserError for a fault of a file, or if a split would be empty."""
    collector = _Collector(Scan(sources), config.max_prompts, limit_tokens, count_tokens)
    total, done = sum(source.file.size for source in sources), 0
    for number, source in enumerate(sources):
        collector.begin()
        for piece in _pieces(number, source, limit_tokens, collector, _on_bytes(progress, done, total), workers):
            collector.collect(piece)
        done += source.file.size
    rows = _shard(collector.result, config)
    collector.result.counts = collector.counts(rows)
    return collector.result


def _on_bytes(progress: Progress | None, done: int, total: int) -> OnBytes | None:
    return None if progress is None else lambda count: progress("reading", done + count, total)


def _pieces(
    number: int,
    source: Source,
    limit_tokens: int,
    collector: _Collector,
    on_bytes: OnBytes | None,
    workers: Workers | None,
) -> Iterator[Piece]:
    if workers is None or not source.by_lines:
        yield from stream(number, source, limit_tokens, collector.full, on_bytes)
        return
    for piece in workers.map(examine, spans(number, source, limit_tokens, collector.full)):
        yield piece
        if on_bytes is not None:
            on_bytes(piece.stop)
    if not collector.records_here:
        raise no_records(source.file)


class _Collector:
    """Joins pieces in order: what is new, what is too long, what lies beyond max_prompts."""

    def __init__(self, result: Scan, max_prompts: int | None, limit_tokens: int, count_tokens: CountTokens) -> None:
        self.result, self.records_here = result, 0
        self._max_prompts, self._limit, self._count_tokens = max_prompts, limit_tokens, count_tokens
        self._tally, self._seen = Tally(), set[bytes]()
        self._read = self._duplicates = self._beyond = self._lines = 0

    def full(self) -> bool:
        """Whether there are max_prompts prompts already."""
        return self._max_prompts is not None and len(self._seen) >= self._max_prompts

    def begin(self) -> None:
        """Start with the next source."""
        self._lines = self.records_here = 0

    def collect(self, piece: Piece) -> None:
        """Take the records of the next piece."""
        good = 0
        for number in range(piece.records):
            if self.full():
                self._beyond += piece.records - number
                break
            refused = piece.refused.get(number)
            if refused is None:
                refused = self._too_long(piece.doubtful[number]) if number in piece.doubtful else None
                if refused is None:
                    self._add(piece, good)
                good += 1
            if refused is not None:
                self._refuse(piece, refused)
        self._read += piece.records
        self.records_here += piece.records
        self._lines += piece.lines

    def _add(self, piece: Piece, good: int) -> None:
        prompt = piece.id(good)
        if prompt in self._seen:
            self._duplicates += 1
        else:
            self._seen.add(prompt)
            self.result.add(prompt, piece.source, piece.positions[good], piece.sizes[good])

    def _refuse(self, piece: Piece, refused: Refused) -> None:
        where = place(self.result.sources[piece.source].file, self._lines + refused.row)
        self._tally.add(where, BadRecord(Kind(refused.kind), refused.reason))

    def _too_long(self, doubtful: Doubtful) -> Refused | None:
        try:
            tokens = self._count_tokens(json.loads(doubtful.text))
        except UserError as refusal:  # the chat template refuses this one record, and no other need suffer for it
            return Refused(doubtful.row, Kind.TEMPLATE, str(refusal).rstrip("."))
        if tokens <= self._limit:
            return None
        reason = f"the prompt has {tokens} tokens, more than the context leaves ({self._limit})"
        return Refused(doubtful.row, Kind.TOO_LONG, reason)

    def counts(self, rows: Mapping[Split, int]) -> Counts:
        """What became of every record, given the rows of each split."""
        bad = self._tally.by_kind()
        return Counts(self._read, rows["train"], rows["held_out"], self._duplicates, self._beyond, bad)


def _shard(result: Scan, config: PromptsConfig) -> dict[Split, int]:
    members: dict[Split, array[int]] = {"train": array("l"), "held_out": array("l")}
    for number, prompt in enumerate(result.ids):
        members["held_out" if is_held_out(prompt, config.held_out) else "train"].append(number)
    for split, numbers in members.items():
        hashes = [boundary_hash(result.ids[number]) for number in numbers]
        for start, stop in cut(hashes, reach_of(config.shard_rows)):
            result.shards.append(_entry(result, split, numbers[start:stop]))
    return {split: len(numbers) for split, numbers in members.items()}


def _entry(result: Scan, split: Split, numbers: array[int]) -> tuple[ShardEntry, array[int]]:
    labels = _labels(result, numbers)
    name = shard_name(list(zip((result.ids[number].hex() for number in numbers), labels, strict=True)))
    return ShardEntry(name, len(numbers), split, sum(result.sizes[number] for number in numbers)), numbers


def _labels(result: Scan, numbers: Iterable[int]) -> Iterator[str]:
    return (result.sources[result.origin[number]].file.label for number in numbers)


def check_splits(counts: Counts, held_out: float) -> None:
    """Raise UserError if there is nothing to train on or nothing to evaluate on."""
    good = counts.train + counts.held_out
    if not good:
        raise UserError(f"None of the {counts.read} prompt records is good: {describe(counts.bad)}.")
    for split, rows in (("train", counts.train), ("held_out", counts.held_out)):
        if not rows:
            raise UserError(
                f"No prompt of {good} falls to the {split} split at prompts.held_out {held_out:g}: "
                "give more prompts or change prompts.held_out."
            )
