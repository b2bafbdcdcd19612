"""What the Snakefile knows: one configuration, its shards and fingerprints, and one listing of the store.

Everything here is computed once when the Snakefile is parsed and is constant for the run. Names decide what exists;
times never do. An edge that only orders work (pilot, audit, sentinel, window) is drawn while the job's own output is
absent from the listing and stands in no fingerprint: otherwise a new pilot would drag every finished shard along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from draftmill import layout
from draftmill.config import Config, parse
from draftmill.digests import DigestCache
from draftmill.drafter.spec import resolve_shape
from draftmill.errors import UserError
from draftmill.job import mark_builder
from draftmill.preflight import needs, preflight
from draftmill.prompts.index import Index, bring_up_to_date
from draftmill.specs import Shards, Specs, resolve, windows
from draftmill.store.local import LocalStore
from draftmill.target import files

CACHE = Path(".draftmill")


@dataclass(frozen=True)
class Build:
    """One parse of the Snakefile."""

    config: Config
    store: LocalStore
    index: Index
    specs: Specs
    run_id: str
    present: frozenset[str] = field(repr=False)

    @cached_property
    def _held_out(self) -> frozenset[str]:
        return frozenset(self.held_out)

    @cached_property
    def _position(self) -> Mapping[str, int]:
        return {shard: position for position, shard in enumerate(self.train)}

    @classmethod
    def open(cls, values: Mapping[str, Any], *, gpus: int | None) -> Build:
        """Check the configuration and look at prompts, target and store; nothing is written but a digest cache.

        `gpus` is Snakemake's limit of the resource `gpu`. Raises UserError for everything a person can mend.
        """
        config = parse(values)
        _check_gpus(config, gpus)
        store = LocalStore(Path(config.store))
        index = current_index(config, store, write=False)
        return cls(config, store, index, specs_of(config, index), mark_builder(), frozenset(store.list()))

    # Names -----------------------------------------------------------------------------------------------------------

    @cached_property
    def train(self) -> list[str]:
        """Train shards in index order."""
        return [shard.name for shard in self.index.train]

    @cached_property
    def held_out(self) -> list[str]:
        """Held-out shards in index order."""
        return [shard.name for shard in self.index.held_out]

    @property
    def shards(self) -> list[str]:
        """All shards, train before held-out."""
        return [*self.train, *self.held_out]

    @property
    def pilot_shard(self) -> str:
        """The shard that goes first."""
        return self.train[self.config.pilot]

    @cached_property
    def windows(self) -> list[list[str]]:
        """Train shards by window."""
        return windows(self.config, self.train)

    @property
    def last_window(self) -> int:
        """The window whose drafter is the result."""
        return len(self.windows) - 1

    def at(self, key: str) -> str:
        """A key of the store as the path that rules use."""
        return f"{self.config.store}/{key}"

    def prompts(self, shard: str) -> str:
        """The prompts of a shard."""
        return layout.prompts(shard)

    def completions(self, shard: str) -> str:
        """The completions of a shard under this configuration."""
        return layout.completions(shard, self.specs.fp["generate"])

    def rejected(self, shard: str) -> str:
        """The rejected rows of a shard under this configuration."""
        return layout.rejected(shard, self.specs.fp["generate"])

    def audit(self, shard: str) -> str:
        """The audit of a shard under this configuration."""
        return layout.audit(shard, self.specs.fp["audit"])

    def audit_page(self, shard: str) -> str:
        """The page of that audit."""
        return layout.audit_page(shard, self.specs.fp["audit"])

    def failed_audit(self, shard: str) -> str:
        """Where that audit stays if it fails."""
        return layout.failed_audit(shard, self.specs.fp["audit"])

    def audit_set(self) -> str:
        """The audit page of the whole set."""
        return layout.audit_set(self.specs.fp["audit_set"])

    def hidden(self, shard: str) -> str:
        """The hidden states of a shard under this configuration."""
        place = layout.held_out_hidden if shard in self._held_out else layout.hidden
        return place(shard, self.specs.fp["extract"])

    def held_out_hidden(self, shard: str) -> str:
        """The hidden states of a held-out shard; also as a pattern for its rule."""
        return layout.held_out_hidden(shard, self.specs.fp["extract"])

    def pilot(self) -> str:
        """The pilot's record."""
        return layout.pilot(self.specs.fp["pilot"])

    def drafter(self, window: int | str, name: str) -> str:
        """A file of the drafter after a window."""
        return f"{layout.drafter(self.specs.fp['train'], window)}/{name}"

    def evaluation(self) -> str:
        """The measured acceptance."""
        return layout.evaluation(self.specs.fp["evaluate"])

    def report(self) -> str:
        """The report."""
        return layout.report(self.specs.fp["report"])

    # Edges -----------------------------------------------------------------------------------------------------------

    def absent(self, key: str) -> bool:
        """Whether the store lacked an object when this build was planned."""
        return key not in self.present

    def published_prompts(self, shard: str) -> list[str]:
        """The prompts of a shard once they are in the store.

        New shards are published when the build starts, before its first job; a plan alone writes nothing.
        """
        return [] if self.absent(self.prompts(shard)) else [self.prompts(shard)]

    def before_generate(self, shard: str) -> list[str]:
        """What a shard's generation waits for beside its prompts: the pilot."""
        waits = self.absent(self.completions(shard)) and shard != self.pilot_shard
        return [self.pilot()] if waits else []

    def before_extract(self, shard: str) -> list[str]:
        """What a shard's extraction waits for beside its completions: its audit, the pilot, an earlier window."""
        if not self.absent(self.hidden(shard)):
            return []
        found = [self.audit(shard)]
        if shard != self.pilot_shard:
            found.append(self.pilot())
        window = self._window_of(shard) - 1 - self.config.hidden.window_lead
        return [*found, self.drafter(window, "model.safetensors")] if window >= 0 else found

    def _window_of(self, shard: str) -> int:
        if self.config.hidden.policy == "keep" or shard in self._held_out:
            return 0
        return self._position[shard] // self.config.hidden.window_shards

    def before_train(self, window: int) -> list[str]:
        """What a window's training waits for beside its states: that every audit passed."""
        waits = self.absent(self.drafter(window, "model.safetensors"))
        return [self.audit(shard) for shard in self.shards] if waits else []

    def previous_window(self, window: int) -> list[str]:
        """The drafter that a window's training goes on from."""
        names = ("model.safetensors", "trainer.safetensors", "train.json")
        return [self.drafter(window - 1, name) for name in names] if window > 0 else []

    def sentinel(self, stage: str, name: str, output: str) -> list[str]:
        """The sentinel of a GPU job while its output is absent; a path of this run, so that no dead run's counts."""
        if not self.absent(output) or self.config.gate.sentinel == "in_job":
            return []
        return [f"{CACHE}/gpu/{self.run_id}/{stage}-{name}.json"]

    def sentinel_waits(self, job: str) -> list[str]:
        """What a sentinel waits for: the inputs of its job, so that it looks just before the job and not hours before."""
        stage, _, name = job.partition("-")
        waits: dict[str, Callable[[], list[str]]] = {
            "generate": lambda: [*self.published_prompts(name), *self.before_generate(name)],
            "extract": lambda: [self.completions(name), *self.before_extract(name)],
            "train": lambda: self.train_inputs(int(name)),
            "evaluate": self.evaluate_inputs,
        }
        return waits[stage]()

    def train_inputs(self, window: int) -> list[str]:
        """All that a window's training reads or waits for."""
        states = [self.hidden(shard) for shard in (*self.windows[window], *self.held_out)]
        return [*states, *self.previous_window(window), *self.before_train(window)]

    def evaluate_inputs(self) -> list[str]:
        """All that the evaluation reads."""
        model = [self.drafter(self.last_window, name) for name in ("model.safetensors", "config.json")]
        return [*model, *(self.completions(shard) for shard in self.held_out)]

    def gpus(self, stage: str) -> int:
        """GPUs that one job of a stage holds."""
        return self.config.resources.train_gpus if stage == "train" else 1

    def span(self, window: int) -> tuple[float, float]:
        """The share of the whole run that a window's training covers, by rows."""
        rows = {shard.name: shard.rows for shard in self.index.train}
        sizes = [sum(rows[shard] for shard in shards) for shards in self.windows]
        before = sum(sizes[:window])
        return before / sum(sizes), (before + sizes[window]) / sum(sizes)

    def results(self) -> list[str]:
        """Everything a whole build leaves; temporary hidden states are no result."""
        each = [
            f(shard) for shard in self.shards for f in (self.completions, self.rejected, self.audit, self.audit_page)
        ]
        kept = self.shards if self.config.hidden.policy == "keep" else self.held_out
        last = [self.drafter(self.last_window, n) for n in ("model.safetensors", "config.json", "train.json")]
        ends = [self.pilot(), self.audit_set(), *last, self.evaluation(), self.report()]
        return [*each, *(self.hidden(shard) for shard in kept), *ends]

    # Start -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Check what the build needs of this host, then publish new prompt shards and their index."""
        preflight(needs(self.config, self.index, self.missing_rows(), self.store), self.config, self.store)
        current_index(self.config, self.store, write=True)

    def missing_rows(self) -> dict[str, int]:
        """Rows of the shards whose completions or hidden states are still to be made, by stage."""
        rows = {shard.name: shard.rows for shard in self.index.shards}
        places = {"generate": self.completions, "extract": self.hidden}
        return {stage: sum(rows[s] for s in rows if self.absent(place(s))) for stage, place in places.items()}


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


