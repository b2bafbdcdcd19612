"""The histogram of loss tokens as plain numbers for an inline SVG: no script, readable offline, a few KB a page.

A bar is a bin of values. Inside it the most common single value of rows not cut by length is drawn solid, because the
limit is on one exact value and a bin may hide it; the limit's line is drawn at the height it has for such a value.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftmill.audit.counts import Counts

BINS = 48
WIDTH, HEIGHT = 720.0, 180.0  # the plot's area in SVG units


@dataclass(frozen=True, slots=True)
class Bar:
    """One bin [first, last]: rows that ended by themselves, rows cut, the most common value's rows; and its geometry.

    `x` and `width` in SVG units; `whole_y`, `cut_y` and `mode_y` are the tops of the stacked rectangles.
    """

    first: int
    last: int
    whole: int
    cut: int
    mode: int
    mode_value: int
    x: float
    width: float
    whole_y: float
    cut_y: float
    mode_y: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """All bars, the height of the limit's line (None if it is above the plot), and the axis' ends."""

    bars: list[Bar]
    limit_y: float | None
    limit_rows: float
    top: int
    low: int
    high: int
    mean_x: float


def histogram(counts: Counts, max_spike: float) -> Histogram | None:
    """The histogram of counts with the spike's limit; None for no row."""
    values = [*counts.histogram, *counts.histogram_cut]
    if not values:
        return None
    low, high = min(values), max(values)
    step = max(1, -(-(high - low + 1) // BINS))
    bins = -(-(high - low + 1) // step)
    groups = [_bin(counts, low + k * step, min(low + (k + 1) * step - 1, high)) for k in range(bins)]
    top = max(whole + cut for _, _, whole, cut, _, _ in groups)
    limit = max_spike * counts.rows
    width = WIDTH / bins
    bars = [
        Bar(
            *group,
            round(k * width, 2),
            round(width * 0.9, 2),
            _y(group[2], top),
            _y(group[2] + group[3], top),
            _y(group[4], top),
        )
        for k, group in enumerate(groups)
    ]
    mean_x = round((counts.mean - low + 0.5) / (bins * step) * WIDTH, 2)
    return Histogram(bars, _y(limit, top) if limit <= top else None, limit, top, low, high, mean_x)


def _bin(counts: Counts, first: int, last: int) -> tuple[int, int, int, int, int, int]:
    inside = {value: rows for value, rows in counts.histogram.items() if first <= value <= last}
    cut = sum(rows for value, rows in counts.histogram_cut.items() if first <= value <= last)
    value, mode = max(inside.items(), key=lambda item: (item[1], -item[0]), default=(first, 0))
    return first, last, sum(inside.values()), cut, mode, value


def _y(rows: float, top: int) -> float:
    return round(HEIGHT * (1 - rows / top), 2)
