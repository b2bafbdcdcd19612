"""Single objects of a made store: rows as Parquet, heartbeats, the words of a training and of an evaluation."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from draftmill.canonical import canonical_json
from draftmill.drafter.acceptance import Answer, summarize
from draftmill.schemas import write_rows


def parquet(schema: pa.Schema, rows: list[dict[str, Any]], provenance: dict[str, Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.parquet"
        write_rows(path, schema, rows, provenance)
        return path.read_bytes()


def made_prompt(prompt_id: str, source: str) -> dict[str, Any]:
    """A row of a prompt shard; no answer holds the words of its record."""
    record = {"messages": [{"role": "user", "content": f"How <b>deep</b> is lake {prompt_id[:6]} in fathoms?"}]}
    return {"prompt_id": prompt_id, "source": source, "record": canonical_json(record)}


def heartbeat(stage: str, name: str, started: float, updated: float, state: str, **fields: Any) -> bytes:
    """A heartbeat as progress.py writes it; `fields` are those that not every job has."""
    span = max(updated - started, 1e-9)
    beat = {
        "stage": stage,
        "name": name,
        "unit": "rows",
        "state": state,
        "total": 0,
        "done": 0,
        "resumed": 0,
        "tokens": 0,
        "tokens_per_second": round(fields.get("tokens", 0) / span, 3),
        "started": started,
        "updated": updated,
        "pid": 4242,
        "host": "alpha",
        **fields,
    }
    return canonical_json(beat).encode()


def train_json(window: int, epochs: int, rows: int, provenance: dict[str, Any]) -> dict[str, Any]:
    steps = 24 * epochs
    before = steps * window
    curve = [
        {
            "step": step,
            "learning_rate": 6e-4 * (1 - (before + step) / 10_000),
            "loss": 2.5 + 6 / (1 + 0.02 * (before + step)),
            "accuracy": 0.5 - 0.4 / (1 + 0.01 * (before + step)),
            "accepted": 2.0 - 1.8 / (1 + 0.01 * (before + step)),
        }
        for step in range(1, steps + 1)
    ]
    scored = [
        {"epoch": epoch, "step": 24 * epoch, "train": scores(window + epoch + 1), "held_out": scores(window + epoch)}
        for epoch in range(1, epochs + 1)
    ]
    shape = {"num_layers": 2, "block_size": 8, "taps": [2, 9, 16], "hidden_size": 576}
    return {
        "rows": rows,
        "rows_without_anchor": 1,
        "held_out_rows": 18,
        "steps": steps,
        "steps_before": before,
        "span": [0.0, 1.0],
        "curve": curve,
        "epochs": scored,
        "shape": shape,
        "provenance": provenance,
    }


def scores(level: int) -> dict[str, Any]:
    shares = [min(0.9, 0.05 * (level + 2)) / position for position in range(1, 8)]
    return {
        "loss": 8.0 / (1 + 0.1 * level),
        "accuracy": sum(shares) / 7,
        "accuracy_by_position": shares,
        "accepted": sum(shares),
        "blocks": 144,
    }


def evaluation(seed: int, provenance: dict[str, Any]) -> dict[str, Any]:
    made = random.Random(seed)
    names = ("chat", "code", "söurce <b>&amp;")
    drafted = [_answer(made, names[n % 3], 48, (0, 0, 1, 2, 3, seed)) for n in range(30)]
    looked_up = [_answer(made, names[n % 3], 48, (0, 0, 0, 1, 6)) for n in range(30)]
    return {
        "prompts": 30,
        "identical": 30,
        "divergences": [],
        "target": {"tokens": 30 * 48},
        "drafter": summarize(drafted, 7, 100),
        "prompt_lookup": summarize(looked_up, 10, 100),
        "rows": [],
        "too_long": 0,
        "provenance": provenance,
    }


def _answer(made: random.Random, source: str, tokens: int, choices: tuple[int, ...]) -> Answer:
    accepted, done = [], 1
    while done < tokens:
        accepted.append(min(made.choice(choices), tokens - done - 1))
        done += accepted[-1] + 1
    return Answer(source, tokens, accepted)
