"""Parquet objects: footers, columns, keys, and rows that must be neither lost nor doubled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftmill.catalog import Entry
from draftmill.errors import reason
from draftmill.integrity import said
from draftmill.integrity.findings import Unsound, require
from draftmill.prompts.record import ID_BYTES
from draftmill.prompts.shard import shard_name
from draftmill.schemas import COMPLETIONS, MIXED_COMPLETIONS, PROMPTS, PROVENANCE_KEY, REJECTED

# Prompt id, sample and source of a row.
Key = tuple[str, int, str]
SCHEMAS = {"prompts": (PROMPTS,), "completions": (COMPLETIONS, MIXED_COMPLETIONS), "rejected": (REJECTED,)}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a completions or rejected file, in its order, and what the file says of its making."""

    keys: list[Key]
    provenance: dict[str, Any]

    @property
    def samples(self) -> int:
        """Answers that each prompt without one of its own was to get."""
        return int(self.provenance["spec"]["sampling"]["samples"])


def read_prompts(path: Path, entry: Entry, *, deep: bool) -> dict[str, tuple[str, bool]]:
    """The prompts of a shard by id: source, and whether it brings its answer. Raises Unsound."""
    table, provenance = _read(path, "prompts", PROMPTS.names)
    inside = provenance.get("shard")
    require(inside == entry.shard, "name", f"shard {entry.shard}", f"shard {inside} inside")
    ids, sources, records = (table[name].to_pylist() for name in PROMPTS.names)
    named = shard_name(list(zip(ids, sources, strict=True)))
    require(named == entry.shard, "rows", f"the prompts that give {entry.shard}", f"prompts that give {named}")
    if deep:
        for prompt_id, record in zip(ids, records, strict=True):
            _check_id(prompt_id, record)
    return {i: (s, _has_answer(r)) for i, s, r in zip(ids, sources, records, strict=True)}


def _check_id(prompt_id: str, record: str) -> None:
    import hashlib

    own = hashlib.sha256(record.encode()).digest()[:ID_BYTES].hex()
    require(own == prompt_id, "rows", f"the prompt of id {prompt_id}", f"one of id {own}")


def _has_answer(record: str) -> bool:
    try:
        value = json.loads(record)
    except ValueError:
        raise Unsound("rows", "JSON in the column record", "other text") from None
    return "answer" in value or "input_ids" in value


def read_rows(path: Path, entry: Entry, *, deep: bool) -> Rows:
    """The keys of a completions or rejected file; with `deep` every column is decoded. Raises Unsound."""
    table, provenance = _read(path, entry.kind, None if deep else ["prompt_id", "sample", "source"])
    said.check(entry, provenance)
    columns = (table[name].to_pylist() for name in ("prompt_id", "sample", "source"))
    rows = Rows(list(zip(*columns, strict=True)), provenance)
    again = [key for key, count in Counter(key[:2] for key in rows.keys).items() if count > 1]
    require(not again, "rows", "one row for each prompt and sample", f"{len(again)} keys twice, such as {again[:1]}")
    return rows


def read_tokens(path: Path) -> tuple[list[int], pa.Table]:
    """Tokens of each row of a completions file, and the columns that hold them. Raises Unsound."""
    table, _ = _read(path, "completions", ["prompt_ids", "output_ids", "loss_mask"])
    lengths = pc.add(pc.list_value_length(table["prompt_ids"]), pc.list_value_length(table["output_ids"]))
    return lengths.to_pylist(), table


def schema_of(path: Path, kind: str) -> pa.Schema:
    """Which of the schemas of its kind a file has. Raises Unsound if none, OSError or an error of Arrow if unreadable."""
    found, known = pq.read_schema(path.absolute()).remove_metadata(), SCHEMAS[kind]
    same = next((schema for schema in known if found.equals(schema)), None)
    if same is None:
        raise Unsound("schema", ", ".join(known[0].names), _difference(found.names, known[0].names))
    return same


def _read(path: Path, kind: str, columns: Sequence[str] | None) -> tuple[pa.Table, dict[str, Any]]:
    """Columns (all without a choice) and provenance of a file. Raises Unsound, OSError if the system refuses it."""
    try:
        names = schema_of(path, kind).names
        with pq.ParquetFile(path.absolute()) as file:
            raw = (file.metadata.metadata or {}).get(PROVENANCE_KEY)
            table = file.read(columns=names if columns is None else list(columns))
            require(
                table.num_rows == file.metadata.num_rows, "rows", f"{file.metadata.num_rows} rows", f"{table.num_rows}"
            )
        provenance = dict(json.loads(raw)) if raw else {}
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        # Arrow raises OSError for damaged pages too, then without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Unsound("unreadable", "a whole Parquet file", reason(error)) from None
    require(bool(provenance), "provenance", "the object's provenance inside", "none")
    return table, provenance


def _difference(found: Sequence[str], expected: Sequence[str]) -> str:
    return ", ".join(found) if list(found) != list(expected) else "the same names with other types"


def check_conserved(prompts: dict[str, tuple[str, bool]], completions: Rows, rejected: Rows) -> None:
    """Prompts times samples must be completions plus rejected rows, each once. Raises Unsound."""
    expected = {
        (prompt_id, sample, source)
        for prompt_id, (source, answered) in prompts.items()
        for sample in range(1 if answered else completions.samples)
    }
    good, bad = set(completions.keys), set(rejected.keys)
    _same(good | bad, expected)
    both = good & bad
    require(not both, "rows", "each row completed or rejected", f"{len(both)} rows in both files, {_some(both)}")


def _same(found: set[Key], expected: set[Key]) -> None:
    lost, foreign = expected - found, found - expected
    whole = f"{len(expected)} rows of the shard's prompts"
    require(not lost, "rows", whole, f"{len(lost)} lost, {_some(lost)}")
    require(not foreign, "rows", whole, f"{len(foreign)} of other prompts, {_some(foreign)}")


def _some(keys: Iterable[Key]) -> str:
    first = min(keys, default=None)
    return "" if first is None else f"such as {first[0]} sample {first[1]}"
