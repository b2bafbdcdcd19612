"""The train stage: one window of hidden states, all its epochs, from the previous window's drafter to the next.

`train.json` is written last, so that its presence means a whole window.

The loop's only state is its step number: order, anchors and learning rate are functions of it. A checkpoint in the
journal every few steps therefore suffices to resume a killed run to the same bytes (on a CPU; on a GPU up to rounding).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftmill.config import TrainConfig
from draftmill.drafter import ranks
from draftmill.drafter.checkpoint import (
    TRAIN_FILE,
    TRAINER_FILE,
    load_trainer,
    read_json,
    save_drafter,
    save_trainer,
    write_json,
)
from draftmill.drafter.data import Rows, split_steps
from draftmill.drafter.model import Drafter
from draftmill.drafter.objective import schedule
from draftmill.drafter.spec import DrafterShape
from draftmill.drafter.tally import Tally
from draftmill.drafter.trainer import Trainer
from draftmill.errors import UserError

# Steps done in this window, steps of this window, and the loss, learning rate and accuracy of the last step.
Progress = Callable[[int, int, Mapping[str, float]], None]

_CURVE_POINTS = 200


@dataclass(slots=True)
class _Log:
    """What train.json says, as far as the loop has come; it goes through the journal with the weights."""

    step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    recent: dict[str, Any] | None = None
    epoch: dict[str, Any] | None = None


def train_window(
    *,
    hidden: Sequence[Path],
    held_out: Sequence[Path],
    previous: Path | None,
    output: Path,
    journal: Path,
    saved: Callable[[Path], None] = lambda path: None,
    shape: DrafterShape,
    target: Mapping[str, Any],
    embed: torch.Tensor,
    head: torch.Tensor,
    config: TrainConfig,
    span: tuple[float, float] = (0.0, 1.0),
    device: torch.device,
    provenance: Mapping[str, Any],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train on the shards `hidden` and publish the drafter in the folder `output`; returns what train.json holds.

    `previous` is the folder of the window before (None: fresh weights), `target` the target's config.json, `embed` and
    `head` [vocabulary, width] are its frozen matrices. `span` is the share of the whole run that this window covers, so
    that warmup and cosine stretch over all windows. `journal` is a folder of this job alone, removed at the end;
    `saved` hears of each checkpoint there.
    Raises UserError if no row can be trained on or the shards do not fit the drafter.
    """
    rows = Rows(hidden, len(shape.taps), shape.hidden_size, config.max_length)
    if not len(rows):
        raise UserError(
            f"None of the {rows.skipped} rows of {hidden[0]} and its window has two generated tokens in a row within "
            f"train.max_length = {config.max_length} tokens, so there is nothing to train on."
        )
    unseen = Rows(held_out, len(shape.taps), shape.hidden_size, config.max_length)
    trainer = Trainer(Drafter(shape).initialize(config.seed, head), embed, head, config, device)
    checkpoint = journal / TRAINER_FILE
    log = _resume(checkpoint, trainer, provenance) or _start_from(previous, trainer)
    _Loop(trainer, rows, unseen, config, span, log, checkpoint, saved, dict(provenance), progress).run()
    result = {
        "rows": len(rows),
        "rows_without_anchor": rows.skipped,
        "held_out_rows": len(unseen),
        "steps": log.step,
        "steps_before": _steps_until(previous),
        "span": list(span),
        "curve": log.curve,
        "epochs": log.epochs,
        "shape": shape.describe(),
        "provenance": dict(provenance),
    }
    if ranks.rank() == 0:
        _publish(output, trainer, target, result)
        shutil.rmtree(journal, ignore_errors=True)
    ranks.wait_for_all()
    return result


def _steps_until(previous: Path | None) -> int:
    """How many steps the run has behind it after the window before this one."""
    if previous is None:
        return 0
    train = read_json(previous / TRAIN_FILE)
    return int(train["steps_before"]) + int(train["steps"])


def _resume(saved: Path, trainer: Trainer, provenance: Mapping[str, Any]) -> _Log | None:
    """Go on from the journal; None if it holds nothing of this very job."""
    if not saved.exists():
        return None
    tensors, state = load_trainer(saved)
    if state["provenance"] != dict(provenance):
        return None
    trainer.optimizer.load(tensors)
    return _Log(**state["log"])


