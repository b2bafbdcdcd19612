"""What the Snakefile knows: one configuration, its shards and fingerprints, and one listing of the store.

Everything is computed once when the Snakefile is parsed and is constant for the run. Parsing writes nothing but a cache
of digests on this machine; new prompt shards are published when a real build starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftmill.config import Config, parse
from draftmill.digests import SETTLED_S, DigestCache
from draftmill.drafter.spec import resolve_shape
from draftmill.errors import UserError
from draftmill.graph import Graph
from draftmill.job import mark_builder
from draftmill.preflight import needs, preflight
from draftmill.prompts.index import Index, bring_up_to_date
from draftmill.specs import Shards, Specs, resolve
from draftmill.store.local import LocalStore
from draftmill.target import files

CACHE = Path(".draftmill")
# Two builds may share a store, and the largest object takes minutes to write, not a day.
_UNFINISHED_AGE_S = 24 * 3600.0


@dataclass(frozen=True)
class Build:
    """One parse of the Snakefile: the graph, and how its keys become the paths that rules use."""

    config: Config
    store: LocalStore
    graph: Graph
    run_id: str

    @classmethod
    def open(cls, values: Mapping[str, Any], *, gpus: int | None) -> Build:
        """Check the configuration and look at prompts, target and store.

        `gpus` is Snakemake's limit of the resource `gpu`. Raises UserError for everything a person can mend.
        """
        config = parse(values)
        _check_gpus(config, gpus)
        store = LocalStore(Path(config.store))
        return cls(config, store, graph_of(config, store), mark_builder())

    def at(self, key: str) -> str:
        """A key of the store as the path that rules use."""
        return f"{self.config.store}/{key}"

    def sentinel(self, stage: str, name: str) -> str | None:
        """The sentinel of a GPU job while the job is wanted; a path of this run, so that no dead run's counts."""
        if not self.graph.wanted(stage, name) or self.config.gate.sentinel == "in_job":
            return None
        return f"{CACHE}/gpu/{self.run_id}/{stage}-{name}.json"

    @property
    def retries(self) -> int:
        """How often a GPU job is started again after a failure; on the CPU a failure would only repeat itself."""
        return self.config.resources.gpu_retries if self.config.device == "cuda" else 0

    def start(self) -> None:
        """Check what the build needs of this host, then publish new prompt shards and their index."""
        preflight(needs(self.graph, self.store), self.config, self.store)
        self._tidy()
        current_index(self.config, self.store, write=True)

    def _tidy(self) -> None:
        """Remove what only a kill can have left: old unfinished files, and states of windows that are trained on."""
        self.store.remove_unfinished(_UNFINISHED_AGE_S)
        for key in self.graph.spent_states():
            self.store.delete(key)


def current_index(config: Config, store: LocalStore, *, write: bool) -> Index:
    """The index of the sources as they are now (prompts/index.py); published only with `write`."""
    context = files.context_length(config.target)
    room = context - config.generate.max_new_tokens
    if room < 1:
        raise UserError(
            f"generate.max_new_tokens: {config.generate.max_new_tokens} leaves no room for a prompt in a context of "
            f"{context} tokens; lower it or set target.context_length."
        )
    return bring_up_to_date(
        config, store, write=write, limit_tokens=room, count_tokens=_Counter(config), cache_dir=CACHE
    )


def graph_of(config: Config, store: LocalStore) -> Graph:
    """The graph over the sources and the store as they are now; writes nothing into the store."""
    index = current_index(config, store, write=False)
    return Graph(config, index, specs_of(config, index), frozenset(store.list()))


class _Counter:
    """Counts a record's tokens; the tokenizer is loaded for the first record that is long enough to be in doubt.

    The limit leaves room for a generated answer. A record that brings its own needs none, so that much is not counted.
    """

    def __init__(self, config: Config) -> None:
        self._target, self._answer = config.target, config.generate.max_new_tokens
        self._tokenizer: Any = None

    def __call__(self, record: Mapping[str, Any]) -> int:
        from draftmill.target.tokenizer import load_tokenizer, render_full, render_prompt

        if "input_ids" in record:
            return len(record["input_ids"]) - self._answer
        self._tokenizer = self._tokenizer or load_tokenizer(self._target)
        render = render_full if "answer" in record else render_prompt
        tokens = len(render(self._tokenizer, record, self._target.chat_template_args))
        return tokens - self._answer if "answer" in record else tokens


def specs_of(config: Config, index: Index) -> Specs:
    """The stage specs of a configuration over an index. Raises UserError if target, taps or pilot do not fit."""
    cache = DigestCache(CACHE / "target.json", write=True, settled_s=SETTLED_S)
    identity = files.identity(config.target, cache)
    cache.save()
    shape = resolve_shape(config.drafter, config.hidden, files.read_config(config.target)).describe()
    shards = Shards(tuple(s.name for s in index.train), tuple(s.name for s in index.held_out))
    if config.pilot >= len(shards.train):
        raise UserError(f"pilot: {config.pilot} is no train shard; there are {len(shards.train)}, counted from 0.")
    return resolve(config, identity, files.context_length(config.target), shape, shards, asdict(index.counts))


def _check_gpus(config: Config, gpus: int | None) -> None:
    if gpus is None:
        raise UserError(
            "No limit of GPUs is given, which would start every GPU job at once: pass `--resources gpu=N`, or use a "
            "profile that sets it."
        )
    needed = config.resources.train_gpus
    if gpus < needed:
        raise UserError(
            f"A job needs {needed} GPUs (resources.train_gpus) but the limit is gpu={gpus}: raise one or lower the other."
        )
    if needed > 1:
        raise UserError(
            f"resources.train_gpus: training runs on one GPU in this version, and {needed - 1} more would stand idle: "
            "set it to 1."
        )


def check_triggers(triggers: Iterable[object]) -> None:
    """Raise UserError unless modification time, which `ancient` switches off, is Snakemake's only rerun trigger."""
    names = sorted(str(trigger) for trigger in triggers)
    if names != ["mtime"]:
        raise UserError(
            "Snakemake's rerun triggers must be `mtime` alone, or it would replan finished shards: use a profile of "
            f"this repository or pass `--rerun-triggers mtime`; now they are {', '.join(names)}."
        )
