"""A whole store at toy size in seconds: the real stage functions over made-up answers and states, each job recorded.

Only what needs a forward of the target is made up (answers, hidden states); audit, pilot, training, evaluation and
report are the stages' own, so that every object is what a build leaves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftmill.audit.tokens import token_info
from draftmill.config import Config, parse
from draftmill.graph import ONCE, Graph
from draftmill.hidden_states import HiddenRow, RowKey, write_shard
from draftmill.job import versions
from draftmill.records import Record, Work, read_record, recording
from draftmill.report.page import build_report
from draftmill.schemas import COMPLETIONS, PROMPTS, REJECTED, iterate_loss_masks, read_rows, write_rows
from draftmill.stages.assemble import evaluate_checkpoint, train_drafter
from draftmill.stages.audit import audit_set, audit_shard
from draftmill.stages.pilot import measure_pilot
from draftmill.store.local import LocalStore
from draftmill.target.tokenizer import generation_config, load_tokenizer, stop_ids
from draftmill.workflow import current_index, graph_of
from tests.tiny import config_values, make_target, prompt_texts, write_prompts

WIDTH, TAPS = 32, 2


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """The toy configuration with absolute paths, with two answers a prompt so that samples matter."""
    changes["generate"] = {"samples": 2, **changes.get("generate", {})}
    changes["train"] = {"epochs": 1, **changes.get("train", {})}
    return config_values(
        **{
            "store": str(folder / "build"),
            "target": {"model": str(folder / "target")},
            "prompts": {"sources": [{"path": str(folder / "prompts.jsonl")}]},
            **changes,
        }
    )


@dataclass
class Toy:
    """A configuration, its store and its graph."""

    config: Config
    store: LocalStore
    graph: Graph

    @classmethod
    def open(cls, folder: Path, **changes: Any) -> Toy:
        config = parse(settings(folder, **changes))
        store = LocalStore(Path(config.store))
        return cls(config, store, graph_of(config, store))

    def path(self, key: str) -> Path:
        return self.store.path(key)

    def paths(self, keys: list[str]) -> list[Path]:
        return [self.path(key) for key in keys]

    @contextmanager
    def job(self, stage: str, name: str, label: str, **made_from: Any) -> Iterator[dict[str, Any]]:
        """One job as a rule runs it: its provenance inside, its record behind it."""
        read = {
            key: self.path(key)
            for kind, keys in self.graph.inputs(stage, name).items()
            if kind != "after"
            for key in keys
        }
        made = {key: self.path(key) for key in self.graph.outputs(stage, name)}
        work = Work(stage, label, "run", versions())
        with recording(self.store, work, outputs=made, inputs=read):
            yield {**self.graph.specs.provenance(stage, **made_from), "versions": versions()}

    def build(self) -> None:
        """Make every object that is absent, stage by stage."""
        graph, fp = self.graph, self.graph.specs.fp
        for shard in graph.shards:
            if graph.wanted("generate", shard):
                self.generate(shard)
            if graph.wanted("audit", shard):
                self.audit(shard)
            if graph.wanted("extract", shard):
                self.extract(shard)
        if graph.wanted("pilot", ONCE):
            with self.job("pilot", ONCE, fp["pilot"], shard=graph.pilot_shard) as provenance:
                shard = graph.pilot_shard
                found = graph.completions(shard), graph.hidden(shard), graph.pilot()
                measure_pilot(*self.paths(list(found)), provenance)
        self._audit_set()
        for window in range(len(graph.windows)):
            if graph.wanted("train", str(window)):
                self.train(window)
        if graph.wanted("evaluate", ONCE):
            self.evaluate()
        if graph.wanted("report", ONCE):
            self.report()
        self.graph = graph_of(self.config, self.store)

    def generate(self, shard: str) -> None:
        with self.job("generate", shard, f"{shard}-{self.graph.specs.fp['generate']}", prompts=shard) as provenance:
            good, bad = made_up(read_rows(self.path(self.graph.prompts(shard)), PROMPTS), self.config.generate.samples)
            write_rows(self.path(self.graph.rejected(shard)), REJECTED, bad, provenance)
            write_rows(self.path(self.graph.completions(shard)), COMPLETIONS, good, provenance)

    def audit(self, shard: str) -> None:
        graph, target = self.graph, self.config.target
        tokenizer = load_tokenizer(target)
        tokens = token_info(tokenizer, stop_ids(tokenizer, generation_config(target)), target.chat_template_args)
        name = f"{shard}-{graph.specs.fp['audit']}"
        with self.job("audit", shard, name, completions=graph.completions(shard)) as provenance:
            audit_shard(
                self.path(graph.completions(shard)),
                self.path(graph.rejected(shard)),
                self.path(graph.audit(shard)),
                self.path(graph.audit_page(shard)),
                self.config.audit,
                tokens,
                provenance,
                failed=self.path(graph.failed_audit(shard)),
            )

    def extract(self, shard: str) -> None:
        graph = self.graph
        name = f"{shard}-{graph.specs.fp['extract']}"
        with self.job("extract", shard, name, completions=graph.completions(shard)) as provenance:
            rows = read_rows(self.path(graph.completions(shard)), COMPLETIONS)
            write_shard(self.path(graph.hidden(shard)), list(states(rows)), provenance)

    def _audit_set(self) -> None:
        graph = self.graph
        if graph.wanted("audit_set", ONCE):
            audits = [graph.audit(shard) for shard in graph.shards]
            with self.job("audit_set", ONCE, graph.specs.fp["audit_set"], audits=audits) as provenance:
                audit_set(self.paths(audits), self.config.audit, self.path(graph.audit_set()), provenance)

    def train(self, window: int) -> None:
        graph = self.graph
        shards = graph.windows[window]
        name = f"{graph.specs.fp['train']}-{window}"
        with self.job("train", str(window), name, window=window, hidden=shards) as provenance:
            train_drafter(
                self.config,
                hidden=self.paths([graph.hidden(shard) for shard in shards]),
                held_out=self.paths([graph.hidden(shard) for shard in graph.held_out]),
                previous=self.path(graph.drafter(window - 1, "model.safetensors")).parent if window else None,
                output=self.path(graph.drafter(window, "model.safetensors")).parent,
                journal=self.path(f"journal/train/{name}"),
                span=graph.span(window),
                provenance=provenance,
                heartbeat=Beat,  # type: ignore[arg-type]
                attest=lambda: None,
            )

    def evaluate(self) -> None:
        graph = self.graph
        drafter = graph.drafter(graph.last_window, "model.safetensors")
        with self.job("evaluate", ONCE, graph.specs.fp["evaluate"], drafter=drafter) as provenance:
            evaluate_checkpoint(
                self.config,
                drafter=self.path(drafter).parent,
                held_out=self.paths([graph.completions(shard) for shard in graph.held_out]),
                output=self.path(graph.evaluation()),
                provenance=provenance,
                heartbeat=Beat,  # type: ignore[arg-type]
                attest=lambda: None,
            )

    def report(self) -> None:
        graph = self.graph
        with self.job("report", ONCE, graph.specs.fp["report"], evaluation=graph.evaluation()) as provenance:
            build_report(
                audits=self.paths([graph.audit(shard) for shard in graph.shards]),
                train=self.paths([graph.drafter(window, "train.json") for window in range(len(graph.windows))]),
                evaluation=self.path(graph.evaluation()),
                audit_page=self.path(graph.audit_set()),
                counts=graph.specs.spec["report"]["counts"],
                specs=graph.specs.spec,
                fingerprints=graph.specs.fp,
                output=self.path(graph.report()),
                provenance=provenance,
            )


class Beat:
    """A heartbeat that nobody hears."""

    def __init__(self, *_: Any) -> None:
        self.done = 0

    def __enter__(self) -> Beat:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def resume(self, done: int) -> None:
        self.done = done

    def advance(self, units: int, *_: Any) -> None:
        self.done += units


def make_project(folder: Path, prompts: int = 60) -> None:
    """Target and prompts of a toy build."""
    make_target(folder / "target")
    write_prompts(folder / "prompts.jsonl", prompt_texts(prompts))


def make_store(folder: Path, **changes: Any) -> Toy:
    """A finished store."""
    config = parse(settings(folder, **changes))
    current_index(config, LocalStore(Path(config.store)), write=True)
    toy = Toy.open(folder, **changes)
    toy.build()
    return toy


def made_up(prompts: list[dict[str, Any]], samples: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers that depend on the prompt alone; one row in ten is rejected."""
    good, bad = [], []
    for row in prompts:
        for sample in range(samples):
            rng = random.Random(f"{row['prompt_id']}/{sample}")
            key = {"prompt_id": row["prompt_id"], "sample": sample, "source": row["source"]}
            if rng.random() < 0.1:
                bad.append({**key, "reason": "token_run", "detail": "made up"})
                continue
            ids = [rng.randrange(60, 120) for _ in range(rng.randrange(4, 14))]
            good.append({**key, **_answer(ids, [rng.randrange(60, 120) for _ in range(6)])})
    return good, bad


def _answer(ids: list[int], prompt: list[int]) -> dict[str, Any]:
    return {
        "origin": "generated",
        "prompt_ids": prompt,
        "output_ids": ids,
        "loss_mask": None,
        "finish_reason": "stop",
        "text": " ".join(map(str, ids)),
    }


def states(rows: list[Mapping[str, Any]]) -> Iterator[HiddenRow]:
    for row, mask in zip(rows, iterate_loss_masks(rows), strict=True):
        ids = [*row["prompt_ids"], *row["output_ids"]]
        generator = torch.Generator().manual_seed(sum(ids))
        yield HiddenRow(
            RowKey(row["prompt_id"], row["sample"], row["source"]),
            torch.tensor(ids, dtype=torch.int32),
            torch.tensor([0] * len(row["prompt_ids"]) + [int(bit) for bit in mask], dtype=torch.uint8),
            torch.randn(len(ids), TAPS, WIDTH, generator=generator).bfloat16(),
        )


def read_records(store: LocalStore) -> list[Record]:
    """All readable records by key; damaged ones are left out."""
    found = (read_record(store, key) for key in sorted(store.list("records/")))
    return [record for record in found if record is not None]