class _Counter:
    """Counts a record's tokens; the tokenizer is loaded for the first record that is long enough to be in doubt."""

    def __init__(self, config: Config) -> None:
        self._target = config.target
        self._tokenizer: Any = None

    def __call__(self, record: Mapping[str, Any]) -> int:
        from draftmill.target.tokenizer import load_tokenizer, render_full, render_prompt

        if "input_ids" in record:
            return len(record["input_ids"])
        self._tokenizer = self._tokenizer or load_tokenizer(self._target)
        render = render_full if "answer" in record else render_prompt
        return len(render(self._tokenizer, record, self._target.chat_template_args))


def specs_of(config: Config, index: Index) -> Specs:
    """The stage specs of a configuration over an index. Raises UserError if target, taps or pilot do not fit."""
    cache = DigestCache(CACHE / "target.json", write=True)
    identity = files.identity(config.target, cache)
    cache.save()
    shape = resolve_shape(config.drafter, config.hidden, files.read_config(config.target)).describe()
    shards = Shards(tuple(s.name for s in index.train), tuple(s.name for s in index.held_out))
    if config.pilot >= len(shards.train):
        raise UserError(f"pilot: {config.pilot} is no train shard; there are {len(shards.train)}, counted from 0.")
    return resolve(config, identity, shape, shards, asdict(index.counts))


def _check_gpus(config: Config, gpus: int | None) -> None:
    if gpus is None:
        raise UserError(
            "No limit of GPUs is given, which would start every GPU job at once: pass `--resources gpu=N`, or use a "
            "profile that sets it."
        )
    needed = max(1, config.resources.train_gpus)
    if gpus < needed:
        raise UserError(
            f"A job needs {needed} GPUs (resources.train_gpus) but the limit is gpu={gpus}: raise one or lower the other."
        )


def check_triggers(triggers: Iterable[object]) -> None:
    """Raise UserError unless modification time, which `ancient` switches off, is Snakemake's only rerun trigger."""
    names = sorted(str(trigger) for trigger in triggers)
    if names != ["mtime"]:
        raise UserError(
            "Snakemake's rerun triggers must be `mtime` alone, or it would replan finished shards: use a profile of this "
            f"repository or pass `--rerun-triggers mtime`; now they are {', '.join(names)}."
        )
