"""The Parquet contracts and the one way such a file is written and read.

A table is built whole in memory, written to a temporary file beside its place, read back, and renamed: a reader sees a
complete file or none. Everything in it is a function of the inputs, so no time, host or rate may enter; the provenance
(stage spec, fingerprints, versions) travels as one JSON value in the file's own metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftmill.canonical import canonical_json
from draftmill.errors import UserError, reason
from draftmill.store.local import publishing

PROVENANCE_KEY = b"draftmill"

PROMPTS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        # Canonical JSON: {"messages": [...], "tools": [...]?, "answer": {...}?} or {"input_ids": [...], "loss_mask": [...]}.
        pa.field("record", pa.string(), nullable=False),
    ]
)

# loss_mask covers output_ids; null means that every output token is trained on, the rule for generated rows.
COMPLETIONS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("output_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
    ]
)

# Where several settings are mixed (generate.mix) each row says which it was asked under; "" is that of `generate` itself.
MIXED_COMPLETIONS = COMPLETIONS.append(pa.field("setting", pa.string(), nullable=False))

REJECTED = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)

Row = dict[str, Any]


def write_rows(path: Path, schema: pa.Schema, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]) -> None:
    """Publish rows as one Parquet file with its provenance; the footer is read back before the rename."""
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    table = table.replace_schema_metadata({PROVENANCE_KEY: canonical_json(provenance).encode()})
    with publishing(path) as temporary:
        # A relative path could be taken for a URI: `run:2/completions` is a folder too.
        place = temporary.absolute()
        pq.write_table(table, place, compression="zstd", row_group_size=4096, store_schema=True)
        written = pq.read_metadata(place).num_rows
        if written != len(rows):
            raise OSError(f"{path}: {len(rows)} rows were written but the footer counts {written}")


def read_rows(path: Path, schema: pa.Schema) -> list[Row]:
    """All rows of a Parquet file of ours. Raises UserError if it is unreadable or lacks a column."""
    rows: list[Row] = read_table(path, schema).to_pylist()
    return rows


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """A Parquet file of ours as a table with exactly the schema's columns. Raises UserError like read_rows."""
    try:
        return pq.read_table(path.absolute(), columns=schema.names).cast(schema)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} is not a readable {'/'.join(schema.names[:2])} file ({reason(error)}): delete it and build again."
        ) from None


def read_completions(path: Path) -> pa.Table:
    """A completions file as a table with the columns of COMPLETIONS, for counting by group.

    Where settings were mixed, a row's group is its source and its setting: "source · setting" stands for its source.
    Raises UserError like read_rows.
    """
    table = read_table(path, COMPLETIONS)
    if "setting" not in pq.read_schema(path.absolute()).names:
        return table
    settings = read_table(path, MIXED_COMPLETIONS)["setting"]
    groups = pc.binary_join_element_wise(table["source"], settings, " · ")
    plain = pc.equal(settings, "")
    found = pc.if_else(plain, table["source"], groups)
    return table.set_column(table.schema.get_field_index("source"), COMPLETIONS.field("source"), found)


def read_provenance(place: Path | BinaryIO) -> dict[str, Any]:
    """The provenance a Parquet file of ours carries, of which the footer is enough; empty if it carries none."""
    found = pq.read_metadata(place.absolute() if isinstance(place, Path) else place).metadata
    raw = (found or {}).get(PROVENANCE_KEY)
    return dict(json.loads(raw)) if raw else {}


def iterate_loss_masks(rows: Sequence[Row]) -> Iterator[list[bool]]:
    """For each completions row the mask over its output_ids."""
    for row in rows:
        yield row["loss_mask"] if row["loss_mask"] is not None else [True] * len(row["output_ids"])
