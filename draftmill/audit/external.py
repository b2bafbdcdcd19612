"""Auditing and importing data sets from elsewhere: what `draftmill audit PATH` and `draftmill import PATH` do.

People have such sets already and should know in a minute, on any machine, whether they are worth a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.audit import foreign
from draftmill.audit.foreign import Reading
from draftmill.audit.result import AuditResult, audit_tables, combine
from draftmill.audit.tokens import TokenInfo, token_info
from draftmill.canonical import canonical_json
from draftmill.config import AuditConfig, TargetConfig, parse, read_yaml
from draftmill.errors import UserError
from draftmill.prompts.bad import BadRecord
from draftmill.prompts.files import OnBytes, SourceFile, find
from draftmill.prompts.read import read
from draftmill.prompts.record import parse_answered
from draftmill.store.local import publishing

# What a file with limits alone leaves out of a whole configuration.
_UNSAID: dict[str, Any] = {
    "device": "cpu",
    "store": ".",
    "target": {"model": ""},
    "prompts": {"sources": [{"path": ""}]},
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What an audit of a foreign set is held against and read with."""

    limits: AuditConfig
    reading: Reading


def settings(tokenizer: str | None, config: Path | None, field: str | None = None) -> Settings:
    """Limits and tokenizer from a configuration (a whole one, or one with `audit` and `target` alone) and an option.

    `tokenizer` is a folder, or a hub id with its commit as ID@COMMIT; it goes before the configuration's target. Raises
    UserError if the file is wrong or the tokenizer cannot be loaded.
    """
    values = {} if config is None else read_yaml(config)
    checked = parse({**_UNSAID, **values})
    target = checked.target if "target" in values else None
    if tokenizer is not None:
        model, _, revision = tokenizer.partition("@")
        arguments = checked.target.chat_template_args
        target = TargetConfig.model_validate(
            {"model": model, "revision": revision or None, "chat_template_args": arguments}
        )
    return Settings(checked.audit, Reading(field) if target is None else _reading(target, field))


def _reading(target: TargetConfig, field: str | None) -> Reading:
    from draftmill.target.tokenizer import generation_config, load_tokenizer, stop_ids

    tokenizer = load_tokenizer(target)
    ends = stop_ids(tokenizer, generation_config(target))
    tokens = token_info(tokenizer, ends, target.chat_template_args)
    return Reading(field, tokenizer, target.chat_template_args, tokens)


def audit_path(path: str, chosen: Settings, on_bytes: OnBytes | None = None) -> AuditResult:
    """Audit every row of a file, folder or glob. Raises UserError if it cannot be read."""
    tokens, limits = chosen.reading.tokens, chosen.limits
    parts = [
        audit_tables(path, chunk.completions, chunk.rejected, limits, tokens, boundary_moved=chunk.moved)
        for chunk in _sound(path, chosen.reading, on_bytes)
    ]
    return combine(path, parts, limits, {"path": path, "tokenizer": _knows(tokens)})


def _sound(path: str, reading: Reading, on_bytes: OnBytes | None) -> Iterator[foreign.Chunk]:
    for chunk in foreign.chunks(path, reading, on_bytes):
        if chunk.completions.num_rows or chunk.rejected.num_rows:
            yield chunk


def _knows(tokens: TokenInfo) -> str:
    return "none" if tokens.vocabulary is None else f"{tokens.vocabulary} ids, end {sorted(tokens.eos_ids)}"


def size(path: str) -> int:
    """Bytes that an audit will read."""
    return sum(file.size for file in find(path))


def write_source(path: str, out: Path, field: str | None) -> tuple[int, int]:
    """Write every answered record of a set to `out` as a source for `answers: keep`; rows written and left out.

    `out` is JSONL or Parquet by its suffix. Records are messages that end with the answer, and tools, or input_ids
    with loss_mask. In Parquet, messages and tools are JSON texts, because their members differ from row to row.
    """
    if out.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{out} must end in .jsonl or .parquet: that decides what is written.")
    left_out = 0

    def good() -> Iterator[dict[str, Any]]:
        nonlocal left_out
        for value in _values(path, field):
            try:
                if isinstance(value, BadRecord):
                    raise value
                yield _plain(parse_answered(value, field).record)
            except BadRecord:
                left_out += 1

    with publishing(out) as temporary:
        rows = _write_lines(temporary, good()) if out.suffix == ".jsonl" else _write_parquet(temporary, good())
        if not rows:
            raise UserError(f"{path} holds no record that can be imported; nothing was written.")
    return rows, left_out


def _values(path: str, field: str | None) -> Iterator[Any]:
    for file in find(path):
        if file.path.endswith(".parquet") and foreign.kind_of(file) in ("completions", "rejected"):
            yield from _ours(file)
            continue
        for raw in read(file, field):
            try:
                yield raw.decode()
            except BadRecord as bad:
                yield bad


def _ours(file: SourceFile) -> Iterator[dict[str, Any]]:
    for chunk in foreign.chunks(file.path, Reading()):
        for row in chunk.completions.select(["prompt_ids", "output_ids", "loss_mask"]).to_pylist():
            mask = row["loss_mask"] if row["loss_mask"] is not None else [True] * len(row["output_ids"])
            loss_mask = [0] * len(row["prompt_ids"]) + [int(bit) for bit in mask]
            yield {"input_ids": row["prompt_ids"] + row["output_ids"], "loss_mask": loss_mask}


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """The record as a source spells it: the answer is the last turn."""
    if "input_ids" in record:
        return record
    rest = {name: value for name, value in record.items() if name != "answer"}
    return {**rest, "messages": [*record["messages"], record["answer"]]}


def _write_lines(path: Path, records: Iterator[dict[str, Any]]) -> int:
    rows = 0
    with path.open("w", encoding="utf-8") as stream:
        for rows, record in enumerate(records, start=1):  # noqa: B007
            stream.write(canonical_json(record) + "\n")
    return rows


_PARQUET = pa.schema(
    [
        pa.field("messages", pa.string()),
        pa.field("tools", pa.string()),
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.int8())),
    ]
)


def _write_parquet(path: Path, records: Iterator[dict[str, Any]]) -> int:
    rows = 0
    with pq.ParquetWriter(path, _PARQUET, compression="zstd") as writer:
        batch: list[dict[str, Any]] = []
        for rows, record in enumerate(records, start=1):  # noqa: B007
            texts: dict[str, Any] = {
                name: canonical_json(record[name]) for name in ("messages", "tools") if name in record
            }
            batch.append({**record, **texts})
            if len(batch) == foreign.CHUNK_ROWS:
                writer.write_table(pa.Table.from_pylist(batch, schema=_PARQUET))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, schema=_PARQUET))
    return rows
