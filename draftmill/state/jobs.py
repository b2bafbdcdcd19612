"""Each job of a plan as its store shows it: done or not by the objects, at work or not by the heartbeat's age.

All times are put on the store's clock: a heartbeat says when its job thought it wrote, the listing says when the store
got it, and the difference is the skew of that job's clock. `now` is never before the newest object, so that a reader
whose clock is behind sees no heartbeat from the future.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from draftmill import layout
from draftmill.graph import Graph
from draftmill.state.documents import Beat, Claim, JobRecord, ShardAudit
from draftmill.state.plan import Finished, JobName, Plan, job_names
from draftmill.state.read import LOST_S, Job, Snapshot
from draftmill.state.types import JobState
from draftmill.waits import Span, waits

STALE_S = 60.0
"""A job that gets on says so every few seconds: after a minute something is wrong, after LOST_S it is given up for dead."""


@dataclass(frozen=True, slots=True)
class JobView:
    """One job. `heard` is when the store last got its heartbeat, `begun` and `ended` the span that is known of it.

    `waited` are seconds that its GPUs were without a job before it (waits.py).
    `useful` and `rejected` are None where nobody has said; `done` counts both.
    """

    job: JobName
    state: JobState
    total: int
    done: int
    useful: int | None
    rejected: int | None
    tokens: int
    trained_tokens: int
    begun: float | None
    ended: float | None
    heard: float | None
    beat: Beat | None = None
    record: JobRecord | None = None
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        """The time that it took, with the wait before it; 0 where that is not known."""
        return 0.0 if self.begun is None or self.ended is None else self.ended - self.begun + self.waited

    @property
    def live(self) -> bool:
        """Whether it is at work, as far as can be told."""
        return self.state in ("running", "stale")

    @property
    def remaining(self) -> int:
        """Rows that are left."""
        return 0 if self.state == "done" else max(self.total - self.done, 0)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs it holds or held."""
        if self.record is not None and self.record.gpus:
            return self.record.gpus
        return self.beat.gpus if self.beat is not None else ()


def store_now(snapshot: Snapshot, now: float) -> float:
    """`now`, or the time of the newest object if that is later."""
    return max(now, max((info.modified for info in snapshot.listing.values()), default=now))


def heard_at(snapshot: Snapshot, job: Job) -> float | None:
    """When the store got the last heartbeat of a job."""
    info = snapshot.listing.get(layout.progress(*job))
    return info.modified if info else None


def skew(beat: Beat, heard: float) -> float:
    """Seconds by which a job's clock is ahead of the store's."""
    return beat.updated - heard if beat.updated is not None else 0.0


def is_held(claim: Claim | None, now: float) -> bool:
    """Whether somebody still renews a claim."""
    return claim is not None and claim.expires is not None and claim.expires > now


def beat_state(beat: Beat, heard: float, claim: Claim | None, now: float) -> JobState:
    """What a heartbeat says of a job whose outputs are not there."""
    claimed = is_held(claim, now)
    if beat.state == "failed":
        # Whoever fails lets go of the claim: a later try holds it, and has not said anything yet.
        return "running" if claimed else "failed"
    age = now - heard
    if age <= STALE_S:
        return "running"
    # A job that says it is done has only to publish; its claim, if there is one, tells whether it still does.
    return "stale" if claimed or age <= LOST_S else "interrupted"


@dataclass(frozen=True)
class Picture:
    """A snapshot held against a plan at a time on the store's clock; its jobs are worked out once."""

    snapshot: Snapshot
    plan: Plan
    now: float

    @cached_property
    def graph(self) -> Graph:
        """The build graph over what the store holds."""
        return self.plan.graph(self.snapshot.listing)

    @cached_property
    def views(self) -> Sequence[JobView]:
        """Every job of the plan, in pipeline order."""
        return _views(self.snapshot, self.plan, self.graph, self.now)


def picture_of(snapshot: Snapshot, now: float) -> Picture | None:
    """The picture at `now` by this machine's clock; None where no plan is known."""
    return None if snapshot.plan is None else Picture(snapshot, snapshot.plan, store_now(snapshot, now))


def _views(snapshot: Snapshot, plan: Plan, graph: Graph, now: float) -> list[JobView]:
    finished = Finished(graph)
    audits = {shard: snapshot.audits.get(graph.audit(shard)) for shard in graph.shards}
    broken = {shard for shard in graph.shards if graph.failed_audit(shard) in snapshot.listing}
    return after_waits([_view(snapshot, plan, job, finished(job), audits, broken, now) for job in job_names(graph)])


