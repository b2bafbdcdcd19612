"""A state in Prometheus' text exposition format, version 0.0.4, for those who have Prometheus and Grafana.

Everything is a gauge: a build's numbers may fall, as when shards are built again. What is not known is left out, as the
format wants it. Names carry their units, labels are escaped as the format says.
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from draftmill.state.types import Eta, Lane, Rate, Stage, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]
Sample = tuple[Labels, float | None]


@dataclass(frozen=True)
class Gauge:
    """One metric: its name, what it is, and its samples."""

    name: str
    help: str
    samples: Sequence[Sample]

    def lines(self) -> Iterator[str]:
        """The metric's lines; none if nothing is known."""
        known = [(labels, value) for labels, value in self.samples if value is not None]
        if known:
            yield f"# HELP {self.name} {_escape(self.help)}"
            yield f"# TYPE {self.name} gauge"
            yield from (f"{self.name}{_labels(labels)} {float(value)!r}" for labels, value in known)


def metrics(state: State) -> str:
    """The state as one exposition."""
    gauges = [*_whole(state), *_stages(state), *_lanes(state)]
    return "".join(f"{line}\n" for gauge in gauges for line in gauge.lines())


def _whole(state: State) -> list[Gauge]:
    cost, lag, plan = state.cost, state.lag, state.plan
    spent = {"so_far": cost.spent, "expected_low": cost.total_low, "expected_high": cost.total_high}
    return [
        Gauge(
            "draftmill_finished", "Whether everything wanted is in the store (1) or not (0).", [({}, state.finished)]
        ),
        Gauge("draftmill_shards_wanted", "Prompt shards of the build.", [({}, plan.shards)]),
        Gauge("draftmill_prompts_wanted", "Prompts of the build.", [({}, plan.prompts)]),
        Gauge("draftmill_eta_seconds", "Time left for what is measured, 95% interval.", _eta(state.eta, {})),
        Gauge("draftmill_failures", "Jobs that failed and have not succeeded since.", [({}, len(state.failures))]),
        Gauge("draftmill_gpu_seconds", "GPU time that jobs held so far.", [({}, cost.gpu_hours * 3600)]),
        Gauge("draftmill_cost", "GPU time at the configured price.", [({"kind": k}, v) for k, v in spent.items()]),
        Gauge("draftmill_uncommitted_jobs", "Finished jobs whose objects are not in the store yet.", [({}, lag.jobs)]),
        Gauge("draftmill_uncommitted_oldest_seconds", "Age of the oldest of them.", [({}, lag.oldest)]),
        Gauge("draftmill_state_timestamp_seconds", "When the store was looked at, since 1970.", [({}, state.now)]),
    ]


def _stages(state: State) -> list[Gauge]:
    each = state.stages
    return [
        Gauge("draftmill_jobs", "Jobs by state; stale ones are among the running.", [*_jobs(each)]),
        Gauge("draftmill_jobs_wanted", "Jobs of the build.", [(_of(one), one.jobs.wanted) for one in each]),
        Gauge("draftmill_units", "Units done (rows, steps, prompts) by kind.", [*_units(each)]),
        Gauge(
            "draftmill_units_wanted",
            "Units of the build.",
            [(_of(one, unit=one.unit), one.rows.wanted) for one in each],
        ),
        Gauge("draftmill_tokens", "Tokens generated or read.", [(_of(one), one.tokens) for one in each]),
        Gauge(
            "draftmill_trained_tokens",
            "Tokens that count in the loss.",
            [(_of(one), one.trained_tokens) for one in each],
        ),
        Gauge("draftmill_tokens_per_second", "Tokens a second by span.", [*_rates(each, "token_rate")]),
        Gauge(
            "draftmill_trained_tokens_per_second",
            "Tokens a second that count in the loss, by span.",
            [*_rates(each, "trained_rate")],
        ),
        Gauge(
            "draftmill_stage_eta_seconds",
            "Time left for a stage, 95% interval.",
            [sample for one in each for sample in _eta(one.eta, _of(one))],
        ),
    ]


def _lanes(state: State) -> list[Gauge]:
    each = state.lanes
    gates = [(_lane(one) | {"verdict": one.gate.verdict}, 1.0) for one in each if one.gate is not None]
    return [
        Gauge(
            "draftmill_lane", "A lane and how it stands.", [(_lane(one) | {"state": one.state}, 1.0) for one in each]
        ),
        Gauge(
            "draftmill_lane_heartbeat_age_seconds", "Since a lane was last heard of.", [(_lane(o), o.age) for o in each]
        ),
        Gauge(
            "draftmill_lane_tokens_per_second",
            "Tokens a second of a lane at work.",
            [(_lane(one), one.tokens_per_second) for one in each if one.state == "running"],
        ),
        Gauge(
            "draftmill_lane_memory_bytes",
            "Memory of a lane's process on its host.",
            [(_lane(o), o.memory_bytes) for o in each],
        ),
        Gauge("draftmill_gate_verdict", "What the GPU gate said before a lane's job.", gates),
    ]


def _of(stage: Stage, **more: str) -> dict[str, str]:
    return {"stage": stage.name, **more}


def _lane(lane: Lane) -> dict[str, str]:
    return {"lane": lane.id, "host": lane.host, "stage": lane.stage, "subject": lane.subject}


def _jobs(stages: tuple[Stage, ...]) -> Iterator[Sample]:
    for one in stages:
        for state in ("done", "running", "stale", "failed", "interrupted", "waiting"):
            yield _of(one, state=state), getattr(one.jobs, state)


def _units(stages: tuple[Stage, ...]) -> Iterator[Sample]:
    for one in stages:
        for kind in ("useful", "rejected", "untold"):
            yield _of(one, unit=one.unit, kind=kind), getattr(one.rows, kind)


def _rates(stages: tuple[Stage, ...], name: str) -> Iterator[Sample]:
    for one in stages:
        rate: Rate = getattr(one, name)
        yield from ((_of(one, span=span), getattr(rate, span)) for span in ("minute", "hour", "all"))


def _eta(eta: Eta, labels: Labels) -> list[Sample]:
    return [({**labels, "bound": bound}, getattr(eta, bound)) for bound in ("low", "middle", "high")]


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_quote(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _quote(value: str) -> str:
    return _escape(value).replace('"', '\\"')


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
