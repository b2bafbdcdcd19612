"""How long it still takes, as a 95% interval or as the reason why that is not known.

A stage's remaining rows are timed by its recently finished jobs: each resample draws that many jobs with replacement
(Efron's bootstrap, Annals of Statistics 7, 1979), then a pace for each remaining job from the drawn ones, so the interval
holds both what is not known of the pace and the scatter of single jobs. A pace is drawn as often as rows were done at it, so
that the mean is all time over all rows: one job may wait for rows of which half were answered ahead, while others were
asked for, and a resumed one may have done a single row. The sum is spread over the lanes at work now; no plan ends before
its longest job. Old jobs are left out, because an ETA from the mean since the start stays wrong for
hours after a pause or a change of machines.

A single long job, such as training, is timed by itself: n equal units took t, so each takes t/n, with a relative error of
1/sqrt(n) if their times scatter by as much as their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from draftmill.state.jobs import JobView
from draftmill.state.plan import PER_SHARD
from draftmill.state.types import Eta

LEAST_JOBS = 5
RECENT_JOBS = 40
NOT_BEGUN = "not begun"
_RESAMPLES = 300
_LEAST_UNITS = 5
_NORMAL_95 = 1.96
_SEED = 20260

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Left:
    """Seconds of work that a stage still needs, all its lanes together, and the longest single job: [resamples]."""

    work: Floats
    longest: Floats
    jobs: int
    lanes: int


def stage_eta(stage: str, views: Sequence[JobView], now: float) -> tuple[Eta, Left | None]:
    """The ETA of one stage from its jobs, and its remaining work for the ETA of the whole."""
    waiting = [view for view in views if view.state != "done"]
    if not waiting:
        return Eta(0.0, 0.0, 0.0, covers=(stage,)), None
    left, reason = _left(stage, views, waiting)
    if left is None:
        return Eta(reason=reason), None
    idle = idle_reason(views, now, "nothing of it is at work")
    if idle is not None:
        return Eta(reason=idle, jobs=left.jobs), left
    return _eta(left.work, left.longest, left.jobs, left.lanes, (stage,)), left


def whole_eta(left: Mapping[str, Left], unfinished: Sequence[str], views: Sequence[JobView], now: float) -> Eta:
    """The ETA of the unfinished stages, as far as they are measured; `left` is their work and `views` are their jobs."""
    lanes = max(sum(view.live for view in views), 1)
    if not unfinished:
        return Eta(0.0, 0.0, 0.0)
    missing = tuple(stage for stage in unfinished if stage not in left)
    idle = idle_reason(views, now, "nothing is at work")
    if idle is not None or not left:
        reason = idle or f"nothing is measured yet of {', '.join(missing)}"
        return Eta(reason=reason, leaves_out=missing)
    shared = [one for stage, one in left.items() if stage in PER_SHARD]
    alone = [one for stage, one in left.items() if stage not in PER_SHARD]
    seconds = sum((_spread(one.work, one.longest, one.lanes) for one in alone), np.zeros(_RESAMPLES))
    if shared:
        longest = np.max([one.longest for one in shared], axis=0)
        seconds = seconds + _spread(sum((one.work for one in shared), np.zeros(_RESAMPLES)), longest, lanes)
    low, middle, high = _quantiles(seconds)
    return Eta(low, middle, high, None, sum(one.jobs for one in left.values()), lanes, tuple(left), missing)


def idle_reason(views: Sequence[JobView], now: float, nothing: str) -> str | None:
    """Why nothing moves, or None if something does."""
    live = [view for view in views if view.live]
    if any(view.state == "running" for view in live):
        return None
    if live:
        silent = min(now - (view.heard or now) for view in live)
        return f"stalled: no sign of life for {silent / 60:.0f} min"
    return nothing


def _left(stage: str, views: Sequence[JobView], waiting: Sequence[JobView]) -> tuple[Left | None, str | None]:
    lanes = max(sum(view.live for view in waiting), 1)
    recent = recent_work(views)
    if len(recent) >= LEAST_JOBS:
        rows = [max(view.remaining, 1) for view in waiting]
        drawn = _draw(np.array(recent, np.float64), np.array(rows, np.float64))
        return Left(*drawn, len(recent), min(lanes, len(rows))), None
    if len(waiting) == 1 and (own := own_pace(waiting[0])):
        work = _single(*own)
        return Left(work, work, 1, 1), None
    begun = any(view.live or view.state == "done" for view in views)
    return None, f"{len(recent)} of {LEAST_JOBS} jobs that it takes are finished" if begun else NOT_BEGUN


def recent_work(views: Sequence[JobView]) -> list[tuple[float, int]]:
    """Seconds and rows of the jobs that finished last, each of its last run; rows answered ahead are among them."""
    timed: list[tuple[float, float, int]] = []
    for view in views:
        rows = max(view.total, 1) - (view.beat.resumed if view.beat is not None else 0)
        if view.state == "done" and view.ended is not None and view.seconds > 0 and rows > 0:
            timed.append((view.ended, view.seconds, rows))
    return [(seconds, rows) for _, seconds, rows in sorted(timed)[-RECENT_JOBS:]]


def own_pace(view: JobView) -> tuple[float, int, int] | None:
    """Seconds a unit of a job that runs, the units that are measured and those that are left; None if too few."""
    beat = view.beat
    if not view.live or beat is None or view.begun is None or view.ended is None:
        return None
    units = view.done - max(beat.resumed, beat.found or 0)
    if units < _LEAST_UNITS or view.ended <= view.begun:
        return None
    return (view.ended - view.begun) / units, units, view.remaining


def _single(pace: float, units: int, remaining: int) -> Floats:
    """Quantiles of a normal distribution in place of draws, so that the middle is the estimate itself."""
    levels = (np.arange(_RESAMPLES) + 0.5) / _RESAMPLES
    spread = np.interp(levels, [0.025, 0.5, 0.975], [-_NORMAL_95, 0.0, _NORMAL_95]) / math.sqrt(units)
    return pace * remaining * np.clip(1.0 + spread, 0.0, None)


def _draw(recent: Floats, rows: Floats) -> tuple[Floats, Floats]:
    """Total and longest seconds of jobs with these rows, for each resample of the recent ones: two arrays [resamples].

    `recent` is [jobs, (seconds, rows)].
    """
    generator = np.random.default_rng(_SEED)
    resampled = recent[generator.integers(len(recent), size=(_RESAMPLES, len(recent)))]
    share = np.cumsum(resampled[..., 1], axis=1)
    # Each resample is the span from its number to the next on one line, so that one search serves all of them.
    line = share / share[:, -1:] + np.arange(_RESAMPLES)[:, None]
    places = np.searchsorted(line.ravel(), generator.random((_RESAMPLES, len(rows))) + np.arange(_RESAMPLES)[:, None])
    chosen = (resampled[..., 0] / resampled[..., 1]).ravel()[places]
    return chosen @ rows, (chosen * rows).max(axis=1)


def _spread(work: Floats, longest: Floats, lanes: int) -> Floats:
    return np.maximum(work / max(lanes, 1), longest)


def _eta(work: Floats, longest: Floats, jobs: int, lanes: int, covers: tuple[str, ...]) -> Eta:
    low, middle, high = _quantiles(_spread(work, longest, lanes))
    return Eta(low, middle, high, None, jobs, lanes, covers)


def _quantiles(seconds: Floats) -> tuple[float, float, float]:
    low, middle, high = np.quantile(seconds, (0.025, 0.5, 0.975)).tolist()
    return low, middle, high
