"""Which limits the measurements break, decided so that a small shard does not fail by chance.

A share k of n is over its limit p when k/n > p and, were the true share just p, k or more of n rows would be bad in
fewer than one case of a hundred: the exact one-sided binomial test (Clopper and Pearson 1934, Biometrika 26). One bad
row of 20 never breaks a limit of 2%, 87% of 400 always breaks 30%, and the more rows there are, the nearer the rule
comes to the plain share; so the whole set is held to nearly the plain limit. A limit of 0 tolerates no row. Two notes:

- The most common number of loss tokens has at least one row whatever the data are, so the test of the spike is on the
  other rows: k-1 of n-1.
- The mean is over its limit when its one-sided 99% bound (normal, from the rows' own variance) is, and fewer than
  five rows have no say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftmill.audit.counts import Counts
from draftmill.config import AuditConfig

CHANCE = 0.01
_NORMAL_99 = 2.326
_LEAST_ROWS_FOR_MEAN = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One limit held against the counts: `count` of `rows`, as `measured`, may not be `over` the `limit`.

    For the mean, `measured` and `limit` are tokens; else shares. `value` is the spike's number of loss tokens.
    `fails_from` is the smallest count that would be over, None where none would.
    """

    code: str
    count: int
    rows: int
    measured: float
    limit: float
    over: bool
    fails_from: int | None = None
    value: int | None = None


def check(counts: Counts, limits: AuditConfig) -> list[Check]:
    """Every limit of the configuration, the most telling first."""
    answers, tried = counts.rows, counts.rows + counts.rejections
    value, rows = counts.spike
    return [
        _spike(value, rows, answers, limits.max_spike),
        _share("empty", counts.empty, answers, limits.max_empty),
        _share("short", counts.short(limits.short_tokens), answers, limits.max_short),
        _share("unclosed_thinking", counts.unclosed, answers, limits.max_unclosed_thinking),
        _share("repetitive", counts.repetitive, answers, limits.max_repetitive),
        _share("duplicates", counts.duplicates, answers, limits.max_duplicates),
        _share("cut", counts.cut, answers, limits.max_cut),
        _share("boundary_moved", counts.boundary_moved, answers, limits.max_boundary_moved),
        _share("rejected", counts.rejections, tried, limits.max_rejected),
        _mean(counts, limits.min_mean_loss_tokens),
    ]


def _share(code: str, count: int, rows: int, limit: float) -> Check:
    return Check(
        code, count, rows, count / rows if rows else 0.0, limit, is_over(count, rows, limit), fails_from(rows, limit)
    )


def _spike(value: int, count: int, rows: int, limit: float) -> Check:
    least = fails_from(rows - 1, limit) if rows else None
    return Check(
        "spike",
        count,
        rows,
        count / rows if rows else 0.0,
        limit,
        count / max(rows, 1) > limit and is_over(count - 1, rows - 1, limit),
        None if least is None else least + 1,
        value,
    )


def _mean(counts: Counts, limit: float) -> Check:
    n, mean = counts.rows, counts.mean
    over = False
    if n >= _LEAST_ROWS_FOR_MEAN:
        over = mean + _NORMAL_99 * math.sqrt(_variance(counts) / n) < limit
    return Check("mean_loss_tokens", n, n, mean, limit, over)


def _variance(counts: Counts) -> float:
    mean, items = counts.mean, [*counts.histogram.items(), *counts.histogram_cut.items()]
    return sum(rows * (value - mean) ** 2 for value, rows in items) / (counts.rows - 1)


def is_over(count: int, rows: int, limit: float) -> bool:
    """Whether `count` bad rows of `rows` show that the share of bad rows is above the limit (see the module)."""
    return count > limit * rows and binomial_tail(count, rows, limit) < CHANCE


def fails_from(rows: int, limit: float) -> int | None:
    """The smallest count of bad rows that is over the limit; None if not even all rows would be."""
    if rows < 1 or not is_over(rows, rows, limit):
        return None
    low, high = int(limit * rows), rows  # `low` is not over, `high` is
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_over(middle, rows, limit) else (middle, high)
    return high


def binomial_tail(count: int, rows: int, p: float) -> float:
    """P(X >= count) for X binomial(rows, p), for count > rows * p, where the terms only fall."""
    if p <= 0 or p >= 1:
        return float(p >= 1)
    choose = math.lgamma(rows + 1) - math.lgamma(count + 1) - math.lgamma(rows - count + 1)
    term = math.exp(choose + count * math.log(p) + (rows - count) * math.log1p(-p))
    total, k = 0.0, count
    while k < rows and term > total * 1e-12:
        total += term
        term *= (rows - k) / (k + 1) * p / (1 - p)
        k += 1
    return min(total + term, 1.0)


def broken(checks: Sequence[Check]) -> list[Check]:
    """The checks that are over their limit, the most telling first."""
    return [one for one in checks if one.over]
