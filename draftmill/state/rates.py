"""Units a second: over the last minute, the last hour, and all time in which the stage was at work.

The last minute is what live jobs say of themselves. Longer spans come from what jobs did between their beginning and
their last heartbeat, taken as even inside a job; a short wait before a job is part of it. Pauses are no work: the overall
rate is over the time in which any job ran, so that a night without a machine does not slow it down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from draftmill.state.jobs import JobView
from draftmill.state.types import Rate

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Work:
    """An amount done evenly between two times."""

    start: float
    end: float
    amount: float


def rate_of(views: Sequence[JobView], amount: Callable[[JobView], float], now: float) -> Rate:
    """The rates of one stage's jobs, where `amount` is what a job's last run did."""
    work = [
        Work(view.begun - view.waited, view.ended, amount(view))
        for view in views
        if view.begun is not None and view.ended is not None and amount(view)
    ]
    if not work:
        return Rate()
    return Rate(_minute(views, amount), last_hour(work, now), overall(work))


def _minute(views: Iterable[JobView], amount: Callable[[JobView], float]) -> float:
    # Of a try that failed a rate is left behind, which the next one has not reached.
    live = (view for view in views if view.state == "running" and view.beat is not None and view.beat.state != "failed")
    return sum((_now(view, amount) for view in live), 0.0)


def _now(view: JobView, amount: Callable[[JobView], float]) -> float:
    """What a live job does now: its tokens of the last minute, in proportion for other units, or its own mean."""
    beat, total = view.beat, amount(view)
    if beat is not None and beat.tokens_1m is not None and beat.tokens:
        return beat.tokens_1m * total / beat.tokens
    span = (view.ended or 0.0) - (view.begun or 0.0)
    return total / span if span > 0 else 0.0


def last_hour(work: Sequence[Work], now: float) -> float:
    """Amount a second over the last hour, or since the first work if that is shorter ago."""
    since = max(now - HOUR_S, min(one.start for one in work))
    done = sum(one.amount * _share(one, since, now) for one in work)
    return done / max(now - since, 1.0)


def _share(one: Work, since: float, until: float) -> float:
    span = one.end - one.start
    if span <= 0:
        return 1.0 if since <= one.end <= until else 0.0
    return max(min(one.end, until) - max(one.start, since), 0.0) / span


def overall(work: Sequence[Work]) -> float:
    """Amount a second of the time in which any of it was done."""
    return sum(one.amount for one in work) / max(busy_seconds((one.start, one.end) for one in work), 1.0)


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
