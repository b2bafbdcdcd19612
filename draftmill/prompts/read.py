"""Raw records of a file, one after another, each with the place it stands at.

Reading is streamed, and a JSONL line is handed on undecoded: who only counts or skips records does not pay for parsing
them. A fault of one record becomes that record's value and is raised when it is decoded; a fault of the file is a
UserError at once, because everything behind it would be lost.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from gzip import BadGzipFile
from typing import IO, Any, NamedTuple

from draftmill.errors import UserError
from draftmill.prompts.bad import BadRecord, Kind
from draftmill.prompts.files import Format, OnBytes, SourceFile, opened, unreadable
from draftmill.prompts.json_list import looks_like_lines, records_of_json
from draftmill.prompts.parquet import records_of_parquet
from draftmill.prompts.record import check_columns

_UNITS = {Format.JSONL: "line", Format.JSON: "record", Format.CSV: "row", Format.PARQUET: "row"}
_BOM = b"\xef\xbb\xbf"


class Raw(NamedTuple):
    """One record as it stands in its file.

    `row` counts from 1 (lines of JSONL, records of the others). `position` is what `read_at` takes: the byte offset of
    a JSONL line in the unpacked file, the row otherwise. `value` is undecoded JSON, a decoded value, or its fault.
    """

    row: int
    position: int
    value: Any

    def decode(self) -> Any:
        """The record's value. Raises BadRecord if it has none."""
        if isinstance(self.value, bytes):
            return decode_json(self.value)
        if isinstance(self.value, BadRecord):
            raise self.value
        return self.value


def location(file: SourceFile, raw: Raw) -> str:
    """Where a record stands, for people: 'data/chat.jsonl line 17'."""
    return place(file, raw.row)


def place(file: SourceFile, row: int) -> str:
    """Where the record of that row stands, for people."""
    return f"{file.path} {_UNITS[file.format]} {row}"


def read(file: SourceFile, field: str | None = None, on_bytes: OnBytes | None = None) -> Iterator[Raw]:
    """Every record of a file; `field` is the column that must be there. Raises UserError for a fault of the file."""
    count = 0
    for count, raw in enumerate(_guarded(file, _records(file, field, on_bytes)), start=1):  # noqa: B007
        yield raw
    if not count:
        raise no_records(file)


def no_records(file: SourceFile) -> UserError:
    """The sentence for a file without one record."""
    return UserError(f"{file.path} holds no records: fill it or take it out of prompts.sources.")


class Lines:
    """The records of an unpacked JSONL file whose lines begin in [start, stop) bytes; rows count from `start`.

    Every line belongs to exactly one of several spans side by side. `count` is how many lines were read so far, blank
    ones too. Iterating raises UserError like read().
    """

    def __init__(self, file: SourceFile, start: int, stop: int) -> None:
        self._file, self._start, self._stop = file, start, stop
        self.count = 0

    def __iter__(self) -> Iterator[Raw]:
        return _guarded(self._file, self._records())

    def _records(self) -> Iterator[Raw]:
        with opened(self._file) as stream:
            position = self._start
            if position:
                stream.seek(position - 1)
                position += len(stream.readline()) - 1
            while position < self._stop and (line := stream.readline()):
                self.count += 1
                if not line.isspace():
                    yield Raw(self.count, position, _line(line, position))
                position += len(line)


def read_at(file: SourceFile, positions: Sequence[int], field: str | None = None) -> Iterator[Raw]:
    """The records at these positions (ascending). Lines are sought, everything else is read up to the last one."""
    return _guarded(file, _records_at(file, positions, field))


def _guarded(file: SourceFile, records: Iterator[Raw]) -> Iterator[Raw]:
    try:
        yield from records
    except EOFError:
        raise UserError(f"{file.path} is a truncated gzip file: copy or download it again.") from None
    except (BadGzipFile, zlib.error):
        raise UserError(f"{file.path} is not a sound gzip file: copy or download it again.") from None
    except OSError as error:
        raise unreadable(file.path, error) from None


