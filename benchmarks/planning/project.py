"""A made build of a given number of shards: real prompts and index, every other object an empty file with its name.

Planning reads names only, so a store of empty files plans like a real one of terabytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import yaml

from draftmill.config import Config, parse
from draftmill.graph import ONCE, Graph
from draftmill.store.local import LocalStore
from draftmill.workflow import current_index, graph_of

# With so few rows a shard, thousands of shards are made in seconds; planning never looks inside one.
_SHARD_ROWS = 4
_TARGET: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 262_144,
}


def make(folder: Path, shards: int) -> Graph:
    """A project with exactly so many shards whose prompts are published and of which nothing else is made yet."""
    _write_target(folder)
    lines = (json.dumps({"prompt": f"Tell me about number {n}."}) + "\n" for n in range(4 * shards + 200))
    (folder / "prompts.jsonl").write_text("".join(lines))
    with chdir(folder):
        prompts = _prompts(_prompts_for(shards))
    graph = publish(folder, prompts)
    assert len(graph.shards) == shards, f"{len(graph.shards)} shards instead of {shards}"
    return graph


def publish(folder: Path, prompts: Mapping[str, Any]) -> Graph:
    """A project with these settings of its prompts, whose prompt shards stand in its store."""
    _write_target(folder)
    with chdir(folder), _unsynced():
        values = _values(prompts)
        Path("config.yaml").write_text(yaml.safe_dump(values))
        config = parse(values)
        store = LocalStore(Path(config.store))
        current_index(config, store, write=True)
        return graph_of(config, store)


def _write_target(folder: Path) -> None:
    (folder / "target").mkdir(parents=True, exist_ok=True)
    (folder / "target/config.json").write_text(json.dumps(_TARGET))


def _values(prompts: Mapping[str, Any]) -> dict[str, Any]:
    target = {"model": "target"}
    return {"device": "cuda", "store": "build", "target": target, "prompts": dict(prompts), "hidden": {"num_taps": 3}}


def _prompts(count: int) -> dict[str, Any]:
    return {"sources": [{"path": "prompts.jsonl"}], "shard_rows": _SHARD_ROWS, "max_prompts": count}


def _prompts_for(shards: int) -> int:
    """How many prompts form so many shards, found by halving."""
    low, high = shards, 4 * shards + 200
    while low < high:
        middle = (low + high) // 2
        config = parse(_values(_prompts(middle)))
        found = len(current_index(config, LocalStore(Path(config.store)), write=False).shards)
        low, high = (middle + 1, high) if found < shards else (low, middle)
    return low


def jobs(graph: Graph) -> Iterator[tuple[str, str]]:
    """Every job of a whole build, without sentinels."""
    yield from ((stage, shard) for stage in ("generate", "audit", "extract") for shard in graph.shards)
    yield from ((stage, ONCE) for stage in ("pilot", "audit_set", "evaluate", "report"))
    yield from (("train", str(window)) for window in range(len(graph.windows)))


def objects(graph: Graph) -> list[str]:
    """The keys of everything that a whole build makes."""
    return [key for job in jobs(graph) for key in graph.outputs(*job)]


def fill(folder: Path, keys: list[str]) -> None:
    """Make every key an empty file below the folder."""
    for parent in {(folder / key).parent for key in keys}:
        parent.mkdir(parents=True, exist_ok=True)
    for key in keys:
        (folder / key).touch()


def empty(folder: Path, keys: list[str]) -> None:
    """Remove those files again."""
    for key in keys:
        (folder / key).unlink(missing_ok=True)


@contextmanager
def _unsynced() -> Iterator[None]:
    """Write without waiting for the disk: a made store may be lost."""
    sync, os.fsync = os.fsync, lambda _: None
    try:
        yield
    finally:
        os.fsync = sync


def config_of(folder: Path) -> Config:
    """The project's configuration."""
    return parse(yaml.safe_load((folder / "config.yaml").read_text()))
