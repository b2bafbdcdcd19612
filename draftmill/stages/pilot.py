"""The pilot: one shard has gone through generation, audit and extraction before the rest may start.

Its record holds what the plan multiplies by: tokens and bytes a row. Rates are no function of the inputs; they stand in
the heartbeats of the pilot's jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftmill.canonical import canonical_json
from draftmill.hidden_states import HiddenShard
from draftmill.schemas import COMPLETIONS, iterate_loss_masks, read_rows
from draftmill.store.local import publish_text


def measure_pilot(completions: Path, hidden: Path, output: Path, provenance: Mapping[str, Any]) -> None:
    """Publish the pilot's rows, tokens, loss tokens and bytes as JSON at `output`."""
    rows = read_rows(completions, COMPLETIONS)
    shard = HiddenShard(hidden)
    tokens, taps, width = shard.shape
    record = {
        "rows": len(rows),
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
        "output_tokens": sum(len(row["output_ids"]) for row in rows),
        "loss_tokens": sum(map(sum, iterate_loss_masks(rows))),
        "tokens": tokens,
        "taps": taps,
        "width": width,
        "completions_bytes": completions.stat().st_size,
        "hidden_bytes": hidden.stat().st_size,
        "provenance": dict(provenance),
    }
    publish_text(output, canonical_json(record) + "\n")
