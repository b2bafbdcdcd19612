"""From a snapshot of a store to the state of its build, by pure functions of the snapshot and a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from draftmill.catalog import identify
from draftmill.state.cost import cost_of, lag_of
from draftmill.state.eta import NOT_BEGUN, Left, stage_eta, whole_eta
from draftmill.state.failures import failures
from draftmill.state.jobs import JobView, Picture, picture_of, store_now
from draftmill.state.lanes import lanes
from draftmill.state.plan import GPU_STAGES, STAGES, Plan
from draftmill.state.rates import rate_of
from draftmill.state.read import Choose, Reader, Snapshot
from draftmill.state.types import Cost, Eta, Jobs, Lag, Lane, PlanInfo, Rate, Rows, Stage, State
from draftmill.store.base import Store

UNITS = {"generate": "rows", "audit": "rows", "extract": "rows", "train": "steps", "evaluate": "prompts"}
_NO_PLAN = "it is not known what is wanted"


def read_state(store: Store, *, choose: Choose | None = None, clock: Callable[[], float] = time.time) -> State:
    """Look at a store once. Raises UserError if it cannot be listed; whoever looks often keeps a Reader."""
    return state_of(Reader(store, choose=choose).snapshot(), clock())


def state_of(snapshot: Snapshot, now: float) -> State:
    """The state that a snapshot shows at `now`, seconds since 1970 by this machine's clock."""
    picture = picture_of(snapshot, now)
    return _without_plan(snapshot, store_now(snapshot, now)) if picture is None else state_from(picture)


def state_from(picture: Picture) -> State:
    """The state that a picture shows."""
    snapshot, plan, views, now = picture.snapshot, picture.plan, picture.views, picture.now
    shown = lanes(snapshot, now)
    stages, left = _stages(views, plan, now)
    unfinished = [stage.name for stage in stages if stage.jobs.done < (stage.jobs.wanted or 0)]
    timed = [name for name in unfinished if name in GPU_STAGES]
    left = {name: work for name, work in left.items() if name in timed}
    working = [view for view in views if view.job.stage in GPU_STAGES]
    return State(
        store=snapshot.url,
        now=now,
        plan=_info(plan),
        stages=stages,
        lanes=shown,
        failures=failures(picture),
        eta=whole_eta(left, timed, working, now),
        cost=cost_of(views, left, plan.config),
        lag=lag_of(views, now),
        finished=not unfinished,
        notes=(*snapshot.notes, *_say_skew(shown)),
    )


def _stages(views: Sequence[JobView], plan: Plan, now: float) -> tuple[tuple[Stage, ...], dict[str, Left]]:
    of = {name: list(group) for name, group in groupby(views, lambda view: view.job.stage)}
    stages, left = [], dict[str, Left]()
    for name in STAGES:
        eta, work = stage_eta(name, of[name], now) if name in UNITS else (_instant_eta(of[name]), None)
        if work is not None:
            left[name] = work
        stages.append(_stage(name, of[name], plan, eta, now))
    return tuple(stages), left


def _instant_eta(views: Sequence[JobView]) -> Eta:
    """Stages that run once and take seconds are not timed."""
    return Eta(0.0, 0.0, 0.0) if all(view.state == "done" for view in views) else Eta(reason=NOT_BEGUN)


def _stage(name: str, views: Sequence[JobView], plan: Plan, eta: Eta, now: float) -> Stage:
    return Stage(
        name=name,
        fingerprint=plan.fingerprints.get(name),
        unit=UNITS.get(name, "jobs"),
        jobs=count_jobs(views),
        rows=count_rows(views) if name in UNITS else Rows(),
        tokens=sum(view.tokens for view in views),
        trained_tokens=sum(view.trained_tokens for view in views),
        token_rate=rate_of(views, _own_tokens, now),
        trained_rate=rate_of(views, _own_trained, now),
        row_rate=rate_of(views, _own_rows, now) if name in UNITS else Rate(),
        eta=eta,
    )


def _own_tokens(view: JobView) -> float:
    return view.beat.tokens if view.beat is not None else 0


def _own_trained(view: JobView) -> float:
    """Loss tokens of the last run; where only the audit counts them, those of rows from earlier runs are left out."""
    if view.beat is None:
        return 0
    if view.beat.trained_tokens is not None:
        return view.beat.trained_tokens
    return view.trained_tokens if not view.beat.resumed else min(view.trained_tokens, view.beat.tokens)


def _own_rows(view: JobView) -> float:
    return max(view.done - view.beat.resumed, 0) if view.beat is not None else 0


def count_jobs(views: Sequence[JobView]) -> Jobs:
    """Jobs by state (types.Jobs)."""
    states = [view.state for view in views]
    return Jobs(
        wanted=len(states),
        done=states.count("done"),
        running=states.count("running") + states.count("stale"),
        stale=states.count("stale"),
        failed=states.count("failed"),
        interrupted=states.count("interrupted"),
        waiting=states.count("waiting"),
    )


def count_rows(views: Sequence[JobView]) -> Rows:
    """Rows of some jobs (types.Rows); rows that nobody has judged are untold, never guessed."""
    done = sum(view.done for view in views)
    useful, rejected = sum(view.useful or 0 for view in views), sum(view.rejected or 0 for view in views)
    unsaid = any(view.total == 0 and view.state != "done" for view in views)
    wanted = None if unsaid else sum(view.total for view in views)
    return Rows(wanted, done, useful, rejected, done - useful - rejected)


def _info(plan: Plan) -> PlanInfo:
    return PlanInfo(
        basis=plan.basis,
        run=plan.run,
        started=plan.started,
        shards=len(plan.index.shards),
        held_out=len(plan.index.held_out),
        prompts=sum(shard.rows for shard in plan.index.shards),
        device=plan.config.device,
        target=plan.config.target.model,
        fingerprints=dict(plan.fingerprints),
    )


def _say_skew(shown: Sequence[Lane]) -> list[str]:
    hosts: Mapping[str, float] = {lane.host: lane.clock_skew for lane in shown if lane.clock_skew is not None}
    return [
        f"The clock of {host} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the store's: set it right."
        for host, ahead in sorted(hosts.items())
    ]


def _without_plan(snapshot: Snapshot, now: float) -> State:
    """What can be said without totals: objects that are there, of whatever settings, and lanes."""
    shown = lanes(snapshot, now)
    made: dict[str, set[str]] = {name: set() for name in STAGES}
    for key in snapshot.listing:
        entry = identify(key)
        if entry is not None and entry.stage in made and entry.kind not in ("journal", "progress", "record", "claim"):
            made[entry.stage].add(entry.name)
    live = [lane for lane in shown if lane.state in ("running", "stale")]
    stages = tuple(
        Stage(
            name=name,
            fingerprint=None,
            unit=UNITS.get(name, "jobs"),
            jobs=Jobs(None, len(made[name]), sum(lane.stage == name for lane in live)),
            rows=Rows(),
            eta=Eta(reason=_NO_PLAN),
        )
        for name in STAGES
    )
    return State(
        snapshot.url,
        now,
        PlanInfo(),
        stages,
        shown,
        (),
        Eta(reason=_NO_PLAN),
        Cost(0.0),
        Lag(),
        False,
        (*snapshot.notes, *_say_skew(shown)),
    )
