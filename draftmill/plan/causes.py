"""Why each job is planned: what of it the store has already, under which earlier name, and what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from draftmill.catalog import job_name
from draftmill.graph import Graph
from draftmill.plan.earlier import LISTS, Earlier, differences
from draftmill.plan.jobs import PER_SHARD, STAGES, Job
from draftmill.plan.types import CHANGED, Cause, Difference, Edited, Kind
from draftmill.prompts.history import Kin
from draftmill.specs import INPUTS


def name_of(graph: Graph, job: Job) -> str:
    """The name that a job's record and heartbeat carry."""
    stage, name = job
    part = name if stage == "train" or stage in PER_SHARD else ""
    return job_name(stage, part, graph.specs.fp[stage])


def edited_shards(graph: Graph, jobs: Sequence[Job], kin: Kin) -> tuple[Edited, ...]:
    """The shards to be generated that share prompts with shards which the index does not have any more."""
    current, rows = set(graph.shards), {shard.name: shard.rows for shard in graph.index.shards}
    found = []
    for stage, shard in jobs:
        old = {name: ranges for name, ranges in kin.get(shard, {}).items() if name not in current}
        if stage == "generate" and old:
            known = sorted((int(start), int(stop)) for ranges in old.values() for start, stop in ranges)
            found.append(Edited(shard, rows[shard], _gaps(known, rows[shard]), tuple(sorted(old))))
    return tuple(found)


def _gaps(ranges: Sequence[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """What sorted half-open ranges leave of 0 to length."""
    gaps, reached = [], 0
    for start, stop in [*ranges, (length, length)]:
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, stop)
    return tuple(gaps)


@dataclass(frozen=True)
class Causes:
    """Finds the cause of every planned job."""

    graph: Graph
    earlier: Earlier
    edited: tuple[Edited, ...]

    def by_stage(self, jobs: Sequence[Job]) -> Mapping[str, tuple[Cause, ...]]:
        """The causes of some jobs, equal ones counted together, the most frequent first."""
        counts: dict[str, Counter[tuple[Kind, str]]] = {stage: Counter() for stage in STAGES}
        for job in jobs:
            counts[job[0]][self._of(job)] += 1
        causes = {
            stage: tuple(
                Cause(kind, count, since, self._changes.get((stage, since), ()))
                for (kind, since), count in found.most_common()
            )
            for stage, found in counts.items()
        }
        return {
            stage: tuple(_with_upstream(stage, cause, causes) for cause in found) for stage, found in causes.items()
        }

    def removed(self, jobs: Sequence[Job]) -> list[str]:
        """The shards whose states were extracted before and removed on purpose."""
        return [job[1] for job in jobs if job[0] == "extract" and self._of(job)[0] == "removed"]

    def _of(self, job: Job) -> tuple[Kind, str]:
        """A job's kind of cause and the earlier fingerprint that it is held against, if any."""
        stage, name = job
        if (stage, name_of(self.graph, job)) in self.earlier.finished:
            return "removed" if self._removed(job) else "missing", ""
        shard = name if stage in PER_SHARD else ""
        since = self._last_fingerprint(stage, shard)
        if since is not None:
            return self._kind(stage, since), since
        return "prompts" if shard and self._replaces(stage, shard) else "new", ""

    def _removed(self, job: Job) -> bool:
        stage, name = job
        return stage == "extract" and self.graph.config.hidden.policy == "window" and name in self._train

    def _last_fingerprint(self, stage: str, shard: str) -> str | None:
        """The newest other fingerprint that a stage's object has or had, of that shard or of any."""
        found = (fp for fp in self.earlier.fingerprints(stage, shard) if fp != self.graph.specs.fp[stage])
        return next(found, None)

    def _kind(self, stage: str, since: str) -> Kind:
        if (stage, since) not in self._changes:
            return "setting"
        found = self._changes[stage, since]
        return "upstream" if not found else "prompts" if all(one.setting in LISTS for one in found) else "setting"

    @cached_property
    def _changes(self) -> Mapping[tuple[str, str], tuple[Difference, ...]]:
        specs = self.graph.specs.spec
        return {(stage, fp): differences(stage, was, specs[stage]) for (stage, fp), was in self.earlier.specs.items()}

    def _replaces(self, stage: str, shard: str) -> bool:
        """Whether the stage ever made something of a shard that this one takes the place of."""
        return any(self.earlier.fingerprints(stage, old) for old in self._instead_of.get(shard, ()))

    @cached_property
    def _train(self) -> frozenset[str]:
        return frozenset(self.graph.train)

    @cached_property
    def _instead_of(self) -> Mapping[str, tuple[str, ...]]:
        return {edited.shard: edited.instead_of for edited in self.edited}


def _with_upstream(stage: str, cause: Cause, causes: Mapping[str, tuple[Cause, ...]]) -> Cause:
    changed = tuple(parent for parent in INPUTS[stage] if any(one.kind in CHANGED for one in causes[parent]))
    # A page says nothing of the spec it was made by; if something before it changed, that is cause enough.
    unknown = cause.kind == "setting" and not cause.differences and changed
    return replace(cause, kind="upstream", upstream=changed) if unknown or cause.kind == "upstream" else cause
