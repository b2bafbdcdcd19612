"""Completions as flat arrays: all rows' tokens in one array, with offsets, so that no measurement loops over tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of values: `flat` [values], `offsets` int64 [rows + 1]; row r is flat[offsets[r]:offsets[r + 1]]."""

    flat: npt.NDArray[Any]
    offsets: Ints

    @property
    def lengths(self) -> Ints:
        """Values a row, int64 [rows]."""
        return np.diff(self.offsets)

    def count(self, flags: Bools) -> Ints:
        """How many of a row's values are flagged; `flags` [values] -> int64 [rows]."""
        return np.diff(np.concatenate([[0], np.cumsum(flags)])[self.offsets])

    def last(self, flags: Bools) -> Ints:
        """Where in `flat` a row's last flagged value is, -1 for none; int64 [rows]."""
        found = np.flatnonzero(flags)
        last = np.full(len(self.offsets) - 1, -1, np.int64)
        # Of several assignments to one row the last one stays, and positions ascend.
        last[np.searchsorted(self.offsets, found, side="right") - 1] = found
        return last

    def row(self, index: int) -> npt.NDArray[Any]:
        """The values of one row."""
        return self.flat[self.offsets[index] : self.offsets[index + 1]]

    def select(self, flags: Bools) -> Ragged:
        """Only the flagged values, rows kept."""
        return Ragged(self.flat[flags], np.concatenate([[0], np.cumsum(self.count(flags))]))


def ragged(column: pa.ChunkedArray, dtype: type[Any]) -> Ragged:
    """A list column as flat values; a null list is an empty row."""
    lists = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = lists.flatten().to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return Ragged(flat, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def loss_mask(column: pa.ChunkedArray, outputs: Ragged) -> Bools:
    """The mask over all output tokens; a null row is trained on whole. Raises ValueError where lengths differ."""
    given = column.is_valid().to_numpy()
    masks = ragged(column, np.bool_)
    wrong = np.flatnonzero(given & (masks.lengths != outputs.lengths))
    if len(wrong):
        raise ValueError(f"the loss mask of row {wrong[0]} is not as long as its output")
    flat = np.ones(len(outputs.flat), np.bool_)
    flat[np.repeat(given, outputs.lengths)] = masks.flat
    return flat


def among(values: npt.NDArray[Any], ids: Iterable[int]) -> Bools:
    """Which values are one of the ids."""
    return np.isin(values, np.fromiter(ids, np.int64))