def _start_from(previous: Path | None, trainer: Trainer) -> _Log:
    """Begin the window with the drafter and optimiser of the one before, or as they are."""
    if previous is not None:
        trainer.optimizer.load(load_trainer(previous / TRAINER_FILE)[0])
    return _Log()


def _publish(output: Path, trainer: Trainer, target: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    provenance = result["provenance"]
    save_drafter(output, trainer.drafter, target, provenance)
    save_trainer(output / TRAINER_FILE, trainer.optimizer.state(), {"provenance": provenance})
    write_json(output / TRAIN_FILE, result)


@dataclass(slots=True)
class _Loop:
    """The training loop over one window."""

    trainer: Trainer
    rows: Rows
    unseen: Rows
    config: TrainConfig
    span: tuple[float, float]
    log: _Log
    checkpoint: Path
    saved: Callable[[Path], None]
    provenance: dict[str, Any]
    progress: Progress | None

    @property
    def epoch_steps(self) -> int:
        return math.ceil(len(self.rows) / self.config.batch_rows)

    @property
    def steps(self) -> int:
        return self.epoch_steps * self.config.epochs

    def run(self) -> None:
        for epoch, numbers in self._remaining():
            learning_rate = self._learning_rate(self.log.step)
            tally = self.trainer.step(self.rows, numbers, epoch, learning_rate)
            self._refuse_diverged(tally, learning_rate)
            self.log.step += 1
            self._record(tally, learning_rate)
            if self.log.step % self.epoch_steps == 0:
                self._end_epoch(epoch)
            if self.log.step % self.config.save_every == 0 and self.log.step < self.steps:
                self._save()

    def _refuse_diverged(self, tally: Tally, learning_rate: float) -> None:
        loss = tally.summary()["loss"]
        if not math.isfinite(loss):
            raise UserError(
                f"Training diverged: the loss is {loss} after step {self.log.step + 1} at learning rate {learning_rate:.3g}; "
                "lower train.learning_rate or train.clip_norm."
            )

    def _remaining(self) -> Iterator[tuple[int, list[int]]]:
        """Epoch and row numbers of every step that is still to be taken."""
        first, done = divmod(self.log.step, self.epoch_steps)
        for epoch in range(first, self.config.epochs):
            order = self.rows.shuffled(self.config.seed, epoch)
            batches = list(split_steps(order, self.config.batch_rows, ranks.rank(), ranks.ranks()))
            for numbers in batches[done if epoch == first else 0 :]:
                yield epoch, numbers

    def _learning_rate(self, step: int) -> float:
        start, end = self.span
        share = start + (end - start) * (step + 0.5) / self.steps
        return schedule(share, self.config.warmup, self.config.learning_rate, self.config.min_learning_rate)

    def _record(self, tally: Tally, learning_rate: float) -> None:
        log = self.log
        recent, epoch = self._sums(log.recent), self._sums(log.epoch)
        recent.add(tally)
        epoch.add(tally)
        log.recent, log.epoch = recent.state(), epoch.state()
        if log.step % max(1, self.steps // _CURVE_POINTS) == 0 or log.step == self.steps:
            summary = recent.summary()
            point = {key: summary[key] for key in ("loss", "accuracy", "accepted")}
            log.curve.append({"step": log.step, "learning_rate": learning_rate, **point})
            log.recent = None
        if self.progress is not None and ranks.rank() == 0:
            last = tally.summary()
            facts = {"loss": last["loss"], "accuracy": last["accuracy"], "learning_rate": learning_rate}
            self.progress(log.step, self.steps, facts)

    def _sums(self, state: dict[str, Any] | None) -> Tally:
        return Tally.empty(self.trainer.drafter.shape.block_size) if state is None else Tally(**state)

    def _end_epoch(self, epoch: int) -> None:
        trained = self._sums(self.log.epoch).summary()
        scores = {"epoch": epoch + 1, "step": self.log.step, "train": trained}
        if len(self.unseen):
            scores["held_out"] = self.trainer.held_out(self.unseen).summary()
        self.log.epochs.append(scores)
        self.log.epoch = None

    def _save(self) -> None:
        if ranks.rank() == 0:
            log = {name: getattr(self.log, name) for name in _Log.__slots__}
            save_trainer(self.checkpoint, self.trainer.optimizer.state(), {"log": log, "provenance": self.provenance})
            self.saved(self.checkpoint)
        ranks.wait_for_all()