def _records(file: SourceFile, field: str | None, on_bytes: OnBytes | None) -> Iterator[Raw]:
    with opened(file, on_bytes) as stream:
        if file.format is Format.PARQUET:
            yield from _numbered(records_of_parquet(file.path, stream, field))
        elif file.format is Format.CSV:
            yield from _numbered(_records_of_csv(file.path, stream, field))
        elif file.format is Format.JSON and not looks_like_lines(stream, field):
            yield from _numbered(records_of_json(file.path, stream))
        else:
            yield from _lines(stream)


def _numbered(values: Iterator[Any]) -> Iterator[Raw]:
    return (Raw(row, row, value) for row, value in enumerate(values, start=1))


def _records_at(file: SourceFile, positions: Sequence[int], field: str | None) -> Iterator[Raw]:
    with opened(file) as stream:
        if file.format is Format.JSONL or (file.format is Format.JSON and looks_like_lines(stream, field)):
            for row, position in enumerate(positions, start=1):
                stream.seek(position)
                yield Raw(row, position, _line(stream.readline(), position))
            return
    wanted = set(positions)
    for raw in _records(file, field, None):
        if raw.position in wanted:
            yield raw
        if raw.position >= positions[-1]:
            return


def _lines(stream: IO[bytes]) -> Iterator[Raw]:
    position = 0
    for row, line in enumerate(stream, start=1):
        if not line.isspace():
            yield Raw(row, position, _line(line, position))
        position += len(line)


def _line(line: bytes, position: int) -> bytes:
    return line.removeprefix(_BOM) if position == 0 else line


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def decode_json(data: bytes) -> Any:
    """The value of one JSON text. Raises BadRecord: broken JSON, invalid UTF-8, a NUL byte."""
    if b"\0" in data:
        raise BadRecord(Kind.NUL_BYTE, f"a NUL byte stands at byte {data.index(0) + 1}")
    try:
        return _DECODER.decode(data.decode().rstrip())
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} ({data[error.start]:#04x}) is not valid UTF-8"
        raise BadRecord(Kind.INVALID_UTF8, reason) from None
    except json.JSONDecodeError as error:
        raise BadRecord(Kind.BROKEN_JSON, f"broken JSON ({error.msg} at column {error.colno})") from None
    except ValueError as error:
        raise BadRecord(Kind.BROKEN_JSON, f"broken JSON ({error})") from None
    except RecursionError:
        raise BadRecord(Kind.BROKEN_JSON, "broken JSON (it is nested too deeply)") from None


def _records_of_csv(path: str, stream: IO[bytes], field: str | None) -> Iterator[Any]:
    csv.field_size_limit(sys.maxsize)
    # Bytes that are no UTF-8 become lone surrogates here and are refused row by row when encoded again.
    with io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        rows = _rows_of_csv(path, text)
        header = next(rows, [])
        if isinstance(header, BadRecord):
            raise UserError(f"{path} has no sound header: {header.reason}; correct its first line.")
        check_columns(path, header, field)
        yield from (cells if isinstance(cells, BadRecord) else _row(header, cells) for cells in rows)


def _rows_of_csv(path: str, text: io.TextIOWrapper) -> Iterator[list[str] | BadRecord]:
    rows = csv.reader(text, strict=True)
    while True:
        started = rows.line_num + 1
        try:
            cells = next(rows, None)
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise UserError(f"{path} line {started}: a quoted cell is never closed; close it.") from None
            yield BadRecord(Kind.BROKEN_CSV, f"broken CSV ({error})")
            continue
        if cells is None:
            return
        if cells:
            yield cells


def _row(header: list[str], cells: list[str]) -> Any:
    if len(cells) != len(header):
        return BadRecord(Kind.BROKEN_CSV, f"the row has {len(cells)} cells and the header has {len(header)}")
    return {name: cell for name, cell in zip(header, cells, strict=True) if cell}
