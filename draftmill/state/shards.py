"""The shards of a plan, each with its chain from prompts to training, and why it was built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draftmill.catalog import identify
from draftmill.graph import Graph
from draftmill.state.failures import log_of
from draftmill.state.jobs import JobView, Picture
from draftmill.state.plan import PER_SHARD
from draftmill.state.read import Snapshot
from draftmill.state.types import JobState

_KIND = {"generate": "completions", "audit": "audit", "extract": "hidden"}


@dataclass(frozen=True, slots=True)
class Link:
    """One job of a shard's chain: its object, how it stands, how long it took, and where its log is."""

    stage: str
    key: str
    fingerprint: str
    state: JobState
    bytes: int | None
    modified: float | None
    seconds: float | None
    host: str
    run: str
    git: str
    gpus: tuple[str, ...]
    log: str
    before: tuple[str, ...]
    """Fingerprints of objects of the same shard and stage from other settings, newest first."""


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One shard as a row of a table. `window` is None for a held-out shard, `verdict` None before its audit."""

    name: str
    split: str
    window: int | None
    pilot: bool
    rows: int
    useful: int | None
    rejected: int | None
    tokens: int
    verdict: str | None
    state: JobState
    why: str
    chain: tuple[Link, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return asdict(self)


def shard_rows(picture: Picture) -> tuple[ShardRow, ...]:
    """All shards of a plan in index order."""
    snapshot, graph = picture.snapshot, picture.graph
    views = {(view.job.stage, view.job.subject): view for view in picture.views}
    before = _before(snapshot, graph)
    windows = {shard: number for number, shards in enumerate(graph.windows) for shard in shards}
    return tuple(
        _row(snapshot, graph, shard, windows.get(shard), [views[stage, shard] for stage in PER_SHARD], before)
        for shard in graph.shards
    )


def _row(
    snapshot: Snapshot,
    graph: Graph,
    shard: str,
    window: int | None,
    views: list[JobView],
    before: Mapping[tuple[str, str], tuple[str, ...]],
) -> ShardRow:
    chain = tuple(_link(snapshot, graph, view, before.get((view.job.stage, shard), ())) for view in views)
    generated = views[0]
    audit = snapshot.audits.get(graph.audit(shard)) or snapshot.audits.get(graph.failed_audit(shard))
    return ShardRow(
        name=shard,
        split="held_out" if window is None else "train",
        window=window,
        pilot=shard == graph.pilot_shard,
        rows=generated.total,
        useful=generated.useful,
        rejected=generated.rejected,
        tokens=generated.tokens,
        verdict=audit.verdict if audit else None,
        state=_overall(views),
        why=why(chain),
        chain=chain,
    )


def _overall(views: list[JobView]) -> JobState:
    """The state of the first job of a chain that is not done."""
    return next((view.state for view in views if view.state != "done"), "done")


def _link(snapshot: Snapshot, graph: Graph, view: JobView, before: tuple[str, ...]) -> Link:
    stage, shard = view.job.stage, view.job.subject
    key = graph.outputs(stage, shard)[0]
    info, record, beat = snapshot.listing.get(key), view.record, view.beat
    return Link(
        stage=stage,
        key=key,
        fingerprint=graph.specs.fp[stage],
        state=view.state,
        bytes=info.size if info else None,
        modified=info.modified if info else None,
        seconds=view.ended - view.begun if view.begun is not None and view.ended is not None else None,
        host=record.host if record else beat.host if beat else "",
        run=record.run if record else "",
        git=record.git if record else "",
        gpus=view.gpus,
        log=log_of(graph, stage, shard),
        before=before,
    )


def _before(snapshot: Snapshot, graph: Graph) -> dict[tuple[str, str], tuple[str, ...]]:
    """Fingerprints of other settings that a shard has objects of, by (stage, shard), newest first."""
    stages = {kind: stage for stage, kind in _KIND.items()}
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for key, info in snapshot.listing.items():
        if not key.startswith(("completions/", "audits/", "hidden/")):
            continue
        entry = identify(key)
        if entry is not None and entry.kind in stages:
            stage = stages[entry.kind]
            if entry.fp != graph.specs.fp[stage]:
                found.setdefault((stage, entry.shard), []).append((info.modified, entry.fp))
    return {job: tuple(fp for _, fp in sorted(each, reverse=True)) for job, each in found.items()}


def why(chain: tuple[Link, ...]) -> str:
    """Why a shard was built or is to be built, in a sentence, as far as names tell; changed_settings() tells more."""
    changed = [link for link in chain if link.before]
    verb = "Was" if all(link.state == "done" for link in chain) else "Is to be"
    if changed:
        names = ", ".join(f"{link.stage} (before: {link.before[0]})" for link in changed)
        return f"{verb} built again because settings changed that decide {names}."
    return f"{verb} built because the store held nothing of it."


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    """Settings that differ between two objects of a stage by their provenance, as (dotted key, before, after)."""
    old, new = (dict(_leaves(made_of.get("spec") or {})) for made_of in (before, after))
    return tuple(
        (name, old.get(name), new.get(name)) for name in sorted({*old, *new}) if old.get(name) != new.get(name)
    )


def _leaves(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield above, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, f"{above}.{name}" if above else str(name))
