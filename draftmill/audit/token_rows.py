"""Rows of `input_ids` and `loss_mask` gathered into completions and rejected tables, column by column.

The prompt is everything before a row's first loss token, the output the rest. Rows are taken as they come and checked
all at once; only a chunk that does not fit is looked at row by row, to refuse the rows that are wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from draftmill.audit.boundary import CUT, IMPORTED, STOP
from draftmill.audit.columns import Bools, Ragged, among, ragged
from draftmill.audit.sentences import UNKNOWN
from draftmill.audit.tokens import TokenInfo
from draftmill.prompts.bad import BadRecord
from draftmill.prompts.record import parse_answered
from draftmill.schemas import REJECTED

_IDS, _BITS = pa.list_(pa.int32()), pa.list_(pa.int8())
_WRONG = "wrong_type"


def is_token_record(value: Any) -> bool:
    """Whether a raw record holds token ids rather than messages."""
    return isinstance(value, dict) and value.get("input_ids") is not None


class TokenRows:
    """One chunk of rows of one source."""

    def __init__(self, source: str, tokens: TokenInfo) -> None:
        self._source, self._tokens = source, tokens
        self._ids: list[Any] = []
        self._masks: list[Any] = []
        self._finish: list[Any] = []
        self._places: list[str] = []
        self._moved: list[bool] = []
        self._whole: tuple[Ragged, Ragged] | None = None
        self._rejected: list[dict[str, Any]] = []

    @property
    def moved(self) -> list[bool]:
        """For each row of the completions table whether its boundary moved; complete once tables() was called."""
        return self._moved

    def reject(self, reason: str, detail: str) -> None:
        """Count a record that is no row."""
        self._rejected.append(
            {"prompt_id": "", "sample": 0, "source": self._source, "reason": str(reason), "detail": detail}
        )

    def add(self, ids: Sequence[int], start: int, place: str, *, moved: bool) -> None:
        """Add a rendered conversation whose answer begins at `start`."""
        self._take(list(ids), [0] * start + [1] * (len(ids) - start), None, place, moved)

    def add_record(self, value: Mapping[str, Any], place: str) -> None:
        """Add a record with input_ids and loss_mask; it is checked in tables()."""
        self._take(value["input_ids"], value.get("loss_mask"), value.get("finish_reason"), place, False)

    def _take(self, ids: Any, mask: Any, finish: Any, place: str, moved: bool) -> None:
        self._ids.append(ids)
        self._masks.append(mask)
        self._finish.append(finish if isinstance(finish, str) else None)
        self._places.append(place)
        self._moved.append(moved)

    def add_table(self, table: pa.Table, places: Sequence[str]) -> None:
        """Take a whole table with the columns input_ids and loss_mask; used alone, for a chunk of Parquet."""
        finish = (
            table["finish_reason"].to_pylist() if "finish_reason" in table.column_names else [None] * table.num_rows
        )
        ids, masks = table["input_ids"], table["loss_mask"]
        try:
            ids, masks = ids.cast(_IDS), masks.cast(_BITS)
            whole = ragged(ids, np.int32), ragged(masks, np.int8)
        except (pa.ArrowException, ValueError, TypeError):
            whole = None
        if whole is not None and ids.null_count + masks.null_count == 0 and _fit(*whole):
            self._whole = whole
            ids = masks = [None] * table.num_rows
        else:
            ids, masks = table["input_ids"].to_pylist(), table["loss_mask"].to_pylist()
        for row in zip(ids, masks, finish, places, strict=True):
            self._take(*row, False)

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """Completions with a column `place`, and rejected."""
        ids, masks = self._whole or self._columns()
        table = self._completions(ids, Ragged(masks.flat.astype(np.bool_), masks.offsets))
        return table, pa.Table.from_pylist(self._rejected, schema=REJECTED)

    def _columns(self) -> tuple[Ragged, Ragged]:
        columns = _columns_of(self._ids, self._masks)
        if columns is None:
            kept = [row for row in range(len(self._ids)) if self._is_good(row)]
            for name in ("_ids", "_masks", "_finish", "_places", "_moved"):
                setattr(self, name, [getattr(self, name)[row] for row in kept])
            columns = _columns_of(self._ids, [[int(bit) for bit in mask] for mask in self._masks])
        if columns is None:
            raise ValueError("rows that are good one by one do not fit together")
        return columns

    def _is_good(self, row: int) -> bool:
        place = self._places[row]
        try:
            record = parse_answered({"input_ids": self._ids[row], "loss_mask": self._masks[row]}).record
        except BadRecord as bad:
            self.reject(bad.kind, f"{place}: {bad.reason}")
            return False
        if _columns_of([record["input_ids"]], [record["loss_mask"]]) is None:
            self.reject(_WRONG, f"{place}: `input_ids` holds an id of more than 31 bits")
            return False
        return True

    def _completions(self, ids: Ragged, mask: Ragged) -> pa.Table:
        start = _first(mask)
        position = np.arange(len(ids.flat)) - np.repeat(ids.offsets[:-1], ids.lengths)
        is_output = position >= np.repeat(start, ids.lengths)
        prompts, outputs, loss = ids.select(~is_output), ids.select(is_output), mask.select(is_output)
        rows = len(self._places)
        table = pa.table(
            {
                "prompt_id": pa.array(_names(prompts), pa.string()),
                "sample": pa.array(np.zeros(rows, np.int32)),
                "source": pa.array([self._source] * rows, pa.string()),
                "origin": pa.array([IMPORTED] * rows, pa.string()),
                "prompt_ids": _list_array(prompts, pa.int32()),
                "output_ids": _list_array(outputs, pa.int32()),
                "loss_mask": _list_array(loss, pa.bool_()),
                "finish_reason": pa.array(self._finish_reasons(outputs, loss.flat), pa.string()),
                "text": pa.nulls(rows, pa.string()),
                "place": pa.array(self._places, pa.string()),
            }
        )
        return self._without_bad_ids(table, ids)

    def _finish_reasons(self, outputs: Ragged, loss: Bools) -> list[str]:
        """As given, else by the rule of boundary.finish_reason, else unknown."""
        if not self._tokens.eos_ids:
            return [given or UNKNOWN for given in self._finish]
        said = outputs.last(loss & ~among(outputs.flat, self._tokens.blank_ids))
        ended = outputs.last(among(outputs.flat, self._tokens.eos_ids))
        stopped = (ended >= said) & (ended >= 0)
        return [given or (STOP if stop else CUT) for given, stop in zip(self._finish, stopped, strict=True)]

    def _without_bad_ids(self, table: pa.Table, ids: Ragged) -> pa.Table:
        """The table without rows whose ids the tokenizer does not have; they go to the rejected ones."""
        limit = self._tokens.vocabulary if self._tokens.vocabulary is not None else np.iinfo(np.int32).max
        bad = ids.count((ids.flat < 0) | (ids.flat >= limit)) > 0
        for row in np.flatnonzero(bad):
            self.reject("bad_ids", f"{self._places[row]}: an id lies outside the vocabulary of {limit}")
        self._moved = [moved for moved, wrong in zip(self._moved, bad, strict=True) if not wrong]
        return table.filter(pa.array(~bad))


def _columns_of(ids: Sequence[Any], masks: Sequence[Any]) -> tuple[Ragged, Ragged] | None:
    """The rows as two columns; None if any row is no list of ids with a mask of 0 and 1 of its length."""
    try:
        columns = ragged(pa.array(ids, _IDS), np.int32), ragged(_bits(masks), np.int8)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    good = _fit(*columns) and not any(row is None for row in (*ids, *masks))
    return columns if good else None


def _bits(masks: Sequence[Any]) -> pa.Array:
    try:
        return pa.array(masks, _BITS)
    except (pa.ArrowException, TypeError):
        return pa.array(masks, pa.list_(pa.bool_())).cast(_BITS)


def _fit(ids: Ragged, masks: Ragged) -> bool:
    same = np.array_equal(ids.offsets, masks.offsets) and bool((ids.lengths > 0).all())
    return same and bool(((masks.flat == 0) | (masks.flat == 1)).all())


def _first(mask: Ragged) -> npt.NDArray[np.int64]:
    """Position in its row of each row's first true value; the row's length if there is none."""
    found = np.flatnonzero(mask.flat)[::-1]
    row = np.searchsorted(mask.offsets, found, side="right") - 1
    first = mask.lengths.copy()
    first[row] = found - mask.offsets[row]
    return first


def _names(prompts: Ragged) -> list[str]:
    """A digest of each prompt's ids, by which equal prompts are told."""
    data = memoryview(prompts.flat.astype("<i4").tobytes())
    bounds = (prompts.offsets * 4).tolist()
    return [hashlib.blake2b(data[start:end], digest_size=16).hexdigest() for start, end in pairwise(bounds)]


def _list_array(rows: Ragged, kind: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(rows.offsets, pa.int32()), pa.array(rows.flat, kind))
