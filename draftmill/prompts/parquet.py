"""Raw records of a Parquet file, batch by batch, only the columns that can matter.

Parquet writes every field of a struct into every row, absent ones as null, so nulls are left out: a record is then the
same whether it came from Parquet or JSONL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from draftmill.errors import UserError
from draftmill.prompts.bad import BadRecord, Kind
from draftmill.prompts.record import COLUMNS, check_columns

_BATCH = 512


def records_of_parquet(path: str, stream: IO[bytes], field: str | None) -> Iterator[Any]:
    """Each row as an object of its columns. Raises UserError if the file is broken or lacks the prompt's column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.PythonFile(stream, mode="r"))
        names = file.schema_arrow.names
        check_columns(path, names, field)
        used = [name for name in names if name in COLUMNS or name == field]
        for batch in file.iter_batches(batch_size=_BATCH, columns=used, use_threads=False):
            yield from _rows(batch)
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise unsound(path, error) from None


def unsound(path: str, error: Exception) -> UserError:
    """The sentence for a file that pyarrow cannot read."""
    reason = " ".join(str(error).split()).rstrip(".")
    return UserError(f"{path} is not a sound Parquet file ({reason}): copy or download it again.")


def _rows(batch: Any) -> Iterator[Any]:
    try:
        yield from map(without_nulls, batch.to_pylist())
    except UnicodeDecodeError:
        yield from (_row(batch.slice(number, 1)) for number in range(batch.num_rows))


def _row(single: Any) -> Any:
    try:
        return without_nulls(single.to_pylist()[0])
    except UnicodeDecodeError as error:
        reason = f"a text holds the byte {error.object[error.start]:#04x}, which is not valid UTF-8"
        return BadRecord(Kind.INVALID_UTF8, reason)


def without_nulls(value: Any) -> Any:
    """The value with every null member of every object left out."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return value if not value or isinstance(value[0], int) else [without_nulls(item) for item in value]
    return value
