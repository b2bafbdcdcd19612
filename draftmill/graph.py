"""The build graph over one listing of the store: which objects each job makes, reads and waits for.

A job is a stage and a name (a shard, a window, or the one name of a stage that runs once). Its inputs are drawn only
while one of its own outputs is absent from the listing: what is there stands, whatever happens to the things it was
once made from. Otherwise a rebuilt input would drag every finished consumer along, because Snakemake's `ancient` holds
only for a file that exists when the plan is made. So a new pilot replans the pilot alone, and a deleted object is made
again alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from draftmill import layout
from draftmill.config import Config
from draftmill.prompts.index import Index
from draftmill.specs import Specs, windows

Keys = list[str]
# The name of a job whose stage runs once.
ONCE = "0"


@dataclass(frozen=True)
class Graph:
    """Names and edges for one configuration; `present` are the keys that the store had when the plan was made."""

    config: Config
    index: Index
    specs: Specs
    present: frozenset[str] = field(repr=False)

    # Shards ----------------------------------------------------------------------------------------------------------

    @cached_property
    def train(self) -> list[str]:
        """Train shards in index order."""
        return [shard.name for shard in self.index.train]

    @cached_property
    def held_out(self) -> list[str]:
        """Held-out shards in index order."""
        return [shard.name for shard in self.index.held_out]

    @cached_property
    def shards(self) -> list[str]:
        """All shards, train before held-out."""
        return [*self.train, *self.held_out]

    @cached_property
    def windows(self) -> list[list[str]]:
        """Train shards by window."""
        return windows(self.config, self.train)

    @property
    def last_window(self) -> int:
        """The window whose drafter is the result."""
        return len(self.windows) - 1

    @property
    def pilot_shard(self) -> str:
        """The shard that goes first."""
        return self.train[self.config.pilot]

    @cached_property
    def _window_of(self) -> Mapping[str, int]:
        return {shard: number for number, shards in enumerate(self.windows) for shard in shards}

    # Objects ---------------------------------------------------------------------------------------------------------

    def prompts(self, shard: str) -> str:
        """The prompts of a shard."""
        return layout.prompts(shard)

    def completions(self, shard: str) -> str:
        """The completions of a shard."""
        return layout.completions(shard, self.specs.fp["generate"])

    def rejected(self, shard: str) -> str:
        """The rejected rows of a shard."""
        return layout.rejected(shard, self.specs.fp["generate"])

    def audit(self, shard: str) -> str:
        """The audit of a shard."""
        return layout.audit(shard, self.specs.fp["audit"])

    def audit_page(self, shard: str) -> str:
        """The page of a shard's audit."""
        return layout.audit_page(shard, self.specs.fp["audit"])

    def failed_audit(self, shard: str) -> str:
        """Where the audit of a shard stays if it fails."""
        return layout.failed_audit(shard, self.specs.fp["audit"])

    def audit_set(self) -> str:
        """The audit page of the whole set."""
        return layout.audit_set(self.specs.fp["audit_set"])

    def train_hidden(self, shard: str) -> str:
        """The hidden states of a train shard."""
        return layout.hidden(shard, self.specs.fp["extract"])

    def held_out_hidden(self, shard: str) -> str:
        """The hidden states of a held-out shard, which are never temporary."""
        return layout.held_out_hidden(shard, self.specs.fp["extract"])

    def hidden(self, shard: str) -> str:
        """The hidden states of a shard."""
        return self.train_hidden(shard) if shard in self._window_of else self.held_out_hidden(shard)

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

    # Jobs ------------------------------------------------------------------------------------------------------------

    def outputs(self, stage: str, name: str) -> Keys:
        """What a job makes."""
        made: dict[str, Callable[[], Keys]] = {
            "generate": lambda: [self.completions(name), self.rejected(name)],
            "audit": lambda: [self.audit(name), self.audit_page(name)],
            "audit_set": lambda: [self.audit_set()],
            "extract": lambda: [self.hidden(name)],
            "pilot": lambda: [self.pilot()],
            "train": lambda: [self.drafter(name, file) for file in DRAFTER_FILES],
            "evaluate": lambda: [self.evaluation()],
            "report": lambda: [self.report()],
        }
        return made[stage]()

    def wanted(self, stage: str, name: str) -> bool:
        """Whether something that a job makes is absent."""
        return any(key not in self.present for key in self.outputs(stage, name))

    def inputs(self, stage: str, name: str) -> dict[str, Keys]:
        """What a job reads, and under `after` what it only waits for; nothing for a job whose outputs are there."""
        if not self.wanted(stage, name):
            return {}
        drawn: dict[str, Callable[[], dict[str, Keys]]] = {
            "generate": lambda: {"prompts": self._published(name), "after": self._after_pilot(name)},
            "audit": lambda: {"completions": [self.completions(name)], "rejected": [self.rejected(name)]},
            "audit_set": lambda: {"audits": [self.audit(shard) for shard in self.shards]},
            "extract": lambda: {"completions": [self.completions(name)], "after": self._before_extract(name)},
            "pilot": self._pilot_inputs,
            "train": lambda: self._train_inputs(int(name)),
            "evaluate": self._evaluate_inputs,
            "report": self._report_inputs,
        }
        return drawn[stage]()

    def _published(self, shard: str) -> Keys:
        # New shards are published when a build starts, before its first job; a plan alone writes nothing.
        return [self.prompts(shard)] if self.prompts(shard) in self.present else []

    def _after_pilot(self, shard: str) -> Keys:
        return [] if shard == self.pilot_shard else [self.pilot()]

    def _before_extract(self, shard: str) -> Keys:
        # All windows wait for the pilot, so it can wait for none, whichever is its own.
        if shard == self.pilot_shard:
            return [self.audit(shard)]
        gone = self._window_of.get(shard, 0) - 1 - self.config.hidden.window_lead
        earlier = [self.drafter(gone, "model.safetensors")] if gone >= self._first_untrained else []
        return [self.audit(shard), self.pilot(), *earlier]

    def _pilot_inputs(self) -> dict[str, Keys]:
        shard = self.pilot_shard
        return {
            "completions": [self.completions(shard)],
            "hidden": [self.hidden(shard)],
            "after": [self.audit(shard)],
        }

    def _train_inputs(self, window: int) -> dict[str, Keys]:
        before = [self.drafter(window - 1, file) for file in DRAFTER_FILES] if window > 0 else []
        return {
            "hidden": [self.hidden(shard) for shard in self.windows[window]],
            "held_out": [self.hidden(shard) for shard in self.held_out],
            "previous": before,
            "after": [self.audit(shard) for shard in (*self.windows[window], *self.held_out)],
        }

    def _evaluate_inputs(self) -> dict[str, Keys]:
        return {
            "model": [self.drafter(self.last_window, "model.safetensors")],
            "config": [self.drafter(self.last_window, "config.json")],
            "held_out": [self.completions(shard) for shard in self.held_out],
        }

    def _report_inputs(self) -> dict[str, Keys]:
        return {
            "audits": [self.audit(shard) for shard in self.shards],
            "train": [self.drafter(window, "train.json") for window in range(len(self.windows))],
            "evaluation": [self.evaluation()],
        }

    def spent_states(self) -> Keys:
        """Under policy window, present states that no job will read: those of trained windows, unless the pilot does."""
        if self.config.hidden.policy == "keep":
            return []
        trained = [n for n in range(len(self.windows)) if not self.wanted("train", str(n))]
        read = {self.hidden(self.pilot_shard)} if self.wanted("pilot", ONCE) else set()
        states = [self.hidden(shard) for number in trained for shard in self.windows[number]]
        return [key for key in states if key in self.present and key not in read]

    def gpus(self, stage: str) -> int:
        """GPUs that one job of a stage holds."""
        return self.config.resources.train_gpus if stage == "train" else 1

    def span(self, window: int) -> tuple[float, float]:
        """The share of the whole run that a window's training covers, by rows."""
        rows = {shard.name: shard.rows for shard in self.index.train}
        sizes = [sum(rows[shard] for shard in shards) for shards in self.windows]
        before = sum(sizes[:window])
        return before / sum(sizes), (before + sizes[window]) / sum(sizes)

    def results(self) -> Keys:
        """Everything a whole build leaves; temporary hidden states are no result."""
        each = [key for shard in self.shards for stage in ("generate", "audit") for key in self.outputs(stage, shard)]
        kept = self.shards if self.config.hidden.policy == "keep" else self.held_out
        once = [key for stage in ("pilot", "audit_set", "evaluate", "report") for key in self.outputs(stage, ONCE)]
        return [*each, *map(self.hidden, kept), *self.outputs("train", str(self.last_window)), *once]

    def missing_rows(self) -> dict[str, int]:
        """Rows of the shards whose completions or hidden states are still to be made, by stage."""
        rows = {shard.name: shard.rows for shard in self.index.shards}
        of = {"generate": self.shards, "extract": [*self._awaited(), *self.held_out]}
        return {stage: sum(rows[n] for n in names if self.wanted(stage, n)) for stage, names in of.items()}

    def _awaited(self) -> list[str]:
        """Train shards whose hidden states are a result or are read by a training that is still to come."""
        if self.config.hidden.policy == "keep":
            return self.train
        return [shard for shards in self.windows[self._first_untrained :] for shard in shards]

    @cached_property
    def _first_untrained(self) -> int:
        """The window behind the last one that has its drafter; drafters before that one may have been deleted."""
        finished = [not self.wanted("train", str(number)) for number in range(len(self.windows))]
        return max((number + 1 for number, done in enumerate(finished) if done), default=0)


DRAFTER_FILES = ("model.safetensors", "config.json", "resume/trainer.safetensors", "train.json")
