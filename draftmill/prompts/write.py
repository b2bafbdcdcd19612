"""The second pass: the records of missing shards are read again and each shard is published as soon as it is complete.

A shard of one split is a run of that split's records, so at most a train and a held-out shard are open at a time.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from draftmill import __version__, layout
from draftmill.errors import UserError
from draftmill.prompts.bad import BadRecord
from draftmill.prompts.files import check_unchanged
from draftmill.prompts.read import read_at
from draftmill.prompts.record import Prompt, parse
from draftmill.prompts.scan import Progress, Scan, ShardEntry
from draftmill.schemas import PROMPTS, write_rows
from draftmill.store.base import Store
from draftmill.store.local import LocalStore

SPEC_VERSION = 1


def write_shards(scan: Scan, store: Store, missing: Set[str], progress: Progress | None = None) -> None:
    """Publish these shards of a scan. Raises UserError if a source changed since it was scanned."""
    wanted = [(entry, numbers) for entry, numbers in scan.shards if entry.name in missing]
    owner = array("l", [-1]) * len(scan.ids)
    for shard, (_, numbers) in enumerate(wanted):
        for number in numbers:
            owner[number] = shard
    rows: dict[int, list[dict[str, Any]]] = {}
    done, total = 0, sum(entry.rows for entry, _ in wanted)
    for number, row in _rows(scan, owner):
        shard = owner[number]
        rows.setdefault(shard, []).append(row)
        if len(rows[shard]) == wanted[shard][0].rows:
            _publish(store, wanted[shard][0], rows.pop(shard))
            done += wanted[shard][0].rows
            if progress is not None:
                progress("writing", done, total)
    check_unchanged(source.file for source in scan.sources)


def _rows(scan: Scan, owner: array[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    stop = 0
    for origin, source in enumerate(scan.sources):
        start = stop
        while stop < len(scan.ids) and scan.origin[stop] == origin:
            stop += 1
        numbers = [number for number in range(start, stop) if owner[number] >= 0]
        if not numbers:
            continue
        raws = read_at(source.file, [scan.positions[number] for number in numbers], source.rules.field)
        for number, raw in zip(numbers, raws, strict=True):
            prompt = _again(scan, number, raw.decode)
            yield number, {"prompt_id": prompt.prompt_id, "source": source.file.label, "record": prompt.text}


def _again(scan: Scan, number: int, decode: Any) -> Prompt:
    source = scan.sources[scan.origin[number]]
    try:
        prompt = parse(decode(), source.rules)
    except BadRecord:
        prompt = None
    if prompt is None or prompt.id != scan.ids[number]:
        raise UserError(f"{source.file.path} changed while it was read: run again when it is complete.")
    return prompt


def _publish(store: Store, entry: ShardEntry, rows: list[dict[str, Any]]) -> None:
    # Only what the shard itself is made of: the same shard must be the same bytes in every data set it is part of.
    provenance = {"stage": "prompts", "spec_version": SPEC_VERSION, "shard": entry.name, "draftmill": __version__}
    key = layout.prompts(entry.name)
    if isinstance(store, LocalStore):
        write_rows(store.path(key), PROMPTS, rows, provenance)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.parquet"
        write_rows(path, PROMPTS, rows, provenance)
        store.put(key, path.read_bytes())
