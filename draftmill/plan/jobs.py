"""Which jobs a build would run, found on the graph as Snakemake finds them, so that no Snakemake is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from draftmill.graph import ONCE, Graph

Job = tuple[str, str]
"""Stage and name: a shard, a window, or ONCE."""

STAGES = ("generate", "audit", "extract", "pilot", "train", "audit_set", "evaluate", "report")
PER_SHARD = ("generate", "audit", "extract")
GPU_STAGES = ("generate", "extract", "train", "evaluate")


def all_jobs(graph: Graph) -> Iterator[Job]:
    """Every job that the graph knows, in pipeline order; under policy window not all of them are always needed."""
    for stage in STAGES:
        if stage in PER_SHARD:
            yield from ((stage, shard) for shard in graph.shards)
        elif stage == "train":
            yield from ((stage, str(window)) for window in range(len(graph.windows)))
        else:
            yield stage, ONCE


def planned(graph: Graph) -> list[Job]:
    """The jobs whose outputs a build of everything lacks, directly or through other jobs, in pipeline order."""
    maker = {key: job for job in all_jobs(graph) for key in graph.outputs(*job)}
    found: set[Job] = set()
    left = [maker[key] for key in graph.results() if key not in graph.present]
    while left:
        job = left.pop()
        if job not in found:
            found.add(job)
            left += [maker[key] for key in graph.lacks(*job) if key in maker]
    return [job for job in all_jobs(graph) if job in found]


def rules(graph: Graph, jobs: Sequence[Job]) -> Mapping[str, int]:
    """The same jobs by Snakemake's rules, with a sentinel for each that holds a GPU, and the target `all`."""
    held_out = frozenset(graph.held_out)
    counts = Counter("extract_held_out" if stage == "extract" and name in held_out else stage for stage, name in jobs)
    if graph.config.gate.sentinel == "rule":
        counts["gpu_free"] = sum(stage in GPU_STAGES for stage, _ in jobs)
    counts["all"] = int(bool(jobs))
    return {rule: count for rule, count in sorted(counts.items()) if count}
