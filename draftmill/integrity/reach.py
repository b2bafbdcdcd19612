"""What a configuration reaches: every key that a build of it would make, read, or go on from.

Old versions of objects stay in a store until somebody cleans up, so that a setting that is changed back costs nothing.
Reaching is a matter of names alone; whether the object is there, or needed once more, does not come into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from draftmill import layout
from draftmill.catalog import job_name, outputs
from draftmill.graph import Graph
from draftmill.prompts.history import load_kin
from draftmill.stages.reuse import old_shards
from draftmill.store.base import Store

Job = tuple[str, str]


def jobs(graph: Graph) -> Iterator[Job]:
    """Stage and name (as in records, heartbeats, claims and journals) of every job of a configuration."""
    fp = graph.specs.fp
    for shard in graph.shards:
        yield from ((stage, job_name(stage, shard, fp[stage])) for stage in ("generate", "audit", "extract"))
    yield from (("train", job_name("train", str(window), fp["train"])) for window in range(len(graph.windows)))
    yield from ((stage, fp[stage]) for stage in ("pilot", "audit_set", "evaluate", "report"))


def objects(graph: Graph) -> Iterator[str]:
    """Every object of a configuration."""
    yield from (layout.INDEX, layout.HISTORY, layout.KIN)
    for stage, name in jobs(graph):
        for keys in outputs(stage, name):
            yield from keys
    for shard in graph.shards:
        yield layout.prompts(shard)
        failed = graph.failed_audit(shard)
        yield from (failed, failed.replace(".json", ".html"))


def forerunners(graph: Graph, store: Store) -> Iterator[str]:
    """Completions of old shards whose rows a job that is still to run would take over (stages/reuse.py)."""
    kin = load_kin(store)
    for shard in graph.shards:
        if graph.wanted("generate", shard):
            for old in old_shards(kin, shard):
                yield from (graph.completions(old), graph.rejected(old))


def reached(graphs: Iterable[Graph], store: Store) -> tuple[frozenset[str], frozenset[Job]]:
    """The objects and the jobs that any of the configurations reaches."""
    keys: set[str] = set()
    named: set[Job] = set()
    for graph in graphs:
        keys.update(objects(graph), forerunners(graph, store))
        named.update(jobs(graph))
    return frozenset(keys), frozenset(named)
