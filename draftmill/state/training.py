"""The training so far and every measured acceptance: what train.json and the evaluations say, and the live job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from draftmill.catalog import identify
from draftmill.report.inputs import Evaluation, Window
from draftmill.state.documents import load_json
from draftmill.state.jobs import Picture
from draftmill.state.plan import Plan
from draftmill.state.read import Reader, Snapshot


@dataclass(frozen=True, slots=True)
class Live:
    """A window in training, from its heartbeat: steps done and in all, and the last step's numbers."""

    window: int
    done: int
    total: int
    age: float
    loss: float | None
    accuracy: float | None
    learning_rate: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """One evaluation in the store; `current` is that of the plan's own drafter."""

    key: str
    fingerprint: str
    at: float
    current: bool
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Training:
    """Windows by number that are trained on and whose train.json is there, the one in work, and all evaluations."""

    windows: Mapping[int, Window]
    wanted: int
    live: Live | None
    evaluations: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON value; windows by number as text."""
        return {
            "windows": {str(number): window.model_dump(mode="json") for number, window in self.windows.items()},
            "wanted": self.wanted,
            "live": None if self.live is None else {name: getattr(self.live, name) for name in Live.__slots__},
            "evaluations": [
                {
                    "key": one.key,
                    "fingerprint": one.fingerprint,
                    "at": one.at,
                    "current": one.current,
                    "evaluation": one.evaluation.model_dump(mode="json"),
                }
                for one in self.evaluations
            ],
        }


def training(reader: Reader, picture: Picture) -> Training:
    """What the store holds of training and acceptance; an object that is damaged is left out."""
    snapshot, plan, graph = picture.snapshot, picture.plan, picture.graph
    keys = {graph.drafter(number, "train.json"): number for number in range(len(graph.windows))}
    values = reader.json(keys, snapshot.listing)
    windows = {keys[key]: window for key, value in values.items() if (window := _window(value)) is not None}
    return Training(
        dict(sorted(windows.items())),
        len(graph.windows),
        _live(picture),
        _evaluations(reader, snapshot, plan),
    )


def _window(value: Any) -> Window | None:
    try:
        return Window.model_validate(value)
    except ValidationError:
        return None


def _live(picture: Picture) -> Live | None:
    for view in picture.views:
        if view.job.stage == "train" and view.live and view.beat is not None:
            beat = view.beat
            age = picture.now - (view.heard or picture.now)
            return Live(int(view.job.subject), view.done, view.total, age, beat.loss, beat.accuracy, beat.learning_rate)
    return None


def _evaluations(reader: Reader, snapshot: Snapshot, plan: Plan) -> tuple[Measured, ...]:
    entries = [entry for key in snapshot.listing if key.startswith("eval/") and (entry := identify(key))]
    values = reader.json([entry.key for entry in entries], snapshot.listing, _without_rows)
    found = []
    for entry in entries:
        try:
            measured = Evaluation.model_validate(values.get(entry.key))
        except ValidationError:
            continue
        at = snapshot.listing[entry.key].modified
        found.append(Measured(entry.key, entry.fp, at, entry.fp == plan.fingerprints["evaluate"], measured))
    return tuple(sorted(found, key=lambda one: (one.at, one.key)))


def _without_rows(data: bytes) -> Any:
    """An evaluation without its decoded tokens, which are most of it."""
    value = load_json(data)
    return {name: part for name, part in value.items() if name != "rows"} if isinstance(value, dict) else None
