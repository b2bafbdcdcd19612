"""What was counted: whole numbers by source, which add up, so that a set's audit is the sum of its shards' audits.

Equal answers to different prompts do not add up by themselves: two shards may share one. So the measurements carry 16
bytes a row, a digest of the answer and one of its prompt, from which duplicates are counted anew after each merge.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from draftmill.audit.columns import Bools

Pairs = npt.NDArray[np.uint64]
_PAIR_TYPE = np.dtype("<u8")


class Counts(BaseModel):
    """Counts of one group of rows. Every row is in exactly one of `histogram` and `histogram_cut`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int = 0
    histogram: dict[int, int] = {}
    """Loss tokens -> rows that ended by themselves."""
    histogram_cut: dict[int, int] = {}
    """Loss tokens -> rows cut off by length."""
    finish: dict[str, int] = {}
    thinking: dict[str, int] = {}
    """`none`, `closed`, `unclosed_cut` (cut by length inside), `unclosed_ended` (ended by itself inside) -> rows."""
    empty: int = 0
    template_only: int = 0
    repetitive: int = 0
    duplicates: int = 0
    boundary_moved: int = 0
    rejected: dict[str, int] = {}

    def __add__(self, other: Counts) -> Counts:
        """The counts of both groups together."""
        return Counts(**{name: _add(getattr(self, name), getattr(other, name)) for name in Counts.model_fields})

    @property
    def loss_tokens(self) -> int:
        """Loss tokens of all rows."""
        return sum(value * rows for h in (self.histogram, self.histogram_cut) for value, rows in h.items())

    @property
    def cut(self) -> int:
        """Rows cut off by length."""
        return sum(self.histogram_cut.values())

    @property
    def spike(self) -> tuple[int, int]:
        """The most common exact number of loss tokens of rows not cut, and how many have it; (0, 0) for no row."""
        return max(self.histogram.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))

    @property
    def unclosed(self) -> int:
        """Rows whose thinking was opened and never closed."""
        return self.thinking.get("unclosed_cut", 0) + self.thinking.get("unclosed_ended", 0)

    @property
    def rejections(self) -> int:
        """Rows that have no answer."""
        return sum(self.rejected.values())

    @property
    def mean(self) -> float:
        """Mean number of loss tokens a row, 0 for no row."""
        return self.loss_tokens / self.rows if self.rows else 0.0

    def short(self, tokens: int) -> int:
        """Rows that ended by themselves with fewer loss tokens."""
        return sum(rows for value, rows in self.histogram.items() if value < tokens)


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, int):
        return left + right
    return dict(sorted((Counter(left) + Counter(right)).items()))


class Measurements:
    """Counts by source, and the digests of answers and prompts (uint64 [rows, 2], sorted) that duplicates need."""

    def __init__(self, by_source: Mapping[str, Counts], pairs: Mapping[str, Pairs]) -> None:
        self.pairs = {source: _sorted(pairs[source]) for source in sorted(pairs)}
        flags = duplicate_flags(self.pairs)
        self.by_source: dict[str, Counts] = {
            source: by_source[source].model_copy(
                update={"duplicates": int(flags[source].sum()) if source in flags else 0}
            )
            for source in sorted(by_source)
        }

    @property
    def overall(self) -> Counts:
        """The counts of all sources together."""
        return reduce(Counts.__add__, self.by_source.values(), Counts())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Measurements) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def to_json(self, *, pairs: bool = True) -> dict[str, Any]:
        """A JSON value; `pairs=False` leaves the digests out, and what is read from it can no longer be merged."""
        value: dict[str, Any] = {
            "overall": self.overall.model_dump(mode="json"),
            "by_source": {source: counts.model_dump(mode="json") for source, counts in self.by_source.items()},
        }
        if pairs:
            value["answers"] = {
                source: base64.b64encode(rows.astype(_PAIR_TYPE).tobytes()).decode()
                for source, rows in self.pairs.items()
            }
        return value

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Measurements:
        """Measurements that to_json() wrote with its digests. Raises KeyError or ValueError for anything else."""
        by_source = {source: Counts.model_validate(counts) for source, counts in value["by_source"].items()}
        pairs = {
            source: np.frombuffer(base64.b64decode(text), _PAIR_TYPE).reshape(-1, 2).astype(np.uint64)
            for source, text in value["answers"].items()
        }
        if any(counts.rows != len(pairs.get(source, ())) for source, counts in by_source.items()):
            raise ValueError("the digests do not fit the counts")
        return Measurements(by_source, pairs)


def merge(parts: Iterable[Measurements]) -> Measurements:
    """The measurements of all parts as if their rows had been measured together."""
    counts: dict[str, Counts] = {}
    pairs: dict[str, list[Pairs]] = {}
    for part in parts:
        for source, more in part.by_source.items():
            counts[source] = counts.get(source, Counts()) + more
        for source, rows in part.pairs.items():
            pairs.setdefault(source, []).append(rows)
    return Measurements(counts, {source: np.concatenate(rows) for source, rows in pairs.items()})


def duplicate_flags(pairs: Mapping[str, Pairs]) -> dict[str, Bools]:
    """Which rows have an answer that another prompt has too, by source, in the order given."""
    if not pairs:
        return {}
    every = np.unique(np.concatenate(list(pairs.values())), axis=0)
    answers, prompts = np.unique(every[:, 0], return_counts=True)
    shared = answers[prompts > 1]
    return {source: np.isin(rows[:, 0], shared) for source, rows in pairs.items()}


def _sorted(pairs: Pairs) -> Pairs:
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
