"""Acceptance statistics of block decoding: lengths, shares by position, forwards saved, with bootstrap intervals.

Whole prompts are resampled, not blocks, because the blocks of one answer resemble each other. The random numbers are
seeded, so that the same decoding gives the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SEED = 0
_TAILS = (2.5, 97.5)

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Answer:
    """One decoded answer: its prompt's source, its number of tokens, and the proposals accepted in each block.

    The first token came with the prompt, before the first block.
    """

    source: str
    tokens: int
    accepted: Sequence[int]

    def room(self, most: int) -> list[int]:
        """How many of `most` proposals each block could have had accepted before the answer ended."""
        rooms, done = [], 1
        for taken in self.accepted:
            rooms.append(min(most, self.tokens - done))
            done += taken + 1
        return rooms


def summarize(answers: Sequence[Answer], most: int, resamples: int) -> dict[str, Any]:
    """Acceptance overall, by position 1 to `most` and by source; `most` is the proposals of a full block."""
    sources = sorted({answer.source for answer in answers})
    grouped = {source: [answer for answer in answers if answer.source == source] for source in sources}
    return {
        **_overall(answers, resamples),
        "by_position": _by_position(answers, most, resamples),
        "by_source": {source: _overall(group, resamples) for source, group in grouped.items()},
    }


def _overall(answers: Sequence[Answer], resamples: int) -> dict[str, Any]:
    tokens = np.array([answer.tokens for answer in answers])
    blocks = np.array([len(answer.accepted) for answer in answers])
    forwards = 1 + blocks
    return {
        "prompts": len(answers),
        "tokens": int(tokens.sum()),
        "target_forwards": int(forwards.sum()),
        "saved_forwards": int((tokens - forwards).sum()),
        "saved_share": _interval(lambda pick: 1 - _ratio(forwards[pick], tokens[pick]), len(answers), resamples),
        # Tokens a verifying forward yields: accepted proposals and the target's own token.
        "acceptance_length": _interval(lambda pick: _ratio(tokens[pick] - 1, blocks[pick]), len(answers), resamples),
    }


def _by_position(answers: Sequence[Answer], most: int, resamples: int) -> list[dict[str, Any]]:
    """Of the blocks with room for k proposals, the share that had at least k accepted."""
    rooms = [np.array(answer.room(most), dtype=np.int64) for answer in answers]
    taken = [np.array(answer.accepted, dtype=np.int64) for answer in answers]
    rows = []
    for position in range(1, most + 1):
        seen = np.array([(room >= position).sum() for room in rooms])
        kept = np.array([(count >= position).sum() for count in taken])
        if seen.sum() == 0:
            break
        share = _interval(_share_of(kept, seen), len(answers), resamples)
        rows.append({"position": position, "blocks": int(seen.sum()), "share": share})
    return rows


def _share_of(kept: Counts, seen: Counts) -> Callable[[Counts], NDArray[np.float64]]:
    return lambda pick: _ratio(kept[pick], seen[pick])


def _ratio(above: Counts, below: Counts) -> NDArray[np.float64]:
    """Ratio of sums along the last axis; NaN where nothing was counted."""
    total = below.sum(-1)
    return np.where(total > 0, above.sum(-1) / np.maximum(total, 1), np.nan)


def _interval(statistic: Callable[[Counts], NDArray[np.float64]], count: int, resamples: int) -> dict[str, float]:
    """A statistic of picked answers on all of them, with its 95% bootstrap interval; all 0 if nothing was counted.

    A resample in which nothing was counted says nothing about the statistic and is left out.
    """
    picks = np.random.default_rng(_SEED).integers(0, count, size=(resamples, count))
    drawn = statistic(picks)
    drawn = drawn[~np.isnan(drawn)]
    mean = float(statistic(np.arange(count)))
    low, high = np.percentile(drawn, _TAILS) if drawn.size else (mean, mean)
    return {
        name: round(float(np.nan_to_num(value)), 6) for name, value in (("mean", mean), ("low", low), ("high", high))
    }
