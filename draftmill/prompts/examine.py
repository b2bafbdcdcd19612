"""What the records of a part of a source are: good with id, place and size, refused, or perhaps too long.

A large JSONL file is cut into spans that several processes examine at the same time; everything else is a stream of
pieces from one process. Both give the same records with the same places, so what is made of them cannot depend on how
they were read. Tokens are never counted here: whoever collects the pieces has the tokenizer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from draftmill.prompts.bad import BadRecord
from draftmill.prompts.files import Format, OnBytes, SourceFile
from draftmill.prompts.quick import parse_raw
from draftmill.prompts.read import Lines, Raw, read
from draftmill.prompts.record import ID_BYTES, Prompt, Rules

_SPAN_BYTES = 16 << 20
_PIECE_RECORDS = 4096

# What a chat template may add, in bytes and so in tokens of a byte-level tokenizer at most: a default system turn, the
# marks of a turn, the words around tools and their indentation.
_TEMPLATE_BYTES = 1024
_TURN_BYTES = 64
_TOOLS_BYTES = 2048
_TOOLS_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A file with the rules its records are read by."""

    file: SourceFile
    rules: Rules

    @property
    def by_lines(self) -> bool:
        """Whether any line can be read without those before it."""
        return self.file.format is Format.JSONL and not self.file.gzipped


class Refused(NamedTuple):
    """A bad record: its row, the kind of fault and the reason."""

    row: int
    kind: str
    reason: str


class Doubtful(NamedTuple):
    """A good record that may have too many tokens: its row and its canonical JSON."""

    row: int
    text: str


@dataclass(slots=True)
class Piece:
    """The records of a part of source number `source`, which ends at byte `stop` of the file.

    `refused` and `doubtful` are by the record's number in the piece; all that are not refused have, in order, an id,
    a position and a size. Rows count from the piece's begin, `lines` of which it holds, or from the file's (lines 0).
    """

    source: int
    stop: int = 0
    lines: int = 0
    records: int = 0
    ids: bytearray = field(default_factory=bytearray)
    positions: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("l"))
    refused: dict[int, Refused] = field(default_factory=dict)
    doubtful: dict[int, Doubtful] = field(default_factory=dict)

    def take(self, raw: Raw, rules: Rules, limit_tokens: int) -> None:
        """Examine one record."""
        try:
            prompt = parse_raw(raw, rules)
        except BadRecord as bad:
            self.refused[self.records] = Refused(raw.row, bad.kind, bad.reason)
        else:
            self.ids += prompt.id
            self.positions.append(raw.position)
            self.sizes.append(prompt.size)
            if most_tokens(prompt) > limit_tokens:
                self.doubtful[self.records] = Doubtful(raw.row, prompt.text)
        self.records += 1

    def id(self, number: int) -> bytes:
        """The id of the good record of that number."""
        return bytes(self.ids[number * ID_BYTES : (number + 1) * ID_BYTES])


@dataclass(frozen=True, slots=True)
class Span:
    """The lines of a source that begin in [start, stop) bytes; `count_only` if no more prompts are wanted."""

    number: int
    source: Source
    start: int
    stop: int
    limit_tokens: int
    count_only: bool


def spans(number: int, source: Source, limit_tokens: int, full: Callable[[], bool]) -> Iterator[Span]:
    """The spans that cover a source."""
    for start in range(0, source.file.size, _SPAN_BYTES):
        stop = min(start + _SPAN_BYTES, source.file.size)
        yield Span(number, source, start, stop, limit_tokens, full())


def examine(span: Span) -> Piece:
    """The records of a span. Raises UserError if the file cannot be read."""
    piece = Piece(span.number, span.stop)
    lines = Lines(span.source.file, span.start, span.stop)
    for raw in lines:
        if span.count_only:
            piece.records += 1
        else:
            piece.take(raw, span.source.rules, span.limit_tokens)
    piece.lines = lines.count
    return piece


def stream(
    number: int, source: Source, limit_tokens: int, full: Callable[[], bool], on_bytes: OnBytes | None
) -> Iterator[Piece]:
    """All records of a source in pieces, read in this process. Raises UserError for a fault of the file."""
    piece = Piece(number)
    for raw in read(source.file, source.rules.field, on_bytes):
        if full():
            piece.records += 1
        else:
            piece.take(raw, source.rules, limit_tokens)
        if piece.records >= _PIECE_RECORDS:
            yield piece
            piece = Piece(number)
    piece.stop = source.file.size
    yield piece


def most_tokens(prompt: Prompt) -> int:
    """The most tokens that a prompt can have: a byte-level tokenizer makes at most one token of a byte."""
    record = prompt.record
    if "input_ids" in record:
        return len(record["input_ids"])
    most = prompt.size + _TURN_BYTES * (len(record["messages"]) + 1) + _TEMPLATE_BYTES
    return most + (_TOOLS_BYTES + _TOOLS_GROWTH * prompt.size if "tools" in record else 0)
