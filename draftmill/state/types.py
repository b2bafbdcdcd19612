"""The state of a build as frozen values with a plain JSON form.

Times are seconds since 1970 by the store's clock, ages and durations are seconds, None means not known.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

JobState = Literal["done", "running", "stale", "failed", "interrupted", "waiting"]
"""`stale` runs but has been silent for a while; `interrupted` was begun and nobody works on it any more."""
LaneState = Literal["running", "stale", "lost", "idle", "failed"]
# A page gets its state again and again: a build that fails everywhere must not make it megabytes.
_FAILURES = 50


@dataclass(frozen=True, slots=True)
class Rate:
    """Units a second over the last minute, the last hour, and all time in which any job of the stage ran."""

    minute: float | None = None
    hour: float | None = None
    all: float | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Units of a stage: rows, steps or prompts. done = useful + rejected + untold; `untold` nobody has judged yet.

    done <= wanted, which is None while some job has not said how much it has to do.
    """

    wanted: int | None = None
    done: int = 0
    useful: int = 0
    rejected: int = 0
    untold: int = 0


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs of a stage. wanted = done + running + failed + interrupted + waiting; `stale` are among the running.

    `wanted` is None where no plan is known; then only what was seen is counted.
    """

    wanted: int | None = None
    done: int = 0
    running: int = 0
    stale: int = 0
    failed: int = 0
    interrupted: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Eta:
    """Seconds that are left: the middle and a 95% interval, or the reason why it is not known.

    `jobs` finished jobs were drawn from and `lanes` work at once. `covers` are the stages whose work is in it,
    `leaves_out` unfinished stages that nothing has been measured of.
    """

    low: float | None = None
    middle: float | None = None
    high: float | None = None
    reason: str | None = None
    jobs: int = 0
    lanes: int = 0
    covers: tuple[str, ...] = ()
    leaves_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the build."""

    name: str
    fingerprint: str | None
    unit: str
    jobs: Jobs
    rows: Rows
    tokens: int = 0
    """Tokens generated or read; of audited shards those that are trained on."""
    trained_tokens: int = 0
    """Tokens that count in the loss."""
    token_rate: Rate = Rate()
    trained_rate: Rate = Rate()
    row_rate: Rate = Rate()
    eta: Eta = Eta()


@dataclass(frozen=True, slots=True)
class ServerState:
    """The server behind a lane."""

    uuid: str | None
    url: str | None
    state: str | None
    epoch: int | str | None


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """What the GPU gate said of a lane before its job."""

    verdict: str
    checked_at: float | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """One GPU, or one process where no GPU is told, and the job that it was last heard of with."""

    id: str
    gpu: str | None
    host: str
    pid: int | None
    state: LaneState
    stage: str
    name: str
    subject: str
    unit: str
    done: int
    total: int
    tokens_per_second: float | None
    age: float
    clock_skew: float | None
    """Seconds by which the job's clock is ahead of the store's; told only when it is more than a few."""
    server: ServerState | None
    gate: GateVerdict | None
    memory_bytes: int | None
    """What the job's process holds on its host."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that failed and has not succeeded since: what it said, and the command that shows more.

    `log` and `command` are for the folder that the build runs in on `host`; `page` is the key of a failed audit's page.
    """

    stage: str
    name: str
    subject: str
    at: float
    host: str
    message: str
    log: str
    command: str
    page: str | None
    running_again: bool


@dataclass(frozen=True, slots=True)
class Cost:
    """Hours for which jobs held GPUs, so far and expected in all (95% interval), and their price where one is set.

    What the ETA leaves out for want of measurements is not expected here either.
    """

    gpu_hours: float
    expected_low: float | None = None
    expected_high: float | None = None
    price: float | None = None
    spent: float | None = None
    total_low: float | None = None
    total_high: float | None = None


@dataclass(frozen=True, slots=True)
class Lag:
    """Jobs whose work is said to be finished but whose objects are not in the store yet."""

    jobs: int = 0
    oldest: float | None = None
    """Seconds since the longest-waiting of them finished."""


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """What the totals are of: `basis` says where they come from, None that they are not known."""

    basis: Literal["build", "configuration"] | None = None
    run: str | None = None
    started: float | None = None
    shards: int | None = None
    held_out: int | None = None
    prompts: int | None = None
    device: str | None = None
    target: str | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """A build as its store shows it at `now`."""

    store: str
    now: float
    plan: PlanInfo
    stages: tuple[Stage, ...]
    lanes: tuple[Lane, ...]
    failures: tuple[Failure, ...]
    eta: Eta
    cost: Cost
    lag: Lag
    finished: bool
    notes: tuple[str, ...]
    """Sentences for a person: unreadable objects, clocks that differ, totals that are not known."""

    def to_json(self) -> dict[str, Any]:
        """A JSON value: nested objects by field name, tuples as lists; of the failures the last 50, and their count."""
        shown = replace(self, failures=self.failures[:_FAILURES])
        return {"format": 1, **asdict(shown), "failure_count": len(self.failures)}

    def stage(self, name: str) -> Stage:
        """The stage of that name. Raises KeyError if there is none."""
        return {stage.name: stage for stage in self.stages}[name]
