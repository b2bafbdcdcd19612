"""The first pass over all sources: which records are good, new, train or held out, and how they form shards.

Only ids, places and sizes are kept, about 150 bytes a record, so that a million prompts fit anywhere; the second pass
(write.py) reads the records of missing shards again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftmill.config import PromptsConfig
from draftmill.errors import UserError
from draftmill.prompts.bad import BadKind, BadRecord, Kind, Tally, describe
from draftmill.prompts.files import OnBytes, SourceFile
from draftmill.prompts.read import Raw, location, read
from draftmill.prompts.record import Prompt, Rules, parse
from draftmill.prompts.shard import boundary_hash, cut, is_held_out, reach_of, shard_name

Split = Literal["train", "held_out"]
CountTokens = Callable[[dict[str, Any]], int]
Progress = Callable[[str, int, int], None]

# What a chat template may add, in bytes and so in tokens of a byte-level tokenizer at most: a default system turn, the
# marks of a turn, the words around tools and their indentation.
_TEMPLATE_BYTES = 1024
_TURN_BYTES = 64
_TOOLS_BYTES = 2048
_TOOLS_GROWTH = 4


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


@dataclass(frozen=True, slots=True)
class Source:
    """A file with the rules its records are read by."""

    file: SourceFile
    rules: Rules


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

    def add(self, prompt: Prompt, origin: int, position: int) -> None:
        """Take one good record: its source by number, and its position there."""
        self.ids.append(prompt.id)
        self.origin.append(origin)
        self.positions.append(position)
        self.sizes.append(prompt.size)


def scan(
    sources: Sequence[Source],
    config: PromptsConfig,
    limit_tokens: int,
    count_tokens: CountTokens,
    progress: Progress | None = None,
) -> Scan:
    """Read all sources once. Raises UserError for a fault of a file, or if a split would be empty."""
    result = Scan(sources)
    tally = Tally()
    seen: set[bytes] = set()
    read_records = duplicates = beyond = 0
    for number, raw in _all_records(sources, progress):
        read_records += 1
        if config.max_prompts is not None and len(seen) >= config.max_prompts:
            beyond += 1
            continue
        try:
            prompt = parse(raw.decode(), sources[number].rules)
            check_length(prompt, limit_tokens, count_tokens)
        except BadRecord as bad:
            tally.add(location(sources[number].file, raw), bad)
            continue
        if prompt.id in seen:
            duplicates += 1
        else:
            seen.add(prompt.id)
            result.add(prompt, number, raw.position)
    rows = _shard(result, config)
    result.counts = Counts(read_records, rows["train"], rows["held_out"], duplicates, beyond, tally.by_kind())
    return result


def _all_records(sources: Sequence[Source], progress: Progress | None) -> Iterator[tuple[int, Raw]]:
    total, done = sum(source.file.size for source in sources), 0
    for number, source in enumerate(sources):
        for raw in read(source.file, source.rules.field, _on_bytes(progress, done, total)):
            yield number, raw
        done += source.file.size


def _on_bytes(progress: Progress | None, done: int, total: int) -> OnBytes | None:
    return None if progress is None else lambda count: progress("reading", done + count, total)


def check_length(prompt: Prompt, limit_tokens: int, count_tokens: CountTokens) -> None:
    """Raise BadRecord if a prompt has more than `limit_tokens` tokens.

    Tokens are counted only where the bytes leave a doubt: a byte-level tokenizer makes at most one token of a byte.
    """
    record = prompt.record
    if "input_ids" in record:
        most = len(record["input_ids"])
    else:
        most = prompt.size + _TURN_BYTES * (len(record["messages"]) + 1) + _TEMPLATE_BYTES
        most += _TOOLS_BYTES + _TOOLS_GROWTH * prompt.size if "tools" in record else 0
    if most <= limit_tokens:
        return
    try:
        tokens = count_tokens(record)
    except UserError as refusal:  # the chat template refuses this one record, and no other need suffer for it
        raise BadRecord(Kind.TEMPLATE, str(refusal).rstrip(".")) from None
    if tokens > limit_tokens:
        raise BadRecord(Kind.TOO_LONG, f"the prompt has {tokens} tokens, more than the context leaves ({limit_tokens})")


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
