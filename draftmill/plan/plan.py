"""The plan as one pure function of the graph, a listing of the store, what was made before, and the rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from draftmill.catalog import OBJECTS, identify
from draftmill.graph import Graph
from draftmill.plan.amounts import needs_of, states_of
from draftmill.plan.causes import Causes, edited_shards
from draftmill.plan.earlier import Earlier
from draftmill.plan.jobs import STAGES, Job, all_jobs, planned, rules
from draftmill.plan.rates import Rates
from draftmill.plan.types import Cause, Need, Orphans, Plan, StagePlan, total
from draftmill.prompts.history import Kin
from draftmill.store.base import ObjectInfo


def plan(
    graph: Graph, listing: Mapping[str, ObjectInfo], rates: Rates, *, earlier: Earlier, kin: Kin, store: str
) -> Plan:
    """What a build would do. `kin` says which shards share prompts, `store` is the store's name for people."""
    jobs = planned(graph)
    edited = edited_shards(graph, jobs, kin)
    why = Causes(graph, earlier, edited)
    causes = why.by_stage(jobs)
    needs = needs_of(graph, jobs, rates, rows_taken_over(graph, jobs, kin))
    orphans = orphans_of(graph, listing)
    stages = _stages(graph, causes, needs, orphans)
    hours = total(one.need.gpu_hours for one in stages)
    price = graph.config.resources.gpu_hour_price if graph.config.device == "cuda" else None
    return Plan(
        store=store,
        device=graph.config.device,
        prompts=sum(shard.rows for shard in graph.index.shards),
        stages=stages,
        rules=rules(graph, jobs),
        edited=edited,
        orphaned_prompts=orphans.get("prompts", Orphans()),
        states=states_of(graph, needs["extract"], rates, why.removed(jobs)),
        gpu_hours=hours,
        bytes=needs["generate"].bytes,
        price=price,
        cost=None if price is None else hours.times(price),
    )


def _stages(
    graph: Graph,
    causes: Mapping[str, tuple[Cause, ...]],
    needs: Mapping[str, Need],
    orphans: Mapping[str, Orphans],
) -> tuple[StagePlan, ...]:
    exist = Counter(stage for stage, name in all_jobs(graph) if not graph.wanted(stage, name))
    return tuple(
        StagePlan(
            stage,
            graph.specs.fp[stage],
            exist[stage],
            causes[stage],
            orphans.get(stage, Orphans()),
            needs.get(stage, Need()),
        )
        for stage in STAGES
    )


def orphans_of(graph: Graph, listing: Mapping[str, ObjectInfo]) -> Mapping[str, Orphans]:
    """Objects that the configuration never reaches, by the stage that makes such; prompts count as a stage of their own."""
    reached = {key for job in all_jobs(graph) for key in graph.outputs(*job)} | set(map(graph.prompts, graph.shards))
    found: dict[str, list[int]] = {}
    for key, info in listing.items():
        entry = identify(key) if key not in reached else None
        if entry is not None and entry.kind in OBJECTS and (entry.stage or entry.kind == "prompts"):
            found.setdefault(entry.stage or "prompts", []).append(info.size)
    return {stage: Orphans(len(sizes), sum(sizes)) for stage, sizes in found.items()}


def rows_taken_over(graph: Graph, jobs: Sequence[Job], kin: Kin) -> int:
    """Rows to be generated whose prompts another shard has answered by the same settings, at most (stages/reuse.py)."""
    rows = 0
    for stage, shard in jobs:
        if stage == "generate":
            others = kin.get(shard, {}).items()
            answered = (ranges for other, ranges in others if graph.completions(other) in graph.present)
            rows += _covered(pair for ranges in answered for pair in ranges)
    return rows * graph.config.generate.samples


def _covered(ranges: Iterable[Sequence[int]]) -> int:
    """The length of the union of half-open ranges."""
    length = reached = 0
    for start, stop in sorted((int(a), int(b)) for a, b in ranges):
        length += max(stop - max(start, reached), 0)
        reached = max(reached, stop)
    return length
