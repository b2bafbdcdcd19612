"""Data sets from elsewhere as completions tables: one shape for the audit, whatever the set looked like.

Records are read and made canonical by prompts/, so that what the audit accepts is what `draftmill import` and a config
take. Two things differ here: `input_ids` stay in columns, because a hundred thousand rows are to be judged in a
minute; and an answer without content is let through, because it is what the audit looks for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.audit import boundary
from draftmill.audit.token_rows import TokenRows, is_token_record
from draftmill.audit.tokens import TokenInfo
from draftmill.errors import UserError
from draftmill.prompts.bad import BadRecord
from draftmill.prompts.files import Format, OnBytes, SourceFile, find, opened
from draftmill.prompts.parquet import unsound
from draftmill.prompts.read import Raw, location, read
from draftmill.prompts.record import ANSWER_FIELDS, PROMPT_FIELDS, Record, parse_answered
from draftmill.schemas import COMPLETIONS, REJECTED

CHUNK_ROWS = 1024
UNKNOWN_TOKENS = TokenInfo()
_PLACEHOLDER = "an answer to be taken out again"


@dataclass(frozen=True, slots=True)
class Reading:
    """How a set is read: its prompt's column, and the tokenizer that renders messages, with what is known of it."""

    field: str | None = None
    tokenizer: Any = None
    template_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: TokenInfo = UNKNOWN_TOKENS


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of a set: completions (with a column `place`), rejected records, and which boundaries moved."""

    completions: pa.Table
    rejected: pa.Table
    moved: Sequence[bool]


def chunks(path: str, reading: Reading, on_bytes: OnBytes | None = None) -> Iterator[Chunk]:
    """A set chunk by chunk. Raises UserError for a fault of a file, and for messages without a tokenizer."""
    done = 0
    for file in find(path):
        heard = _after(on_bytes, done)
        yield from _columnar(file, reading, heard) if _is_columnar(file) else _records(file, reading, heard)
        done += file.size


def _after(on_bytes: OnBytes | None, done: int) -> OnBytes | None:
    return None if on_bytes is None else lambda count: on_bytes(done + count)


def _is_columnar(file: SourceFile) -> bool:
    return file.format is Format.PARQUET and kind_of(file) != "records"


def kind_of(file: SourceFile) -> str:
    """What a Parquet file holds: our "completions" or "rejected", "tokens" (input_ids, loss_mask), or "records"."""
    with opened(file) as stream:
        names = set(_open(file, stream).schema_arrow.names)
    for kind, columns in (("completions", COMPLETIONS.names), ("rejected", REJECTED.names)):
        if names.issuperset(columns):
            return kind
    return "tokens" if names.issuperset(("input_ids", "loss_mask")) else "records"


def _open(file: SourceFile, stream: Any) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(pa.PythonFile(stream, mode="r"))
    except (pa.ArrowException, OSError) as error:
        raise unsound(file.path, error) from None


def _columnar(file: SourceFile, reading: Reading, on_bytes: OnBytes | None) -> Iterator[Chunk]:
    kind = kind_of(file)
    wanted = {"completions": COMPLETIONS.names, "rejected": REJECTED.names, "tokens": ["input_ids", "loss_mask"]}[kind]
    with opened(file, on_bytes) as stream:
        parquet, row = _open(file, stream), 0
        try:
            # A column of its own naming the finish reason is believed.
            more = {"finish_reason"}.intersection(parquet.schema_arrow.names).difference(wanted)
            for batch in parquet.iter_batches(CHUNK_ROWS, columns=[*wanted, *more], use_threads=False):
                yield _chunk_of(pa.Table.from_batches([batch]), kind, file, row, reading)
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise unsound(file.path, error) from None


def _chunk_of(table: pa.Table, kind: str, file: SourceFile, row: int, reading: Reading) -> Chunk:
    if kind == "rejected":
        return Chunk(_with_place(COMPLETIONS.empty_table(), []), table.select(REJECTED.names).cast(REJECTED), ())
    places = [f"{file.path} row {row + 1 + number}" for number in range(table.num_rows)]
    if kind == "completions":
        ours = _with_place(table.select(COMPLETIONS.names).cast(COMPLETIONS), places)
        return Chunk(ours, REJECTED.empty_table(), [False] * table.num_rows)
    rows = TokenRows(file.label, reading.tokens)
    rows.add_table(table, places)
    return Chunk(*rows.tables(), rows.moved)


def _with_place(table: pa.Table, places: Sequence[str]) -> pa.Table:
    return table.append_column("place", pa.array(places, pa.string()))


def _records(file: SourceFile, reading: Reading, on_bytes: OnBytes | None) -> Iterator[Chunk]:
    raws = read(file, reading.field, on_bytes)
    while batch := list(islice(raws, CHUNK_ROWS)):
        rows = TokenRows(file.label, reading.tokens)
        for raw in batch:
            _add(rows, raw, location(file, raw), reading)
        yield Chunk(*rows.tables(), rows.moved)


def _add(rows: TokenRows, raw: Raw, place: str, reading: Reading) -> None:
    try:
        value = raw.decode()
        if reading.field is None and is_token_record(value):
            rows.add_record(value, place)
            return
        record = answered(value, reading.field)
    except BadRecord as bad:
        rows.reject(bad.kind, f"{place}: {bad.reason}")
        return
    if reading.tokenizer is None:
        raise UserError(f"{place} holds messages, which only their tokenizer can count: give one with --tokenizer.")
    try:
        rendered = boundary.render(reading.tokenizer, record, reading.template_args)
    except UserError as error:
        rows.reject("template_refused", f"{place}: {error}")
        return
    rows.add(rendered.ids, rendered.start, place, moved=rendered.moved)


def answered(value: Any, field: str | None) -> Record:
    """A raw record with an answer in canonical form; the answer may be empty. Raises BadRecord for any other fault."""
    try:
        return parse_answered(value, field).record
    except BadRecord as bad:
        filled = _filled(value, field)
        if filled is None:
            raise
        record = parse_answered(filled, field).record
        if record.get("answer", {}).get("content") != _PLACEHOLDER:
            raise bad from None
        return {**record, "answer": {**record["answer"], "content": ""}}


def _filled(value: Any, field: str | None) -> Record | None:
    """The record with a placeholder for an empty last turn or an empty answer column; None if there is no such."""
    if not isinstance(value, dict):
        return None
    for name in (field,) if field else PROMPT_FIELDS:
        turns = _turns(value.get(name))
        if turns and isinstance(turns[-1], dict) and _nothing(turns[-1].get("content", turns[-1].get("value"))):
            return {**value, name: [*turns[:-1], {**turns[-1], "content": _PLACEHOLDER}]}
    for name in ANSWER_FIELDS:
        if isinstance(value.get(name), str) and _nothing(value[name]):
            return {**value, name: _PLACEHOLDER}
    return None


def _turns(value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    return value if isinstance(value, list) else []


def _nothing(content: Any) -> bool:
    return content is None or content == [] or (isinstance(content, str) and not content.strip())