def after_waits(views: Sequence[JobView]) -> list[JobView]:
    """The jobs with how long the GPUs of each had waited for it."""
    found = zip(views, waits([_place(view) for view in views]), strict=True)
    return [replace(view, waited=wait) if wait else view for view, wait in found]


def _place(view: JobView) -> Span:
    if view.begun is None or view.ended is None:
        return (), 0.0, 0.0
    server = view.beat.server.uuid if view.beat is not None and view.beat.server is not None else None
    return view.gpus or ((server,) if server else ()), view.begun, view.ended


def _view(
    snapshot: Snapshot,
    plan: Plan,
    job: JobName,
    done: bool,
    audits: Mapping[str, ShardAudit | None],
    broken: Set[str],
    now: float,
) -> JobView:
    key = (job.stage, job.name)
    beat, record, claim = snapshot.beats.get(key), snapshot.records.get(key), snapshot.claims.get(key)
    heard = heard_at(snapshot, key) if beat is not None else None
    state = _state(done, beat, heard, claim, now)
    if state == "waiting" and job.stage == "audit" and job.subject in broken:
        state = "failed"
    audit = audits.get(job.subject) if job.stage in ("generate", "audit") else None
    total, finished_rows, useful, rejected = _rows(plan, job, state, beat, audit)
    if job.stage not in ("generate", "audit"):  # only answers can be refused
        useful, rejected = finished_rows, 0
    written = snapshot.listing.get(layout.record(*key))
    begun, ended = _span(beat, heard, record, written.modified if written else None)
    trained = audit.loss_tokens if audit is not None and state == "done" else 0
    return JobView(
        job,
        state,
        total,
        finished_rows,
        useful,
        rejected,
        tokens=(beat.tokens if beat is not None else 0) or trained,
        trained_tokens=trained or (beat.trained_tokens or 0 if beat is not None else 0),
        begun=begun,
        ended=ended,
        heard=heard,
        beat=beat,
        record=record,
    )


def _state(done: bool, beat: Beat | None, heard: float | None, claim: Claim | None, now: float) -> JobState:
    if done:
        return "done"
    if beat is not None and heard is not None:
        return beat_state(beat, heard, claim, now)
    return "running" if is_held(claim, now) else "waiting"


def _rows(
    plan: Plan, job: JobName, state: JobState, beat: Beat | None, audit: ShardAudit | None
) -> tuple[int, int, int | None, int | None]:
    """Rows in all, rows done, and of these the useful and the rejected ones where they are known."""
    total = plan.rows.get(job.subject) if job.stage in ("generate", "audit", "extract") else None
    if total is None:
        total = beat.total if beat is not None else 0
    if audit is not None and state == "done":
        rows = audit.rows + audit.rejected
        return rows, rows, audit.rows, audit.rejected
    if job.stage == "extract" and beat is not None and beat.total:
        total = min(total, beat.total)
    if beat is None:
        return total, total if state == "done" else 0, None, None
    useful, rejected = beat.useful, beat.rejected
    done = total if state == "done" else min(max(beat.done, (useful or 0) + (rejected or 0)), total)
    return total, done, *_within(done, useful, rejected)


def _within(done: int, useful: int | None, rejected: int | None) -> tuple[int | None, int | None]:
    """Useful and rejected rows that do not add up to more than what is done, whatever a heartbeat says."""
    useful = None if useful is None else min(useful, done)
    return useful, None if rejected is None else min(rejected, done - (useful or 0))


def _span(
    beat: Beat | None, heard: float | None, record: JobRecord | None, recorded: float | None
) -> tuple[float | None, float | None]:
    """When a job began and when it was last at work; a record knows also the time before the first heartbeat."""
    began = None
    if beat is not None and heard is not None and beat.started is not None:
        began = min(beat.started - skew(beat, heard), heard)
    # A heartbeat that begins behind the record is of a later try.
    took = _took(record)
    if took is not None and recorded is not None and (began is None or began <= recorded):
        return recorded - took, recorded
    return (None, None) if began is None else (began, heard)


def _took(record: JobRecord | None) -> float | None:
    """Seconds that a recorded job took in all."""
    if record is None or record.started is None or record.finished is None:
        return None
    return max(record.finished - record.started, 0.0)
