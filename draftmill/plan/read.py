"""The one look at the store that a plan takes: a listing, some heartbeats and records, and old objects' specs.

Nothing is written. What is read is bounded: the listing, the index, and at most a few hundred small objects.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill import layout
from draftmill.catalog import Entry, identify
from draftmill.config import Config
from draftmill.errors import UserError
from draftmill.graph import Graph
from draftmill.plan.earlier import Earlier, objects_of, records_of
from draftmill.plan.jobs import GPU_STAGES, STAGES
from draftmill.plan.plan import plan
from draftmill.plan.rates import Done, Measured, Pilot, Size, rates_of
from draftmill.plan.types import Plan
from draftmill.prompts.index import kin
from draftmill.provenance import read as read_provenance
from draftmill.records import read_record
from draftmill.store.base import ObjectInfo, Store
from draftmill.store.local import LocalStore
from draftmill.waits import Span, waits
from draftmill.workflow import graph_of

# The newest jobs of a stage; more would hardly narrow an interval and are a request each.
_JOBS_READ = 24
# Earlier fingerprints of a stage that are looked into.
_SPECS_READ = 3
# Formats with a spec inside; a drafter's weights have theirs in the JSON beside them.
_WITH_SPEC, _DRAFTER_WITH_SPEC = (".json", ".parquet", ".safetensors"), (".json",)
# A remote object larger than this is not fetched for its spec; a smaller one of the same job often has it too.
_FETCH_BYTES = 64 << 20


def plan_of(config: Config, store: Store) -> Plan:
    """What a build of a configuration would do now. Raises UserError like a build would at its start."""
    listing = store.list()
    graph = graph_of(config, store, listing)
    objects = objects_of(listing)
    earlier = Earlier(objects, records_of(listing), _specs(store, listing, objects, graph.specs.fp))
    measured = Measured(_done(graph, store, listing), _pilot(graph, store), _completions(graph, listing, objects))
    return plan(
        graph, listing, rates_of(graph, measured), earlier=earlier, kin=kin(graph.index, store), store=store.url
    )


def _specs(
    store: Store,
    listing: Mapping[str, ObjectInfo],
    objects: Mapping[str, Sequence[Entry]],
    present: Mapping[str, str],
) -> dict[tuple[str, str], Mapping[str, Any]]:
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for stage in STAGES:
        others = [entry for entry in objects.get(stage, ()) if entry.fp != present[stage]]
        for fp in list(dict.fromkeys(entry.fp for entry in others))[:_SPECS_READ]:
            spec = _spec(store, listing, [entry for entry in others if entry.fp == fp])
            if spec:
                found[stage, fp] = spec
    return found


def _spec(store: Store, listing: Mapping[str, ObjectInfo], entries: Sequence[Entry]) -> Mapping[str, Any]:
    """The spec inside the smallest object that can hold one; empty if it is too large to fetch or not readable."""
    formats = _DRAFTER_WITH_SPEC if any(entry.kind == "drafter" for entry in entries) else _WITH_SPEC
    able = [entry.key for entry in entries if entry.key.endswith(formats)]
    key = min(able, key=lambda key: listing[key].size, default=None)
    if key is None or not (isinstance(store, LocalStore) or listing[key].size <= _FETCH_BYTES):
        return {}
    with tempfile.TemporaryDirectory(prefix="draftmill-") as folder:
        try:
            return dict(read_provenance(_file(store, key, Path(folder)))["spec"])
        except (UserError, KeyError, TypeError, ValueError):  # gone or damaged: the plan then names no setting
            return {}


def _file(store: Store, key: str, folder: Path) -> Path:
    if isinstance(store, LocalStore):
        return store.path(key)
    path = folder / Path(key).name
    store.fetch(key, path)
    return path


def _pilot(graph: Graph, store: Store) -> Pilot | None:
    if graph.pilot() not in graph.present:
        return None
    try:
        record = json.loads(store.get(graph.pilot()))
        names = ("tokens", "output_tokens", "completions_bytes")
        return Pilot(*(int(record[name]) / int(record["rows"]) for name in names))
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        return None


def _completions(
    graph: Graph, listing: Mapping[str, ObjectInfo], objects: Mapping[str, Sequence[Entry]]
) -> tuple[Size, ...]:
    rows = {shard.name: shard.rows * graph.config.generate.samples for shard in graph.index.shards}
    made = (entry for entry in objects.get("generate", ()) if entry.kind == "completions" and entry.shard in rows)
    return tuple(Size(entry.fp, listing[entry.key].size, rows[entry.shard]) for entry in made)


def _done(graph: Graph, store: Store, listing: Mapping[str, ObjectInfo]) -> tuple[Done, ...]:
    """What the newest finished jobs did that did something themselves, with the waits of their GPUs before them."""
    found = []
    for stage in GPU_STAGES:
        beats = [key for key in listing if key.startswith(f"progress/{stage}/")]
        newest = sorted(beats, key=lambda key: (-listing[key].modified, key))[:_JOBS_READ]
        found += [seen for key in newest if (seen := _of_job(store, listing, key)) is not None]
    waited = waits([seen.span for seen in found])
    return tuple(seen.done(wait, graph) for seen, wait in zip(found, waited, strict=True) if seen.rows > 0)


@dataclass(frozen=True)
class _Seen:
    """A finished job, as its heartbeat and record tell."""

    entry: Entry
    rows: int
    tokens: int
    gpus: int
    span: Span

    def done(self, wait: float, graph: Graph) -> Done:
        _, began, ended = self.span
        held = self.gpus or graph.gpus(self.entry.stage)
        return Done(self.entry.stage, self.entry.fp, self.rows, self.tokens, (ended - began + wait) * held)


def _of_job(store: Store, listing: Mapping[str, ObjectInfo], key: str) -> _Seen | None:
    """What a heartbeat, and the record where there is one, say of a job; None if it is not finished."""
    entry = identify(key)
    if entry is None:
        return None
    try:
        beat = json.loads(store.get(key))
        did = int(beat["done"]) - int(beat.get("resumed", 0))
        gpus, server = tuple(map(str, beat.get("gpus") or ())), (beat.get("server") or {}).get("uuid")
        began, ended = float(beat["started"]), float(beat["updated"])
        tokens, finished = int(beat.get("tokens", 0)), beat["state"] == "done"
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    record_key = layout.record(entry.stage, entry.name)
    record = read_record(store, record_key) if record_key in listing else None
    if record is not None and record.finished > record.started:
        # The record spans loading too, in which the GPU is held as well.
        gpus, began, ended = tuple(record.gpus), record.started, record.finished
    span: Span = gpus or ((str(server),) if server else ()), began, ended
    return _Seen(entry, did, tokens, len(gpus), span) if finished and ended > began else None
