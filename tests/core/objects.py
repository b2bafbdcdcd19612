"""Rows of the two large formats, made from seeds, and both files written from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftmill.hidden_states import HiddenRow, RowKey, write_shard
from draftmill.schemas import COMPLETIONS, write_rows


def make_rows(lengths: Sequence[int], taps: int = 2, width: int = 3, seed: int = 0) -> list[HiddenRow]:
    generator = torch.Generator().manual_seed(seed)
    return [
        HiddenRow(
            RowKey(f"p{number}", number % 2, "söurce"),
            torch.randint(0, 1000, (length,), generator=generator).int(),
            torch.randint(0, 2, (length,), generator=generator).to(torch.uint8),
            torch.randn(length, taps, width, generator=generator).bfloat16(),
        )
        for number, length in enumerate(lengths)
    ]


def completion(number: int, **over: Any) -> dict[str, Any]:
    return {
        "prompt_id": f"p{number}",
        "sample": 0,
        "source": "söurce",
        "origin": "generated",
        "prompt_ids": [1, 2, number],
        "output_ids": [3] * (number + 1),
        "loss_mask": None,
        "finish_reason": "stop",
        "text": "é\n",
        **over,
    }


def write_both(folder: Path) -> None:
    """A Parquet and a safetensors file with provenance of many keys that come out of a set."""
    facts = {name: {"of": name} for name in {"stage", "spec", "inputs", "fingerprint", "versions"}}
    write_shard(folder / "x.safetensors", make_rows([3, 1, 2]), facts)
    write_rows(folder / "x.parquet", COMPLETIONS, [completion(number) for number in range(5)], facts)
