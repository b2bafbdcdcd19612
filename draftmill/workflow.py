"""What the Snakefile knows: one configuration, its shards and fingerprints, and one listing of the store.

Everything is computed once when the Snakefile is parsed and is constant for the run. Parsing writes nothing but a cache
of digests on this machine; new prompt shards are published when a real build starts. What was known then is kept on this
machine for the run's jobs, which parse the Snakefile again and must see the same graph without asking the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from draftmill import layout, leftovers, snapshot
from draftmill.build_record import announce
from draftmill.config import Config, parse
from draftmill.digests import SETTLED_S, DigestCache
from draftmill.drafter.spec import resolve_shape
from draftmill.errors import UserError
from draftmill.graph import Graph
from draftmill.job import is_builder, mark_builder
from draftmill.outcomes import noted
from draftmill.preflight import needs, preflight
from draftmill.prompts.index import Index, bring_up_to_date
from draftmill.prompts.meter import Meter
from draftmill.specs import Shards, Specs, resolve
from draftmill.store.base import ObjectInfo, Store
from draftmill.store.open import is_s3, open_store
from draftmill.target import files

CACHE = Path(".draftmill")
# Two builds may share a store, and the largest object takes minutes to write, not a day.
_UNFINISHED_AGE_S = 24 * 3600.0


class PromptsChangedError(UserError):
    """The sources are not what the plan was made from; the next plan is made from them."""

    kind = "changed"


@dataclass(frozen=True)
class Build:
    """One parse of the Snakefile: the graph, and how its keys become the paths that rules use."""

    config: Config
    store: Store
    graph: Graph
    run_id: str
    gpus: int = 1
    listing: Mapping[str, ObjectInfo] = field(default_factory=dict, repr=False)

    @classmethod
    @noted()
    def open(cls, values: Mapping[str, Any], *, gpus: int | None, planning: bool = True) -> Build:
        """Check the configuration and look at prompts, target and store.

        `gpus` is Snakemake's limit of the resource `gpu`. `planning` is False in a job, which goes by what its build saw.
        Raises UserError for everything a person can mend.
        """
        config = parse(values)
        _check_gpus(config, gpus)
        store, run_id = open_store(config.store, config.s3), mark_builder()
        seen = None if planning else snapshot.load(CACHE, run_id)
        if seen is not None:
            return cls(config, store, Graph(config, seen.index, specs_of(config, seen.index), seen.present), run_id)
        listing = list_objects(store)
        return cls(config, store, graph_of(config, store, listing), run_id, gpus or 1, listing)

    def at(self, key: str) -> str:
        """A key of the store as the path that rules use; on S3 Snakemake puts bucket and prefix before it."""
        return key if is_s3(self.config.store) else f"{self.config.store}/{key}"

    def attach(self, workflow: Any) -> None:
        """Make the bucket Snakemake's place for every path of the rules, if the store is one."""
        if is_s3(self.config.store):
            from draftmill.default_storage import Seen, attach

            # A job removes nothing, and has listed nothing.
            parts = self.graph.parts() if self.listing else ()
            attach(workflow, self.config, Seen(self.listing, parts, self.graph.temporary_states()))

    def sentinel(self, stage: str, name: str) -> str | None:
        """The sentinel of a GPU job while the job is wanted; a path of this run, so that no dead run's counts."""
        if not self.graph.wanted(stage, name) or self.config.gate.sentinel == "in_job":
            return None
        return f"{CACHE}/gpu/{self.run_id}/{stage}-{name}.json"

    @property
    def retries(self) -> int:
        """How often a GPU job is started again after a failure; on the CPU a failure would only repeat itself."""
        return self.config.resources.gpu_retries if self.config.device == "cuda" else 0

    @noted()
    def start(self) -> None:
        """Check what the build needs of this host, then publish new prompt shards and their index.

        Raises UserError for what the host lacks, and if the prompts are not those of the plan any more.
        """
        preflight(needs(self.graph, self.store), self.config, self.store)
        if self.config.generate.engine == "sglang":
            from draftmill.engines import server
            from draftmill.preflight_servers import check_host

            check_host(self.config, self.gpus)
            if is_builder():
                server.end_servers_at_exit(self.config.gate, self.run_id)
        self._publish_prompts()
        leftovers.at_start(self.store, self.graph, _UNFINISHED_AGE_S, self.run_id)
        announce(self.store, self.graph, self.run_id)
        snapshot.save(CACHE, self.run_id, snapshot.Seen(self.graph.index, self.graph.present))

    def _publish_prompts(self) -> None:
        # The sources are read once more. Jobs of shards that are no longer among them would find no prompts.
        if current_index(self.config, self.store, write=True).shards != self.graph.index.shards:
            raise PromptsChangedError(
                "The prompts changed after the plan was made: give the same command again to plan with them."
            )

    def finish(self) -> None:
        """Remove what kills have left behind in a build that has succeeded in the end."""
        with suppress(UserError, OSError):  # the next build's start does the same
            made = replace(self.graph, present=frozenset(list_objects(self.store)))
            leftovers.at_end(self.store, made, _UNFINISHED_AGE_S, self.run_id, self.graph)


