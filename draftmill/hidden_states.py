"""The hidden-state shard: one safetensors file, rows concatenated, no padding.

Tensors: `input_ids` int32 [tokens], `loss_mask` uint8 [tokens] (1 where the target generated the token), `offsets` int64
[rows + 1] (row r is offsets[r]:offsets[r+1]), `hidden` [tokens, taps, width] (bfloat16). One metadata value, a canonical
JSON, holds row keys and provenance: safetensors writes several metadata keys in no fixed order, and an object must be
the same bytes whenever it is made from the same inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftmill.canonical import canonical_json
from draftmill.errors import UserError, reason
from draftmill.store.local import publishing

_METADATA_KEY = "draftmill"


@dataclass(frozen=True, slots=True)
class RowKey:
    """Which completion a row of hidden states belongs to."""

    prompt_id: str
    sample: int
    source: str


@dataclass(frozen=True, slots=True)
class HiddenRow:
    """One row: `input_ids` int32 [tokens], `loss_mask` uint8 [tokens], `hidden` [tokens, taps, width]."""

    key: RowKey
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor


def write_shard(path: Path, rows: Sequence[HiddenRow], provenance: Mapping[str, Any]) -> None:
    """Publish rows as one shard file. Raises ValueError if there is no row or a value is not finite."""
    if not rows:
        raise ValueError("a hidden-state shard needs at least one row")
    lengths = torch.tensor([0] + [len(row.input_ids) for row in rows], dtype=torch.int64)
    tensors = {
        "input_ids": torch.cat([row.input_ids for row in rows]).to(torch.int32),
        "loss_mask": torch.cat([row.loss_mask for row in rows]).to(torch.uint8),
        "offsets": lengths.cumsum(0),
        "hidden": torch.cat([row.hidden for row in rows]),
    }
    if not bool(torch.isfinite(tensors["hidden"]).all()):
        raise ValueError("a hidden state is not finite")
    keys = [[row.key.prompt_id, row.key.sample, row.key.source] for row in rows]
    metadata = {_METADATA_KEY: canonical_json({"rows": keys, "provenance": dict(provenance)})}
    with publishing(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


class HiddenShard:
    """A shard opened for reading; tensors are read from the mapped file when a row is asked for."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if the file is missing, damaged, or not a hidden-state shard."""
        self.path = path
        try:
            file: Any = cast(Any, safe_open)(path, framework="pt")
            metadata = json.loads((file.metadata() or {})[_METADATA_KEY])
            self.offsets: torch.Tensor = file.get_tensor("offsets")
            self.input_ids: torch.Tensor = file.get_tensor("input_ids")
            self.loss_mask: torch.Tensor = file.get_tensor("loss_mask")
            self._hidden = file.get_slice("hidden")
            self.keys = [RowKey(*key) for key in metadata["rows"]]
            self.provenance: dict[str, Any] = metadata["provenance"]
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is not a readable hidden-state shard ({reason(error)}): delete it and build again."
            ) from None

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.keys)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, taps and width of the whole shard."""
        tokens, taps, width = self._hidden.get_shape()
        return tokens, taps, width

    def row(self, index: int, limit: int | None = None) -> HiddenRow:
        """Row `index`, at most its first `limit` tokens."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        end = end if limit is None else min(end, start + limit)
        return HiddenRow(
            self.keys[index], self.input_ids[start:end], self.loss_mask[start:end], self._hidden[start:end]
        )
