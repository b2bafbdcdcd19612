"""What the report reads: the audits, each window's train.json, and the evaluation, as typed values.

Only what is shown is read, and unknown keys are let through, so that an older object still gives a page. The audits
give their measurements alone: limits may change while the report, whose name they do not decide, stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from draftmill.audit.counts import Measurements, merge
from draftmill.audit.result import read_result
from draftmill.errors import UserError, reason


class Part(BaseModel):
    """A part of a JSON object of the store."""

    model_config = ConfigDict(frozen=True)


class Interval(Part):
    """A measured value with its 95% bootstrap interval."""

    mean: float
    low: float
    high: float


class Acceptance(Part):
    """Acceptance over some prompts: tokens, forwards of the target, and tokens a verifying forward yields."""

    prompts: int
    tokens: int
    target_forwards: int
    saved_forwards: int
    saved_share: Interval
    acceptance_length: Interval


class Position(Part):
    """Of the `blocks` with room for `position` proposals, the share that had at least so many accepted."""

    position: int
    blocks: int
    share: Interval


class Decoder(Acceptance):
    """One decoder's acceptance over all prompts, by position and by source."""

    by_position: list[Position]
    by_source: dict[str, Acceptance]


class Divergence(Part):
    """Where a decoder's text left the target's, and how far apart the target's two best logits were there."""

    decoder: str
    prompt_id: str
    position: int
    gap: float


class Evaluation(Part):
    """The measured acceptance of the last window's drafter."""

    prompts: int
    identical: int
    divergences: list[Divergence]
    drafter: Decoder
    prompt_lookup: Decoder
    too_long: int
    provenance: dict[str, Any]


class Point(Part):
    """One point of the loss curve: means since the point before; `step` counts in its window."""

    step: int
    learning_rate: float
    loss: float
    accuracy: float
    accepted: float


class Scores(Part):
    """What blocks scored: accuracy over all slots and by slot, and the mean number of leading slots that are right."""

    loss: float
    accuracy: float
    accuracy_by_position: list[float]
    accepted: float
    blocks: int


class Epoch(Part):
    """One epoch of a window; no held-out scores if no held-out row could be scored."""

    epoch: int
    step: int
    train: Scores
    held_out: Scores | None = None


class Window(Part):
    """The training of one window; `steps_before` are the steps of the windows before."""

    rows: int
    rows_without_anchor: int
    held_out_rows: int
    steps: int
    steps_before: int
    curve: list[Point]
    epochs: list[Epoch]
    shape: dict[str, Any]
    provenance: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Audits:
    """The measurements of all shards together, each shard's number of answers, and the versions that measured them."""

    measurements: Measurements
    rows: Mapping[str, int]
    """File name of the audit without its suffix -> answers."""
    provenance: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Run:
    """All that a run left for its report; windows in order."""

    audits: Audits
    windows: Sequence[Window]
    evaluation: Evaluation


def read_run(audits: Sequence[Path], train: Sequence[Path], evaluation: Path) -> Run:
    """Read a run's objects. Raises UserError for one that is missing, damaged, or of another kind."""
    if not train:
        raise UserError("The report needs the train.json of at least one window: build the drafter first.")
    windows = sorted((_read(path, Window) for path in train), key=lambda window: window.steps_before)
    return Run(_audits(audits), windows, _read(evaluation, Evaluation))


def _audits(paths: Sequence[Path]) -> Audits:
    results = {path.stem: read_result(path) for path in sorted(paths, key=lambda path: path.name)}
    return Audits(
        merge(result.measurements for result in results.values()),
        {name: result.measurements.overall.rows for name, result in results.items()},
        [result.provenance for result in results.values()],
    )


_Model = TypeVar("_Model", bound=Part)


def _read(path: Path, model: type[_Model]) -> _Model:
    try:
        return model.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError) as error:
        why = reason(error)
    raise UserError(f"{path} cannot be reported ({why}): delete it and build again.")
