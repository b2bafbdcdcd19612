"""GPU-hours so far and expected, priced where a price is configured, and what is finished but not in the store yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from draftmill.config import Config
from draftmill.state.eta import Left
from draftmill.state.jobs import JobView
from draftmill.state.plan import GPU_STAGES
from draftmill.state.types import Cost, Lag

_HOUR_S = 3600.0


def gpu_seconds(view: JobView, device: str) -> float:
    """Seconds times GPUs that the last try of a job took, as far as its heartbeat and record tell."""
    if device == "cpu" or view.job.stage not in GPU_STAGES:
        return 0.0
    return view.seconds * max(len(view.gpus), 1)


def cost_of(views: Sequence[JobView], left: Mapping[str, Left], config: Config) -> Cost:
    """The cost so far, and with what is left of the stages that are measured."""
    price = config.resources.gpu_hour_price
    hours = sum(gpu_seconds(view, config.device) for view in views) / _HOUR_S
    low, high = _expected(views, left, hours) if left and config.device != "cpu" else (None, None)
    return Cost(hours, low, high, price, _times(hours, price), _times(low, price), _times(high, price))


def _expected(views: Sequence[JobView], left: Mapping[str, Left], hours: float) -> tuple[float, float]:
    work = np.zeros(1)
    for stage, one in left.items():
        held = [len(view.gpus) for view in views if view.job.stage == stage and view.gpus]
        work = work + one.work * (sum(held) / len(held) if held else 1.0)
    low, high = np.quantile(work, (0.025, 0.975)).tolist()
    return hours + low / _HOUR_S, hours + high / _HOUR_S


def _times(hours: float | None, price: float | None) -> float | None:
    return None if hours is None or price is None else hours * price


def lag_of(views: Sequence[JobView], now: float) -> Lag:
    """Jobs that say they are done while their outputs are not in the store."""
    finished = [view for view in views if view.live and view.beat is not None and view.beat.state == "done"]
    return Lag(len(finished), max((now - (view.heard or now) for view in finished), default=None))
