"""The build graph over one listing of the store: which objects each job makes, reads and waits for.

A job is a stage and a name (a shard, a window, or the one name of a stage that runs once). Its inputs are drawn only
while one of its own outputs is absent from the listing: what is there stands, whatever happens to the things it was
once made from. Otherwise a rebuilt input would drag every finished consumer along, because Snakemake's `ancient` holds
only for a file that exists when the plan is made. So a new pilot replans the pilot alone, and a deleted object is made
again alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice

from draftmill import layout
from draftmill.config import Config
from draftmill.layout import DRAFTER_FILES
from draftmill.prompts.index import Index
from draftmill.specs import Specs, windows

Keys = list[str]
# The name of a job whose stage runs once.
ONCE = "0"
# More shards than a lane ever has rows of at a time.
_COMING = 256


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
    def _turns(self) -> Mapping[str, int]:
        order = [self.pilot_shard, *(shard for shard in self.shards if shard != self.pilot_shard)]
        return {shard: number for number, shard in enumerate(order)}

    def turn(self, stage: str, shard: str) -> float:
        """What Snakemake is to prefer among jobs of one priority, from 1 downwards; 0 where nothing is preferred.

        Shards that servers generate come in the order in which the servers take them up.
        """
        if stage != "generate" or self.config.generate.engine != "sglang":
            return 0
        return 1 - self._turns[shard] / len(self._turns)

    def coming(self, shard: str) -> list[str]:
        """Shards that are still to be generated beside this one, in their turn, as many as could ever be needed.

        None beside the pilot, which everything waits for.
        """
        if shard == self.pilot_shard:
            return []
        return list(islice((other for other in self._to_generate if other != shard), _COMING))

    @cached_property
    def _to_generate(self) -> list[str]:
        return [shard for shard in self._turns if self.wanted("generate", shard)]

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
        # Asked several times a job while Snakemake plans, so no table is built here.
        match stage:
            case "generate":
                return [self.completions(name), self.rejected(name)]
            case "audit":
                return [self.audit(name), self.audit_page(name)]
            case "extract":
                return [self.hidden(name)]
            case "train":
                return [self.drafter(name, file) for file in DRAFTER_FILES]
        once = {
            "audit_set": self.audit_set,
            "pilot": self.pilot,
            "evaluate": self.evaluation,
            "report": self.report,
        }
        return [once[stage]()]

    def wanted(self, stage: str, name: str) -> bool:
        """Whether something that a job makes is absent."""
        return not self.present.issuperset(self.outputs(stage, name))

    def parts(self) -> Keys:
        """Present outputs of jobs that lack others: a kill has left them, or another build is at the job."""
        jobs = [(stage, shard) for stage in ("generate", "audit") for shard in self.shards]
        jobs += [("train", str(window)) for window in range(len(self.windows))]
        wanted = [job for job in jobs if self.wanted(*job)]
        return [key for job in wanted for key in self.outputs(*job) if key in self.present]

    def inputs(self, stage: str, name: str) -> dict[str, Keys]:
        """What a job reads, and under `after` what it only waits for; nothing for a job whose outputs are there."""
        if not self.wanted(stage, name):
            return {}
        match stage:
            case "generate":
                return {"prompts": self._published(name), "after": self._after_pilot(name)}
            case "audit":
                return {"completions": [self.completions(name)], "rejected": [self.rejected(name)]}
            case "extract":
                return {"completions": [self.completions(name)], "after": self._before_extract(name)}
            case "train":
                return self._train_inputs(int(name))
        once = {
            "audit_set": lambda: {"audits": [self.audit(shard) for shard in self.shards]},
            "pilot": self._pilot_inputs,
            "evaluate": self._evaluate_inputs,
            "report": self._report_inputs,
        }
        return once[stage]()

    def reads(self, stage: str, name: str) -> dict[str, Keys]:
        """What a job reads, without what it only waits for."""
        return {kind: keys for kind, keys in self.inputs(stage, name).items() if kind != "after"}

    def lacks(self, stage: str, name: str) -> Keys:
        """What a job reads or waits for and the store lacks."""
        return [key for keys in self.inputs(stage, name).values() for key in keys if key not in self.present]

    def awaits(self, stage: str, name: str) -> Keys:
        """The same without what others of it wait for by themselves: edges are what a plan's time goes into."""
        lacks = self.lacks(stage, name)
        implied: set[str] = set()
        if stage == "extract" and self.audit(name) not in self.present:
            implied = {self.completions(name)}
            if name != self.pilot_shard and self.completions(name) not in self.present:
                implied.add(self.pilot())
        elif stage == "train":
            shards = (*self.windows[int(name)], *self.held_out)
            implied = {self.audit(shard) for shard in shards if self.hidden(shard) not in self.present}
        return [key for key in lacks if key not in implied]

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

    def temporary_states(self) -> Keys:
        """Hidden states that a build removes when everything that reads them is done."""
        return [] if self.config.hidden.policy == "keep" else [self.hidden(shard) for shard in self.train]

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
        if stage == "generate" and self.config.generate.engine == "sglang":
            return self.config.generate.sglang.server.gpus
        return self.config.resources.train_gpus if stage == "train" else 1

    def span(self, window: int) -> tuple[float, float]:
        """The share of the whole run that a window's training covers, by rows."""
        rows = self._rows_until
        return rows[window] / rows[-1], rows[window + 1] / rows[-1]

    @cached_property
    def _rows_until(self) -> list[int]:
        """Train rows before each window, and all of them."""
        rows = {shard.name: shard.rows for shard in self.index.train}
        return [0, *accumulate(sum(rows[shard] for shard in shards) for shards in self.windows)]

    def results(self) -> Keys:
        """Everything a whole build leaves; temporary hidden states are no result."""
        each = [key for shard in self.shards for stage in ("generate", "audit") for key in self.outputs(stage, shard)]
        kept = self.shards if self.config.hidden.policy == "keep" else self.held_out
        once = [key for stage in ("pilot", "audit_set", "evaluate", "report") for key in self.outputs(stage, ONCE)]
        return [*each, *map(self.hidden, kept), *self.outputs("train", str(self.last_window)), *once]

    def targets(self) -> Keys:
        """The results by which a build finds every job: of a job that has made nothing yet its first output is enough."""
        beside = {"generate": self.rejected, "audit": self.audit_page}
        first = {"generate": self.completions, "audit": self.audit}
        found = {
            key(shard)
            for stage, key in beside.items()
            for shard in self.shards
            if first[stage](shard) not in self.present
        }
        return [key for key in self.results() if key not in found]

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