def current_index(config: Config, store: Store, *, write: bool) -> Index:
    """The index of the sources as they are now (prompts/index.py); published only with `write`."""
    context = files.context_length(config.target)
    room = context - config.generate.longest_answer
    if room < 1:
        raise UserError(
            f"generate.max_new_tokens: {config.generate.longest_answer} leaves no room for a prompt in a context of "
            f"{context} tokens; lower it or set target.context_length."
        )
    digests = DigestCache(CACHE / "target.json", write=True, settled_s=SETTLED_S)
    tokenizer = files.tokenizer_identity(config.target, digests)
    digests.save()
    with Meter() as meter:
        return bring_up_to_date(
            config,
            store,
            write=write,
            limit_tokens=room,
            tokenizer=tokenizer,
            count_tokens=_Counter(config),
            cache_dir=CACHE,
            progress=meter,
        )


def list_objects(store: Store) -> dict[str, ObjectInfo]:
    """What builds have made, without heartbeats, records and journals, which may be more; the folders side by side."""
    first, *others = layout.FOLDERS
    # A store that is away is waited for here, where Ctrl-C is heard.
    found = store.list(first)
    with ThreadPoolExecutor(len(others)) as pool:
        for each in pool.map(store.list, others):
            found |= each
    return found


def graph_of(config: Config, store: Store, listing: Mapping[str, ObjectInfo] | None = None) -> Graph:
    """The graph over the sources and the store as they are now; writes nothing into the store."""
    index = current_index(config, store, write=False)
    present = list_objects(store) if listing is None else listing
    return Graph(config, index, specs_of(config, index), frozenset(present))


class _Counter:
    """Counts a record's tokens; the tokenizer is loaded for the first record that is long enough to be in doubt.

    The limit leaves room for a generated answer. A record that brings its own needs none, so that much is not counted.
    """

    def __init__(self, config: Config) -> None:
        self._target, self._answer = config.target, config.generate.longest_answer
        self._tokenizer: Any = None

    def __call__(self, record: Mapping[str, Any]) -> int:
        from draftmill.target.tokenizer import load_tokenizer, render_full, render_prompt

        if "input_ids" in record:
            return len(record["input_ids"]) - self._answer
        self._tokenizer = self._tokenizer or load_tokenizer(self._target)
        render = render_full if "answer" in record else render_prompt
        tokens = len(render(self._tokenizer, record, self._target.chat_template_args))
        return tokens - self._answer if "answer" in record else tokens


def target_identity(config: Config) -> str:
    """A name of the target's content (target/files.py). Raises UserError if it cannot be had."""
    cache = DigestCache(CACHE / "target.json", write=True, settled_s=SETTLED_S)
    identity = files.identity(config.target, cache)
    cache.save()
    return identity


def specs_of(config: Config, index: Index) -> Specs:
    """The stage specs of a configuration over an index. Raises UserError if target, taps or pilot do not fit."""
    identity = target_identity(config)
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
    each = config.generate.sglang.server.gpus
    if config.generate.engine == "sglang" and gpus < each:
        raise UserError(
            f"A server needs {each} GPUs (generate.sglang.server.gpus) but the limit is gpu={gpus}: raise one or lower the "
            "other."
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
