"""The plan as frozen values with a plain JSON form. Sizes are in bytes, times in GPU-hours, money in the price's currency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Kind = Literal["new", "prompts", "setting", "upstream", "missing", "removed"]
"""Why a job is planned. new: nothing like it was made before; prompts: its shard holds edited prompts; setting: a setting
of its stage changed; upstream: only an earlier stage changed; missing: it was made and its object is gone; removed: as
missing, but gone on purpose, under policy window once its window had been trained on."""
Source = Literal["pilot", "history", "older history", "default"]
"""Where a rate comes from: the pilot's record and jobs; finished jobs of the same settings; finished jobs of other settings; a
guess of the configuration."""

NEW: frozenset[Kind] = frozenset({"new"})
CHANGED: frozenset[Kind] = frozenset({"prompts", "setting", "upstream"})
MISSING: frozenset[Kind] = frozenset({"missing", "removed"})


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95% interval; low and high are None where too little was measured for one."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self, factor: float) -> Estimate:
        """The estimate of a multiple."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, low, high)

    def at_most(self, limit: float) -> Estimate:
        """The estimate of what is cut off at a limit."""
        low, high = (None if end is None else min(end, limit) for end in (self.low, self.high))
        return Estimate(min(self.value, limit), low, high)

    def product(self, other: Estimate) -> Estimate:
        """The product with an independent estimate; relative errors add up in quadrature."""
        if self.low is None or self.high is None:
            return Estimate(self.value * other.value)
        if other.low is None or other.high is None:
            return Estimate(self.value * other.value)
        return _around(self.value * other.value, _relative(self), _relative(other))


def _relative(one: Estimate) -> float:
    return 0.0 if one.value == 0 or one.high is None else (one.high - one.value) / one.value


def _around(value: float, *relative: float) -> Estimate:
    error = value * sum(part**2 for part in relative) ** 0.5
    return Estimate(value, max(value - error, 0.0), value + error)


def total(parts: Iterable[Estimate]) -> Estimate:
    """The sum of independent estimates; it has an interval only if every part that is not zero has one."""
    some = [part for part in parts if part.value]
    value = sum(part.value for part in some)
    errors = [part.high - part.value for part in some if part.high is not None]
    if len(errors) < len(some):
        return Estimate(value)
    error = sum(part**2 for part in errors) ** 0.5
    return Estimate(value, max(value - error, 0.0), value + error)


@dataclass(frozen=True, slots=True)
class Rate:
    """One number that the plan multiplies by, in `unit`, and where it comes from: how many `jobs` were measured."""

    estimate: Estimate
    unit: str
    source: Source
    jobs: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that differs from that of an earlier fingerprint."""

    setting: str
    was: Any
    now: Any


@dataclass(frozen=True, slots=True)
class Edited:
    """A shard that holds other prompts than the ones it takes the place of, as half-open ranges of its rows."""

    shard: str
    rows: int
    new: tuple[tuple[int, int], ...]
    instead_of: tuple[str, ...]

    @property
    def new_rows(self) -> int:
        """Prompts that no earlier shard held."""
        return sum(stop - start for start, stop in self.new)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why some jobs of a stage are planned: the differences from `since`, the stages `upstream` that changed."""

    kind: Kind
    jobs: int
    since: str = ""
    differences: tuple[Difference, ...] = ()
    upstream: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Orphans:
    """Objects of a stage in the store that this configuration never reaches."""

    objects: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """What the planned jobs of a stage take; `tokens` are generated, read or trained on.

    `rows_taken_over` have an answer by the same settings already and are not generated, as far as it is valid.
    """

    rows: int = 0
    rows_taken_over: int = 0
    tokens: Estimate = Estimate(0.0, 0.0, 0.0)
    gpu_hours: Estimate = Estimate(0.0, 0.0, 0.0)
    bytes: Estimate = Estimate(0.0, 0.0, 0.0)
    rates: Mapping[str, Rate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: wanted = exist + new + changed + missing, and the last three are what is planned."""

    stage: str
    fingerprint: str
    exist: int
    causes: tuple[Cause, ...]
    orphaned: Orphans
    need: Need

    def _of(self, kinds: frozenset[Kind]) -> int:
        return sum(cause.jobs for cause in self.causes if cause.kind in kinds)

    @property
    def new(self) -> int:
        """Planned jobs of which no earlier version was ever made."""
        return self._of(NEW)

    @property
    def changed(self) -> int:
        """Planned jobs of which the store has or had an earlier version."""
        return self._of(CHANGED)

    @property
    def missing(self) -> int:
        """Planned jobs whose very object was made before and is gone."""
        return self._of(MISSING)

    @property
    def planned(self) -> int:
        """Jobs that a build would run."""
        return self.new + self.changed + self.missing

    @property
    def wanted(self) -> int:
        """Objects that the configuration asks for now."""
        return self.exist + self.planned


@dataclass(frozen=True, slots=True)
class States:
    """Hidden states, apart from everything else: bytes to write, most bytes in the store at once, and the budget."""

    written: Estimate
    peak: Estimate
    budget: float
    extracted_again: int
    """Shards whose states were removed after training and must be extracted a second time, and what that takes."""
    again_bytes: Estimate
    again_hours: Estimate


@dataclass(frozen=True, slots=True)
class Plan:
    """What a build of this configuration would do now. `rules` counts jobs as `snakemake -n` does."""

    store: str
    device: str
    prompts: int
    stages: tuple[StagePlan, ...]
    rules: Mapping[str, int]
    edited: tuple[Edited, ...]
    orphaned_prompts: Orphans
    states: States
    gpu_hours: Estimate
    """With device cpu, hours of jobs."""
    bytes: Estimate
    """Of completions; hidden states stand apart."""
    price: float | None
    cost: Estimate | None

    def stage(self, name: str) -> StagePlan:
        """The stage of that name. Raises KeyError if there is none."""
        return {stage.stage: stage for stage in self.stages}[name]

    @property
    def jobs(self) -> int:
        """Jobs that a build would run, without sentinels."""
        return sum(stage.planned for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """A JSON value: nested objects by field name, tuples as lists."""
        counts = ("wanted", "new", "changed", "missing", "planned")
        stages = [{**asdict(one), **{name: getattr(one, name) for name in counts}} for one in self.stages]
        return {"format": 1, "jobs": self.jobs, **asdict(replace(self, stages=())), "stages": stages}
