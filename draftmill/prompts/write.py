"""The second pass: the records of missing shards are read again and each shard is published as soon as it is complete.

Where lines can be sought, a shard is a task by itself, for several processes if there are. Other files are read once for
all their shards: a shard of one split is a run of that split's records, so at most a train and a held-out shard are
open at a time.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from draftmill import __version__, layout
from draftmill.errors import UserError
from draftmill.prompts.bad import BadRecord
from draftmill.prompts.examine import Source
from draftmill.prompts.files import check_unchanged
from draftmill.prompts.quick import parse_raw
from draftmill.prompts.read import Raw, read_at
from draftmill.prompts.record import Prompt
from draftmill.prompts.scan import Progress, Scan, ShardEntry
from draftmill.prompts.workers import Workers
from draftmill.schemas import PROMPTS, write_rows
from draftmill.store.base import Store
from draftmill.store.local import LocalStore

SPEC_VERSION = 1
# Uploads at a time: enough to hide the answer time of S3 behind the reading.
_UPLOADS = 4

Member = tuple[ShardEntry, "array[int]"]


@dataclass(frozen=True, slots=True)
class Run:
    """Records of one source in order: positions and ids."""

    source: Source
    positions: array[int]
    ids: list[bytes]


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard to write: its name, its records by source, and the file to write them to."""

    name: str
    runs: tuple[Run, ...]
    path: Path


def write_shards(
    scan: Scan, store: Store, missing: Set[str], progress: Progress | None = None, workers: Workers | None = None
) -> None:
    """Publish these shards of a scan. Raises UserError if a source changed since it was scanned."""
    wanted = [member for member in scan.shards if member[0].name in missing]
    alone = [member for member in wanted if all(scan.sources[n].by_lines for n in _origins(scan, member[1]))]
    names = {entry.name for entry, _ in alone}
    together = [member for member in wanted if member[0].name not in names]
    done, total = 0, sum(entry.rows for entry, _ in wanted)
    with _places(store) as (place, publish):
        tasks = (Shard(entry.name, _runs(scan, numbers), place(entry.name)) for entry, numbers in alone)
        written = map(write_shard, tasks) if workers is None else workers.map(write_shard, tasks)
        for name, rows in chain(written, _write_together(scan, together, place)):
            publish(name)
            done += rows
            if progress is not None:
                progress("writing", done, total)
    check_unchanged(source.file for source in scan.sources)


def _origins(scan: Scan, numbers: array[int]) -> set[int]:
    return {scan.origin[number] for number in numbers}


def _runs(scan: Scan, numbers: array[int]) -> tuple[Run, ...]:
    runs: dict[int, Run] = {}
    for number in numbers:
        origin = scan.origin[number]
        run = runs.setdefault(origin, Run(scan.sources[origin], array("q"), []))
        run.positions.append(scan.positions[number])
        run.ids.append(scan.ids[number])
    return tuple(runs.values())


def write_shard(shard: Shard) -> tuple[str, int]:
    """Write one shard to its file and say its name and rows. Raises UserError if a source changed."""
    rows = [row for run in shard.runs for row in _rows(run)]
    _write(shard.name, rows, shard.path)
    return shard.name, len(rows)


def _rows(run: Run) -> Iterator[dict[str, Any]]:
    raws = read_at(run.source.file, run.positions, run.source.rules.field)
    for prompt_id, raw in zip(run.ids, raws, strict=True):
        prompt = _again(run.source, prompt_id, raw)
        yield {"prompt_id": prompt.prompt_id, "source": run.source.file.label, "record": prompt.text}


def _again(source: Source, prompt_id: bytes, raw: Raw) -> Prompt:
    try:
        prompt = parse_raw(raw, source.rules)
    except BadRecord:
        prompt = None
    if prompt is None or prompt.id != prompt_id:
        raise UserError(f"{source.file.path} changed while it was read: run again when it is complete.")
    return prompt


def _write(name: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    # Only what the shard itself is made of: the same shard must be the same bytes in every data set it is part of.
    provenance = {"stage": "prompts", "spec_version": SPEC_VERSION, "shard": name, "draftmill": __version__}
    write_rows(path, PROMPTS, rows, provenance)


def _write_together(scan: Scan, wanted: Sequence[Member], place: Callable[[str], Path]) -> Iterator[tuple[str, int]]:
    owner = {number: shard for shard, (_, numbers) in enumerate(wanted) for number in numbers}
    rows: dict[int, list[dict[str, Any]]] = {}
    for run, numbers in _by_source(scan, sorted(owner)):
        for number, row in zip(numbers, _rows(run), strict=True):
            entry, _ = wanted[owner[number]]
            here = rows.setdefault(owner[number], [])
            here.append(row)
            if len(here) == entry.rows:
                _write(entry.name, rows.pop(owner[number]), place(entry.name))
                yield entry.name, entry.rows


def _by_source(scan: Scan, numbers: Sequence[int]) -> Iterator[tuple[Run, Sequence[int]]]:
    start = 0
    for run in _runs(scan, array("l", numbers)):
        stop = start + len(run.ids)
        yield run, numbers[start:stop]
        start = stop


@contextmanager
def _places(store: Store) -> Iterator[tuple[Callable[[str], Path], Callable[[str], None]]]:
    """Where to write a shard of that name, and what is to be done when it is written."""
    if isinstance(store, LocalStore):
        yield lambda name: store.path(layout.prompts(name)), lambda name: None
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_UPLOADS) as pool:
        uploads = _Uploads(store, pool)
        yield lambda name: Path(folder) / name, lambda name: uploads.start(name, Path(folder) / name)
        uploads.finish(0)


class _Uploads:
    """Shards on their way to a store; never more than a few lie on this machine."""

    def __init__(self, store: Store, pool: ThreadPoolExecutor) -> None:
        self._store, self._pool = store, pool
        self._flying: deque[Future[None]] = deque()

    def start(self, name: str, path: Path) -> None:
        """Upload a written shard and remove its file. Raises what an earlier upload raised."""
        self._flying.append(self._pool.submit(self._upload, name, path))
        self.finish(2 * _UPLOADS)

    def finish(self, but: int) -> None:
        """Wait until at most so many are left."""
        while len(self._flying) > but:
            self._flying.popleft().result()

    def _upload(self, name: str, path: Path) -> None:
        self._store.publish(layout.prompts(name), path)
        path.unlink()
