"""A configuration over a made-up index: specs and graph without prompts, target or store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftmill.config import Config, parse
from draftmill.digests import DigestCache
from draftmill.drafter.spec import resolve_shape
from draftmill.graph import Graph
from draftmill.prompts.index import Index, ShardEntry
from draftmill.prompts.scan import Counts
from draftmill.specs import Shards, Specs, resolve
from draftmill.target import files
from tests.tiny import config_values

TARGET: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
COUNTS = Counts(60, 50, 10, 0, 0, {})
TRAIN, HELD_OUT = tuple(f"{n}" * 12 for n in "abcde"), ("f" * 12,)
SIZES = dict(zip((*TRAIN, *HELD_OUT), (10, 20, 30, 40, 50, 8), strict=True))


def configuration(base: Mapping[str, Any] | None = None, **changes: Any) -> Config:
    """The toy configuration with a hub id as target, so that no file is asked; `base` is laid under the changes."""
    values = config_values(**{"target": {"model": "org/model", "revision": "a" * 40}})
    for layer in (base or {}, changes):
        for section, change in layer.items():
            values[section] = {**values.get(section, {}), **change} if isinstance(change, dict) else change
    return parse(values)


def make_index(train: tuple[str, ...] = TRAIN) -> Index:
    entries = [ShardEntry(name, SIZES[name], "train", 100 * SIZES[name]) for name in train]
    held_out = [ShardEntry(name, SIZES[name], "held_out", 100 * SIZES[name]) for name in HELD_OUT]
    return Index(1, {}, (), COUNTS, (*entries, *held_out))


def specs_of(config: Config, index: Index | None = None) -> Specs:
    index = index or make_index()
    identity = files.identity(config.target, DigestCache(Path("none"), write=False))
    shape = resolve_shape(config.drafter, config.hidden, TARGET).describe()
    shards = Shards(tuple(s.name for s in index.train), tuple(s.name for s in index.held_out))
    context = config.target.context_length or TARGET["max_position_embeddings"]
    return resolve(config, identity, context, shape, shards, asdict(index.counts))


def graph_of(config: Config, present: frozenset[str] = frozenset(), index: Index | None = None) -> Graph:
    index = index or make_index()
    return Graph(config, index, specs_of(config, index), present)
