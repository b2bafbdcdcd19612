"""What is wanted: a configuration, the shards of the store's index and the fingerprints, without sources or target.

It comes from the record that a build leaves when it starts, or from a configuration file on a machine that has the
target. The graph over it and a listing says which jobs there are and which are done, by the same code as the build.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from draftmill.build_record import BuildRecord, config_of, shards_digest
from draftmill.config import Config
from draftmill.graph import ONCE, Graph
from draftmill.prompts.index import Index
from draftmill.specs import Specs

STAGES = ("generate", "audit", "extract", "pilot", "train", "audit_set", "evaluate", "report")
"""In pipeline order, the order they are shown in."""
PER_SHARD = ("generate", "audit", "extract")
GPU_STAGES = ("generate", "extract", "train", "evaluate")
"""Those that take the time: they decide how long a build takes and what it costs."""


@dataclass(frozen=True)
class Plan:
    """What one build wants. `run` and `started` are those of the last build that announced it, if any."""

    basis: Literal["build", "configuration"]
    config: Config
    index: Index
    fingerprints: Mapping[str, str]
    run: str | None = None
    started: float | None = None

    def graph(self, present: Iterable[str]) -> Graph:
        """The build graph over the keys that the store holds."""
        return Graph(self.config, self.index, Specs({}, self.fingerprints), frozenset(present))

    @cached_property
    def rows(self) -> Mapping[str, int]:
        """Rows that a shard's completions and rejected rows add up to; samples of imported answers are one each."""
        samples = self.config.generate.samples
        return {shard.name: shard.rows * samples for shard in self.index.shards}


def plan_of(record: BuildRecord, index: Index) -> tuple[Plan | None, list[str]]:
    """The plan of an announced build over the store's index, and what a person should know about it."""
    config = config_of(record)
    if config is None:
        return None, [
            f"The build was started by draftmill {record.draftmill}, whose configuration this version cannot read: "
            "use that version."
        ]
    plan = Plan("build", config, index, record.fingerprints, record.run, record.started)
    names = [shard.name for shard in (*index.train, *index.held_out)]
    changed = shards_digest(names) != record.shards
    return plan, ["The prompt index has changed since the build was started."] if changed else []


@dataclass(frozen=True, slots=True)
class JobName:
    """A job of the plan: `name` is that of its heartbeat and record, `subject` the shard, the window or nothing."""

    stage: str
    name: str
    subject: str


def job_names(graph: Graph) -> list[JobName]:
    """Every job of the plan in pipeline order."""
    fp = graph.specs.fp
    jobs = [JobName(stage, f"{shard}-{fp[stage]}", shard) for stage in PER_SHARD for shard in graph.shards]
    jobs += [JobName("train", f"{fp['train']}-{window}", str(window)) for window in range(len(graph.windows))]
    jobs.append(JobName("pilot", graph.pilot_shard, ""))
    jobs += [JobName(stage, fp[stage], "") for stage in ("audit_set", "evaluate", "report")]
    return jobs


class Finished:
    """Which jobs of a graph are done: their outputs are there, or are spent and will not be made again."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        trained = [not graph.wanted("train", str(window)) for window in range(len(graph.windows))]
        # Drafters before the last one may have been deleted.
        self._trained = max((number + 1 for number, done in enumerate(trained) if done), default=0)
        spent = graph.windows[: self._trained] if graph.config.hidden.policy == "window" else []
        self._spent = {shard for window in spent for shard in window}

    def __call__(self, job: JobName) -> bool:
        """Whether a job is done."""
        if job.stage == "train" and int(job.subject) < self._trained:
            return True
        if job.stage == "extract" and job.subject in self._spent:
            return True
        return not self._graph.wanted(job.stage, job.subject or ONCE)
