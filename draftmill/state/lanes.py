"""Lanes: each GPU, or each process where no GPU is told, with the job that it was last heard of.

They come from all heartbeats, those of builds with other settings too, because a GPU serves whoever holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftmill.catalog import parts
from draftmill.state.documents import Beat, Claim
from draftmill.state.jobs import beat_state, heard_at, is_held, skew
from draftmill.state.read import Snapshot
from draftmill.state.types import GateVerdict, JobState, Lane, LaneState, ServerState

FORGOTTEN_S = 24 * 3600.0
_SKEW_S = 10.0
_LANE_STATES: dict[JobState, LaneState] = {
    "running": "running",
    "stale": "stale",
    "interrupted": "lost",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class Segment:
    """A span that a lane spent on a job: the last try of each, between its first and its last heartbeat."""

    lane: str
    gpu: str | None
    host: str
    stage: str
    name: str
    subject: str
    start: float
    end: float
    state: LaneState


def lanes(snapshot: Snapshot, now: float) -> tuple[Lane, ...]:
    """Every lane that was heard of within a day; processes without a GPU only while they are at work or lost."""
    newest: dict[str, Lane] = {}
    for lane in _each(snapshot, now):
        held = newest.get(lane.id)
        if held is None or _rank(lane) > _rank(held):
            newest[lane.id] = lane
    shown = (lane for lane in newest.values() if lane.gpu is not None or lane.state in ("running", "stale", "lost"))
    return tuple(sorted(shown, key=lambda lane: (lane.host, lane.gpu or "", lane.id)))


def _rank(lane: Lane) -> tuple[bool, float, str]:
    """A job at work counts before one that ended on the same GPU a moment ago."""
    return lane.state in ("running", "stale"), -lane.age, lane.name


def _each(snapshot: Snapshot, now: float) -> Iterator[Lane]:
    for (stage, name), beat in snapshot.beats.items():
        heard = heard_at(snapshot, (stage, name))
        if heard is None or now - heard > FORGOTTEN_S:
            continue
        state = _state(beat, heard, snapshot.claims.get((stage, name)), now)
        for lane, gpu in _places(beat):
            yield _lane(lane, gpu, stage, name, beat, state, heard, now)


def _places(beat: Beat) -> list[tuple[str, str | None]]:
    return [(gpu, gpu) for gpu in beat.gpus] or [(f"{beat.host}/{beat.pid}", None)]


def _state(beat: Beat, heard: float, claim: Claim | None, now: float) -> LaneState:
    """As the job itself is counted (jobs.py); one that is done and holds its claim still publishes."""
    if beat.state == "done" and not is_held(claim, now):
        return "idle"
    return _LANE_STATES[beat_state(beat, heard, claim, now)]


def _lane(
    lane: str, gpu: str | None, stage: str, name: str, beat: Beat, state: LaneState, heard: float, now: float
) -> Lane:
    ahead, server, gate = skew(beat, heard), beat.server, beat.gate
    return Lane(
        id=lane,
        gpu=gpu,
        host=beat.host,
        pid=beat.pid,
        state=state,
        stage=stage,
        name=name,
        subject=parts(stage, name).part,
        unit=beat.unit,
        done=beat.done,
        total=beat.total,
        tokens_per_second=beat.tokens_1m if beat.tokens_1m is not None else beat.tokens_per_second,
        age=max(now - heard, 0.0),
        clock_skew=ahead if abs(ahead) > _SKEW_S else None,
        server=ServerState(server.uuid, server.url, server.state, server.epoch) if server else None,
        gate=GateVerdict(gate.verdict, gate.checked_at, gate.reasons) if gate else None,
        memory_bytes=beat.memory_bytes,
    )


def segments(snapshot: Snapshot, since: float, now: float) -> tuple[Segment, ...]:
    """What each lane did since a time, in the order of beginning; gaps between them are idle."""
    found: list[Segment] = []
    for (stage, name), beat in snapshot.beats.items():
        heard = heard_at(snapshot, (stage, name))
        if heard is None or heard < since or beat.started is None:
            continue
        state = _state(beat, heard, snapshot.claims.get((stage, name)), now)
        start = min(beat.started - skew(beat, heard), heard)
        end = now if state == beat.state == "running" else heard
        subject = parts(stage, name).part
        found += [Segment(lane, gpu, beat.host, stage, name, subject, start, end, state) for lane, gpu in _places(beat)]
    return tuple(sorted(found, key=lambda one: (one.start, one.lane, one.name)))
