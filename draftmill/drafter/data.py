"""Rows of hidden-state shards as training batches.

The order of an epoch and the anchors of a row are functions of the seed, the epoch and the row alone, so a run resumes
by its step number, no random state needs saving, and the number of ranks changes no row's part in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftmill.canonical import seed_of
from draftmill.drafter.objective import eligible_anchors, pad_anchors, sample_anchors
from draftmill.errors import UserError
from draftmill.hidden_states import HiddenRow, HiddenShard


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded at the end to a common length, with their anchors.

    `input_ids` int64 [rows, tokens], `loss_mask` bool [rows, tokens], `taps` [rows, context, taps, width] (up to the
    last anchor only), `anchors` int64 [rows, blocks], `valid` bool [rows, blocks].
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    taps: torch.Tensor
    anchors: torch.Tensor
    valid: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(
            self.input_ids.to(device),
            self.loss_mask.to(device),
            self.taps.to(device),
            self.anchors.to(device),
            self.valid.to(device),
        )


def derive_seed(*parts: int | str) -> int:
    """A seed from named parts (canonical.seed_of)."""
    return seed_of("/".join(str(part) for part in parts))


class Rows:
    """The rows of some shards that can be trained on, that is, have an anchor within `max_length` tokens.

    Attributes: `skipped`, how many rows have none.
    """

    def __init__(self, paths: Sequence[Path], taps: int, width: int, max_length: int) -> None:
        """Raises UserError if a shard is unreadable or holds other taps or another width than the drafter reads."""
        self._max_length = max_length
        self._shards = [HiddenShard(path) for path in paths]
        for shard in self._shards:
            _check_shape(shard, taps, width)
        every = [(number, row) for number, shard in enumerate(self._shards) for row in range(len(shard))]
        self._rows = [place for place in every if self._has_anchor(place)]
        self.skipped = len(every) - len(self._rows)

    def __len__(self) -> int:
        """The number of trainable rows."""
        return len(self._rows)

    def _has_anchor(self, place: tuple[int, int]) -> bool:
        shard, (start, end) = self._shards[place[0]], self._span(place)
        return bool(eligible_anchors(shard.loss_mask[start:end]).any())

    def _span(self, place: tuple[int, int]) -> tuple[int, int]:
        start, end = (int(value) for value in self._shards[place[0]].offsets[place[1] : place[1] + 2])
        return start, min(end, start + self._max_length)

    def shuffled(self, seed: int, epoch: int) -> list[int]:
        """The row numbers in the order of an epoch."""
        generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
        return [int(row) for row in torch.randperm(len(self), generator=generator)]

    def batch(self, numbers: Sequence[int], anchors: int, seed: int, epoch: int) -> Batch:
        """These rows as a batch, with up to `anchors` anchors each, drawn from seed, epoch and row."""
        rows = [self._shards[shard].row(row, self._max_length) for shard, row in (self._rows[n] for n in numbers)]
        chosen = [sample_anchors(row.loss_mask, anchors, _row_seed(row, seed, epoch)) for row in rows]
        return _collate(rows, *pad_anchors(chosen))


def _check_shape(shard: HiddenShard, taps: int, width: int) -> None:
    found = shard.shape[1:]
    if found != (taps, width):
        raise UserError(
            f"{shard.path} holds {found[0]} taps of width {found[1]}, but the drafter reads {taps} of width {width}: "
            "extract it again for this drafter."
        )


def _row_seed(row: HiddenRow, seed: int, epoch: int) -> int:
    return derive_seed("anchors", seed, epoch, row.key.prompt_id, row.key.sample)


def _collate(rows: Sequence[HiddenRow], anchors: torch.Tensor, valid: torch.Tensor) -> Batch:
    def pad(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)

    return Batch(
        pad([row.input_ids for row in rows]).long(),
        pad([row.loss_mask for row in rows]).bool(),
        # No block sees past its anchor, so states behind a row's last anchor are not even moved.
        pad([row.hidden[:end] for row, end in zip(rows, anchors.amax(1).tolist(), strict=True)]),
        anchors,
        valid,
    )


def split_steps(order: Sequence[int], batch_rows: int, rank: int = 0, ranks: int = 1) -> Iterator[list[int]]:
    """The rows of each optimiser step that this rank takes: every `ranks`-th of a batch; may be empty at the end."""
    for start in range(0, len(order), batch_rows):
        yield list(order[start : start + batch_rows])[rank::ranks]
