"""Before the first job: does this host have what the plan needs? Each shortage is said with its numbers.

Bytes are reckoned from above: every answer as long as allowed, every prompt at its bytes (a token is at least one).
When a pilot of these settings has measured tokens a row, that is used instead, with a margin.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftmill import layout
from draftmill.config import Config
from draftmill.drafter.spec import resolve_shape
from draftmill.errors import UserError
from draftmill.prompts.index import Index
from draftmill.store.local import LocalStore
from draftmill.target import files

_GIB = 2**30
_BFLOAT16 = 2
# Parquet of ids and text stays under this many bytes a token, compressed or not.
_COMPLETION_BYTES = 12
# Room that unfinished files, journals and logs take beside the outputs.
_SLACK_BYTES = 256 * 2**20
# What Python, torch and transformers take beside the weights.
_PROCESS_BYTES = 1 * _GIB
_PILOT_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Needs:
    """What a build will still write into the store, and what one job holds in memory, in bytes."""

    completions: int
    hidden: int
    memory: int

    @property
    def disk(self) -> int:
        """All that the store must take."""
        return self.completions + self.hidden + _SLACK_BYTES


def needs(config: Config, index: Index, missing: Mapping[str, int], store: LocalStore) -> Needs:
    """Reckon the needs of the rows that are `missing` by stage."""
    shape = resolve_shape(config.drafter, config.hidden, files.read_config(config.target))
    a_row = tokens_a_row(config, index, store)
    rows = missing["extract"]
    if config.hidden.policy == "window":
        shards = sorted((shard.rows for shard in index.train), reverse=True)
        rows = min(rows, sum(shards[: config.hidden.window_shards * (1 + config.hidden.window_lead)]))
    hidden = rows * a_row * len(shape.taps) * shape.hidden_size * _BFLOAT16
    completions = missing["generate"] * a_row * config.generate.samples * _COMPLETION_BYTES
    # Extraction holds a shard of states beside the weights.
    largest = max(shard.rows for shard in index.shards) * a_row * len(shape.taps) * shape.hidden_size * _BFLOAT16
    return Needs(int(completions), int(hidden), int(2 * largest + weight_bytes(config) + _PROCESS_BYTES))


def tokens_a_row(config: Config, index: Index, store: LocalStore) -> float:
    """Tokens a row, prompt and answer together: as a pilot of this store measured, else an upper bound."""
    bound = min(
        files.context_length(config.target),
        sum(shard.bytes for shard in index.shards) / sum(shard.rows for shard in index.shards)
        + config.generate.max_new_tokens,
    )
    newest = max(store.list("pilot/").values(), key=lambda info: info.modified, default=None)
    if newest is None:
        return bound
    measured = json.loads(store.get(newest.key))
    return min(bound, _PILOT_MARGIN * float(measured["tokens"]) / float(measured["rows"]))


def weight_bytes(config: Config) -> int:
    """Bytes of the target's weights in the arithmetic of a job on the CPU; 0 on a GPU or if the size is not known."""
    if config.device != "cpu" or not files.is_folder(config.target):
        return 0
    stored = sum(path.stat().st_size for path in Path(config.target.model).glob("*.safetensors"))
    return stored * (2 if config.dtype == "float32" else 1)


def preflight(need: Needs, config: Config, store: LocalStore) -> None:
    """Raise UserError for the first thing this host lacks: a writable store, disk, memory."""
    try:
        store.put(layout.probe(os.getpid()), b"")
        store.delete(layout.probe(os.getpid()))
    except OSError as error:
        raise UserError(f"store: {store.url} cannot be written ({error.strerror}): choose another folder.") from None
    free = shutil.disk_usage(store.root).free
    if need.disk > free:
        raise UserError(
            f"store: the build may write {_gib(need.disk)} ({_gib(need.hidden)} of it hidden states) but {store.url} has "
            f"{_gib(free)} free: free some, take fewer prompts or taps, or set hidden.policy to window."
        )
    if need.hidden > config.hidden.budget_gib * _GIB:
        raise UserError(
            f"hidden.budget_gib: the hidden states to come may take {_gib(need.hidden)}, over the budget of "
            f"{config.hidden.budget_gib:g} GiB: raise it, or set hidden.policy to window or smaller windows."
        )
    available = available_memory()
    if available is not None and need.memory > available:
        raise UserError(
            f"prompts.shard_rows: one job may hold {_gib(need.memory)} in memory but this host has {_gib(available)} "
            "available: make shards smaller or stop what else runs."
        )


def available_memory() -> int | None:
    """Bytes that new processes can take without swapping; None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
