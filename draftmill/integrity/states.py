"""Shards of hidden states: offsets, shapes, numbers, and the rows of the completions that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftmill.catalog import Entry
from draftmill.errors import UserError, reason
from draftmill.integrity import said, tables
from draftmill.integrity.findings import Unsound, require
from draftmill.integrity.refusals import of_system

if TYPE_CHECKING:
    import torch

    from draftmill.hidden_states import HiddenShard

_TYPES = {"bfloat16": "BF16"}
# Without --deep so many rows, spread over the shard, are looked at for values that are not finite.
_LOOKED_AT = 4
_PIECE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class States:
    """What is kept of a shard that was looked at: all but the states themselves."""

    keys: list[tables.Key]
    offsets: torch.Tensor
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    provenance: dict[str, Any]


def open_shard(path: Path, entry: Entry, *, deep: bool) -> States:
    """A shard whose tensors fit together and whose numbers are finite. Raises Unsound, OSError if it cannot be opened."""
    from draftmill.hidden_states import HiddenShard

    try:
        shard = HiddenShard(path)
    except UserError as error:
        whole = "a whole shard of hidden states"
        raise of_system(error) or Unsound("unreadable", whole, reason(error)) from None
    said.check(entry, shard.provenance)
    _check_keys(shard)
    _check_tensors(path, shard)
    _check_offsets(shard)
    for start, stop in _pieces(shard, deep=deep):
        _check_values(path, start, stop)
    keys = [(key.prompt_id, key.sample, key.source) for key in shard.keys]
    return States(keys, shard.offsets, shard.input_ids, shard.loss_mask, shard.provenance)


def _check_keys(shard: HiddenShard) -> None:
    kinds = {(type(key.prompt_id), type(key.sample), type(key.source)) for key in shard.keys}
    require(kinds == {(str, int, str)}, "rows", "rows, each with prompt id, sample and source", "others or none")


def _check_tensors(path: Path, shard: HiddenShard) -> None:
    try:
        tokens, taps, _width = shard.shape
    except ValueError:
        raise Unsound("shape", "states of tokens, taps and width", "other axes") from None
    spec: Mapping[str, Any] = shard.provenance.get("spec") or {}
    wanted = len(spec.get("taps") or ())
    require(taps == wanted, "shape", f"{wanted} taps", f"{taps}")
    for name, tensor in (("input_ids", shard.input_ids), ("loss_mask", shard.loss_mask)):
        require(tensor.shape == (tokens,), "shape", f"{name} of {tokens} tokens", f"{list(tensor.shape)}")
    found = _dtype(path)
    stored = _TYPES.get(str(spec.get("stored")))
    require(stored in (None, found), "shape", f"states stored as {stored}", found)


def _dtype(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return str(file.get_slice("hidden").get_dtype())


def _check_offsets(shard: HiddenShard) -> None:
    tokens, rows = shard.shape[0], len(shard.keys)
    offsets = shard.offsets
    require(not offsets.is_floating_point(), "offsets", "whole numbers", offsets.dtype)
    require(offsets.shape == (rows + 1,), "offsets", f"{rows + 1} offsets for {rows} rows", f"{list(offsets.shape)}")
    ends = int(offsets[0]), int(offsets[-1])
    require(ends == (0, tokens), "offsets", f"offsets from 0 to {tokens}", f"from {ends[0]} to {ends[1]}")
    require(bool((offsets.diff() > 0).all()), "offsets", "rows one behind the other", "a row that ends where it begins")
    unique = len({(key.prompt_id, key.sample) for key in shard.keys})
    require(unique == rows, "rows", f"{rows} different rows", f"{unique}")


def _pieces(shard: HiddenShard, *, deep: bool) -> Iterator[tuple[int, int]]:
    """Ranges of tokens to look at."""
    rows, tokens = len(shard), shard.shape[0]
    if deep:
        yield from ((start, min(start + _PIECE_TOKENS, tokens)) for start in range(0, tokens, _PIECE_TOKENS))
        return
    for row in sorted({round(i * (rows - 1) / (_LOOKED_AT - 1)) for i in range(_LOOKED_AT)}):
        start, stop = int(shard.offsets[row]), int(shard.offsets[row + 1])
        yield start, min(stop, start + _PIECE_TOKENS)


def _check_values(path: Path, start: int, stop: int) -> None:
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        finite = torch.isfinite(file.get_slice("hidden")[start:stop]).flatten(1).all(1)
    bad = int((~finite).sum())
    require(bad == 0, "values", "finite numbers", f"{bad} tokens with others between tokens {start} and {stop}")


def check_rows(shard: States, completions: Path, rows: tables.Rows, *, deep: bool) -> None:
    """Hold a shard's rows against the completions they were made from; with `deep` every token. Raises Unsound."""
    wanted = f"the {len(rows.keys)} rows of the completions in their order"
    require(shard.keys == rows.keys, "rows", wanted, f"{len(shard.keys)} rows, of which some differ")
    lengths, table = tables.read_tokens(completions)
    wrong = [row for row, (a, b) in enumerate(zip(shard.offsets.diff().tolist(), lengths, strict=True)) if a != b]
    where = f"row {wrong[0]} of {shard.offsets.diff()[wrong[0]]}" if wrong else ""
    require(not wrong, "offsets", "rows as long as the completions'", f"{len(wrong)} others, {where} tokens")
    if deep:
        _check_tokens(shard, table)


def _check_tokens(shard: States, table: Any) -> None:
    import torch

    columns = (table[name].to_pylist() for name in ("prompt_ids", "output_ids", "loss_mask"))
    ids: list[int] = []
    mask: list[int] = []
    for prompt, output, trained in zip(*columns, strict=True):
        ids += [*prompt, *output]
        mask += [0] * len(prompt) + [int(bit) for bit in (trained if trained is not None else [True] * len(output))]
    _equal(shard.input_ids, torch.tensor(ids, dtype=torch.int32), "the completions' tokens")
    _equal(shard.loss_mask, torch.tensor(mask, dtype=torch.uint8), "the completions' loss mask")


def _equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    import torch

    differ = int((found != expected).sum()) if found.shape == expected.shape else len(found)
    require(torch.equal(found, expected), "tokens", what, f"{differ} tokens that differ")
