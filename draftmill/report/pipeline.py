"""What was built from what: the stages in order, each with what came out and what was left behind.

The numbers come from the objects themselves, so each step can be held against the one before it: records read are all
accounted for, and prompts in are completions and rejected rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftmill.report.inputs import Run, Window
from draftmill.report.words import number, plural, size


@dataclass(frozen=True, slots=True)
class Step:
    """A box of the picture: a title, its main number with a unit, more lines, and what was lost on the way."""

    title: str
    count: str
    unit: str
    lines: Sequence[str] = ()
    lost: Sequence[str] = ()


def steps(run: Run, counts: Mapping[str, Any], train: Mapping[str, Any]) -> list[Step]:
    """The boxes; `counts` is what became of the records (prompts/scan.py), `train` the train stage's spec."""
    return [
        _read(counts),
        _split(counts, train),
        _completions(run),
        _audited(run),
        _hidden(run),
        _drafter(run.windows),
        _evaluation(run),
    ]


def _read(counts: Mapping[str, Any]) -> Step:
    bad = {kind: int(found["count"]) for kind, found in counts["bad"].items()}
    lost = [f"{number(count)} bad: {kind.replace('_', ' ')}" for kind, count in bad.items()]
    if counts["duplicates"]:
        lost.append(plural(counts["duplicates"], "exact duplicate"))
    if counts["beyond_max_prompts"]:
        lost.append(f"{number(counts['beyond_max_prompts'])} beyond max_prompts")
    return Step("Prompts read", number(counts["read"]), "records", lost=lost or ["none left out"])


def _split(counts: Mapping[str, Any], train: Mapping[str, Any]) -> Step:
    shards = sum(map(len, train["windows"]))
    return Step(
        "Shards",
        number(counts["train"] + counts["held_out"]),
        "prompts",
        [
            f"{number(counts['train'])} to train on, in {plural(shards, 'shard')}",
            f"{number(counts['held_out'])} held out, in {plural(len(train['held_out']), 'shard')}",
        ],
    )


def _completions(run: Run) -> Step:
    found = run.audits.measurements.overall
    lost = [f"{number(count)} rejected: {reason.replace('_', ' ')}" for reason, count in found.rejected.items()]
    lines = [plural(found.loss_tokens, "loss token"), f"{found.mean:.1f} an answer"]
    return Step("Completions", number(found.rows), "answers", lines, lost or ["0 rejected"])


def _audited(run: Run) -> Step:
    return Step("Audited", number(len(run.audits.rows)), "shards passed", ["every shard, or nothing is built on it"])


def _hidden(run: Run) -> Step:
    shape = run.windows[-1].shape
    taps, width = len(shape["taps"]), int(shape["hidden_size"])
    lines = [f"{plural(taps, 'tap')} of width {number(width)}, bfloat16"]
    return Step("Hidden states", size(taps * width * 2), "a token", lines)


def _drafter(windows: Sequence[Window]) -> Step:
    last = windows[-1]
    lines = [
        f"{plural(sum(window.rows for window in windows), 'row')} in {plural(len(windows), 'window')}, "
        f"{plural(len(last.epochs), 'epoch')} each",
        f"{plural(last.shape['num_layers'], 'layer')}, blocks of {last.shape['block_size']}",
    ]
    unused = sum(window.rows_without_anchor for window in windows)
    lost = [f"{plural(unused, 'row')} too short to train on"] if unused else []
    return Step("Drafter", number(last.steps_before + last.steps), "steps", lines, lost)


def _evaluation(run: Run) -> Step:
    found = run.evaluation
    lost = [f"{plural(found.too_long, 'prompt')} longer than the context"] if found.too_long else []
    lines = [plural(found.drafter.tokens, "token"), plural(found.drafter.target_forwards, "forward") + " of the target"]
    return Step("Evaluation", number(found.prompts), "held-out prompts", lines, lost)
