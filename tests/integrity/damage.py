"""Ways to spoil an object, and to make its record agree with it, as if the job itself had made it so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftmill import layout
from draftmill.canonical import canonical_json
from draftmill.catalog import identify
from draftmill.integrity.reader import Reader
from draftmill.integrity.verify import Options, verify
from draftmill.records import content_of, read_record, write_record
from draftmill.schemas import read_provenance, read_rows, write_rows
from draftmill.store.local import LocalStore


def found(store: LocalStore, **options: Any) -> set[tuple[str, str]]:
    """Keys and kinds of what verify finds."""
    return {(finding.key, finding.what) for finding in verify(Reader(store), Options(**options)).findings}


def rerecord(store: LocalStore, key: str) -> None:
    """Let the record of an object's job hold its present bytes."""
    entry = identify(key)
    assert entry is not None
    record = read_record(store, layout.record(entry.stage, entry.name))
    assert record is not None
    outputs = {**record.outputs, key: content_of(store.path(key))}
    write_record(store, record.model_copy(update={"outputs": outputs}))


def edit_rows(path: Path, schema: Any, edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    write_rows(path, schema, edit(read_rows(path, schema)), read_provenance(path))


def edit_states(path: Path, edit: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """Change tensors and metadata of a shard of hidden states, as no writer of ours would."""
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["draftmill"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    edit(tensors, metadata)
    save_file(tensors, path, metadata={"draftmill": canonical_json(metadata)})


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    edit(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
