"""Measuring: from completions rows to counts and to a flag a row, in exact whole numbers and without sampling.

A pure function of tables and TokenInfo. A row cut off by length (finish_reason "length") is kept apart everywhere: with
a limit of 48 new tokens most rows of a small run have exactly 48, and that is no fault of the data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from draftmill.audit.boundary import CUT, IMPORTED
from draftmill.audit.columns import Bools, Ints, Ragged, among, loss_mask, ragged
from draftmill.audit.counts import Counts, Measurements, Pairs, duplicate_flags
from draftmill.audit.repetition import repetitive
from draftmill.audit.tokens import TokenInfo

THINKING = ("none", "closed", "unclosed_cut", "unclosed_ended")
_NO_MARK, _NO_ID = -1, -2
_LEAST_CUT = 32  # loss tokens below which an imported answer without an end token is not taken for cut
_HEAD = 256  # characters of a text that are looked at first; most answers say something there
# White space, controls, and characters that take no room: zero width, bidirectional marks, soft hyphen.
_INVISIBLE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]+")


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What was found in each row, in row order; all arrays [rows]."""

    loss_tokens: Ints
    cut: Bools
    thinking: npt.NDArray[np.int8]
    """Index into THINKING."""
    empty: Bools
    template_only: Bools
    repetitive: Bools
    duplicate: Bools
    boundary_moved: Bools

    @property
    def unclosed(self) -> Bools:
        """Rows whose thinking was opened and never closed."""
        return self.thinking >= THINKING.index("unclosed_cut")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a table and the facts of each of its rows."""

    measurements: Measurements
    rows: RowFacts


def measure(
    completions: pa.Table, rejected: pa.Table, tokens: TokenInfo, boundary_moved: Sequence[bool] | None = None
) -> Measured:
    """Measure tables with the columns of schemas.COMPLETIONS (text may be null) and schemas.REJECTED.

    `boundary_moved` marks rows whose prompt is no true prefix of the rendered conversation (audit of foreign sets).
    Raises ValueError if a loss mask is not as long as its output.
    """
    outputs = ragged(completions["output_ids"], np.int32)
    answers = outputs.select(loss_mask(completions["loss_mask"], outputs))
    cut = _cut(completions, answers.lengths)
    empty, template_only = _emptiness(answers, completions["text"], tokens)
    sources = np.array(completions["source"].to_pylist(), object)
    pairs = _pairs(answers, completions["prompt_id"].to_pylist())
    moved = np.zeros(len(cut), np.bool_) if boundary_moved is None else np.array(boundary_moved, np.bool_)
    facts = RowFacts(
        loss_tokens=answers.lengths,
        cut=cut,
        thinking=_thinking(ragged(completions["prompt_ids"], np.int32), outputs, cut, tokens),
        empty=empty,
        template_only=template_only,
        repetitive=repetitive(answers),
        duplicate=duplicate_flags({"": pairs})[""],
        boundary_moved=moved,
    )
    reasons = np.array(rejected["reason"].to_pylist(), object)
    refused = np.array(rejected["source"].to_pylist(), object)
    finish = np.array(completions["finish_reason"].to_pylist(), object)
    counts, digests = {}, {}
    for source in sorted({*sources.tolist(), *refused.tolist()}):
        chosen = sources == source
        counts[source] = _count(facts, finish, chosen, reasons[refused == source])
        digests[source] = pairs[chosen]
    return Measured(Measurements(counts, digests), facts)


def _cut(completions: pa.Table, loss_tokens: Ints) -> Bools:
    """Which answers were cut off by length.

    Of an imported answer that is only a guess from a missing end token, and the end may just be outside its mask. A
    short one is not excused by it from the test of the spike: nobody cuts a data set at a few tokens.
    """
    said = np.array([reason == CUT for reason in completions["finish_reason"].to_pylist()], np.bool_)
    guessed = np.array([origin == IMPORTED for origin in completions["origin"].to_pylist()], np.bool_)
    return said & ~(guessed & (loss_tokens < _LEAST_CUT))


def _count(facts: RowFacts, finish: npt.NDArray[np.object_], chosen: Bools, reasons: npt.NDArray[np.object_]) -> Counts:
    """Counts of the chosen rows; duplicates are left to Measurements, which sees all sources."""
    thinking = np.bincount(facts.thinking[chosen], minlength=len(THINKING)).tolist()
    return Counts(
        rows=int(chosen.sum()),
        histogram=_histogram(facts.loss_tokens[chosen & ~facts.cut]),
        histogram_cut=_histogram(facts.loss_tokens[chosen & facts.cut]),
        finish=_tally(finish[chosen]),
        thinking={name: count for name, count in zip(THINKING, thinking, strict=True) if count},
        empty=int((facts.empty & chosen).sum()),
        template_only=int((facts.template_only & chosen).sum()),
        repetitive=int((facts.repetitive & chosen).sum()),
        boundary_moved=int((facts.boundary_moved & chosen).sum()),
        rejected=_tally(reasons),
    )


def _histogram(values: Ints) -> dict[int, int]:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _tally(values: npt.NDArray[np.object_]) -> dict[str, int]:
    found, counts = np.unique(values.astype(str), return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _emptiness(answers: Ragged, texts: pa.ChunkedArray, tokens: TokenInfo) -> tuple[Bools, Bools]:
    """Rows that say nothing, and those of them that hold only what the chat template itself writes."""
    silent = answers.count(~among(answers.flat, tokens.silent_ids)) == 0
    frame = tokens.silent_ids - tokens.eos_ids - tokens.blank_ids
    framed = answers.count(among(answers.flat, frame)) > 0
    template_only = framed & (silent | _slices_of(answers, tokens.empty_turn))
    blank = np.array([text is not None and is_blank(text, tokens.marks) for text in texts.to_pylist()], np.bool_)
    return silent | template_only | blank, template_only


def _slices_of(answers: Ragged, turn: tuple[int, ...]) -> Bools:
    """Rows that are a piece of the template's empty turn, whose words (such as a channel's name) no one generated."""
    found = np.zeros(len(answers.lengths), np.bool_)
    pieces = {turn[start:end] for start in range(len(turn)) for end in range(start + 1, len(turn) + 1)}
    for index in np.flatnonzero((answers.lengths > 0) & (answers.lengths <= len(turn))):
        found[index] = tuple(answers.row(int(index)).tolist()) in pieces
    return found


def is_blank(text: str, marks: tuple[str, ...]) -> bool:
    """Whether a text holds nothing a reader could see beside the marks."""
    pattern = _marks_pattern(marks)
    # The head may end inside a mark, so only more than the longest mark proves that something is said.
    if len(_bare(text[:_HEAD], pattern)) > max(map(len, marks), default=0):
        return False
    return not _bare(text, pattern)


def _bare(text: str, pattern: re.Pattern[str]) -> str:
    return _INVISIBLE.sub("", pattern.sub("", text))


@lru_cache(maxsize=8)
def _marks_pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted((mark for mark in marks if mark), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _thinking(prompts: Ragged, outputs: Ragged, cut: Bools, tokens: TokenInfo) -> npt.NDArray[np.int8]:
    """Index into THINKING a row: the last mark of the output decides, or else the last mark of the prompt.

    A template may open the thinking in the prompt, so an output may hold the closing mark alone.
    """
    said, asked = _last_mark(outputs, tokens), _last_mark(prompts, tokens)
    opening, closing = (_NO_ID if i is None else i for i in (tokens.think_open, tokens.think_close))
    unclosed = (said == opening) | ((said == _NO_MARK) & (asked == opening))
    closed = said == closing
    names = np.select([unclosed & cut, unclosed, closed], [2, 3, 1], 0)
    return names.astype(np.int8)


def _last_mark(rows: Ragged, tokens: TokenInfo) -> Ints:
    """The last thinking mark of each row, _NO_MARK for none."""
    last = rows.last(among(rows.flat, tokens.think_ids))
    marks = np.full(len(last), _NO_MARK, np.int64)
    marks[last >= 0] = rows.flat[last[last >= 0]]
    return marks


def _pairs(answers: Ragged, prompt_ids: Sequence[str]) -> Pairs:
    """Digests of each row's answer and of its prompt's name; uint64 [rows, 2]."""
    data = memoryview(answers.flat.astype("<i4").tobytes())
    bounds = (answers.offsets * 4).tolist()
    pairs = [
        (_digest(data[bounds[row] : bounds[row + 1]]), _digest(name.encode())) for row, name in enumerate(prompt_ids)
    ]
    return np.array(pairs, np.uint64).reshape(-1, 2)


def _digest(data: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
