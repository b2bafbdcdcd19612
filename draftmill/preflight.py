"""Before the first job: does this host have what the plan needs? Each shortage is said with its numbers.

Bytes are reckoned from above: every answer as long as allowed, every prompt at its bytes (a token is at least one).
When a pilot of these settings has measured tokens a row, that is used instead, with a margin.

A shortage of disk, or of memory against a hard limit, is refused. Memory that is merely not available now is a warning:
virtual machines may be given more as they use it, and what else runs may end.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from draftmill import layout
from draftmill.config import Config
from draftmill.drafter.spec import resolve_shape
from draftmill.errors import UserError
from draftmill.graph import Graph
from draftmill.memory import available_memory, memory_limit
from draftmill.prompts.index import Index
from draftmill.store.base import Store
from draftmill.store.selftest import check_store
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


def needs(graph: Graph, store: Store) -> Needs:
    """Reckon the needs of what the graph still lacks."""
    config, index, missing = graph.config, graph.index, graph.missing_rows()
    shape = resolve_shape(config.drafter, config.hidden, files.read_config(config.target))
    a_prompt = tokens_a_row(graph, store) * config.generate.samples
    states = a_prompt * len(shape.taps) * shape.hidden_size * _BFLOAT16
    hidden = min(missing["extract"], most_rows(config, index)) * states
    # Extraction holds a shard of states beside the weights.
    largest = max(shard.rows for shard in index.shards) * states
    return Needs(
        completions=int(missing["generate"] * a_prompt * _COMPLETION_BYTES),
        hidden=int(hidden),
        memory=int(2 * largest + weight_bytes(config) + _PROCESS_BYTES),
    )


def most_rows(config: Config, index: Index) -> int:
    """Most prompts whose hidden states are in the store at the same time."""
    train = sorted((shard.rows for shard in index.train), reverse=True)
    if config.hidden.policy == "window":
        held = config.hidden.window_shards * (1 + config.hidden.window_lead)
        # A pilot of a later window has its states from the beginning.
        train = train[: held + (config.pilot >= held)]
    return sum(train) + sum(shard.rows for shard in index.held_out)


def tokens_a_row(graph: Graph, store: Store) -> float:
    """Tokens a row, prompt and answer together: as the pilot of these settings measured, else an upper bound."""
    shards = graph.index.shards
    prompt = sum(shard.bytes for shard in shards) / sum(shard.rows for shard in shards)
    bound = min(files.context_length(graph.config.target), prompt + graph.config.generate.longest_answer)
    try:
        measured = json.loads(store.get(graph.pilot()))
        return min(bound, _PILOT_MARGIN * float(measured["tokens"]) / float(measured["rows"]))
    except KeyError:
        return bound
    except (ValueError, TypeError, ZeroDivisionError):
        raise UserError(
            f"{store.address(graph.pilot())} is no readable pilot record: delete it and build again."
        ) from None


def weight_bytes(config: Config) -> int:
    """Bytes of the target's weights in the arithmetic of a job on the CPU; 0 on a GPU or if the size is not known."""
    if config.device != "cpu" or not files.is_folder(config.target):
        return 0
    stored = sum(path.stat().st_size for path in Path(config.target.model).glob("*.safetensors"))
    return stored * (2 if config.dtype == "float32" else 1)


def preflight(need: Needs, config: Config, store: Store) -> None:
    """Raise UserError for the first thing this host lacks: a writable store, the target's weights, disk, memory."""
    _check_store(config, store)
    _check_weights(config)
    _check_disk(need, config, store)
    _check_memory(need)


def _check_store(config: Config, store: Store) -> None:
    try:
        check_store(store, layout.probe(), max_skew_s=config.s3.max_clock_skew_s)
    except OSError as error:
        raise UserError(f"store: {store.url} cannot be written ({error.strerror}): choose another folder.") from None


def _check_weights(config: Config) -> None:
    # Training reads embedding and head from safetensors alone, days after generation began.
    folder = Path(config.target.model)
    if files.is_folder(config.target) and not any(folder.glob("*.safetensors")):
        raise UserError(f"target.model: the folder {folder} holds no *.safetensors: copy or convert the weights.")


def _check_disk(need: Needs, config: Config, store: Store) -> None:
    free, local = store.free_bytes(), shutil.disk_usage(".").free
    if free is None and need.disk > local:
        raise UserError(
            f"store: the build may make {_gib(need.disk)} ({_gib(need.hidden)} of it hidden states), of which copies stay on "
            f"this machine while it runs, but the disk of {Path.cwd()} has {_gib(local)} free: free some, or set "
            "hidden.policy to window."
        )
    if free is not None and need.disk > free:
        raise UserError(
            f"store: the build may write {_gib(need.disk)} ({_gib(need.hidden)} of it hidden states) but {store.url} has "
            f"{_gib(free)} free: free some, take fewer prompts or taps, or set hidden.policy to window."
        )
    if need.hidden > config.hidden.budget_gib * _GIB:
        raise UserError(
            f"hidden.budget_gib: the hidden states to come may take {_gib(need.hidden)}, over the budget of "
            f"{config.hidden.budget_gib:g} GiB: raise it, or set hidden.policy to window or smaller windows."
        )


def _check_memory(need: Needs) -> None:
    limit, available = memory_limit(), available_memory()
    if limit is not None and need.memory > limit:
        raise UserError(
            f"prompts.shard_rows: one job may hold {_gib(need.memory)} in memory but this process's control group is "
            f"limited to {_gib(limit)}: make shards smaller or raise the limit."
        )
    if available is not None and need.memory > available:
        print(
            f"draftmill: one job may hold {_gib(need.memory)} in memory and this host has {_gib(available)} available "
            "now: if it can be given no more, make prompts.shard_rows smaller or stop what else runs.",
            file=sys.stderr,
        )


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
