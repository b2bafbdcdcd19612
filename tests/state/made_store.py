"""A made store of any size: every object that a build leaves, small but real, at a moment of the build's life.

    made = MadeStore(shards=2000, now=time.time())
    made.write(folder)               # files with the times that they would have
    made.upload(store)               # the same through a Store; S3 gives its own times
    made.tick(store, seconds=2.0)    # a running job goes on: its heartbeat is replaced

Completions, rejected rows and audits are of a few dozen kinds made by the real code and shared among shards; one shard
holds hostile texts, one failed audit the spike of 87% equal answers. Everything is seeded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from safetensors.numpy import save

from draftmill import layout
from draftmill.audit.page import render
from draftmill.audit.result import AuditResult, audit_tables
from draftmill.build_record import announce
from draftmill.canonical import canonical_json
from draftmill.config import AuditConfig, Config
from draftmill.graph import Graph
from draftmill.prompts.index import Index, ShardEntry, SourceEntry
from draftmill.prompts.scan import BadKind, Counts
from draftmill.schemas import COMPLETIONS, PROMPTS, REJECTED
from draftmill.store.base import Store
from tests.core.builds import configuration, specs_of
from tests.state.made_objects import evaluation, heartbeat, made_prompt, parquet, train_json
from tests.state.made_texts import HOSTILE, TOKENS, completion, rejection
from tests.state.memory import Memory

Phase = Literal["started", "generating", "training", "finished"]
GPUS = tuple(f"GPU-{number:08x}-0000-4000-8000-{number:012x}" for number in range(1, 9))
HOSTS = ("alpha", "beta")
MAX_TOKENS = 240
LIMITS = AuditConfig(max_short=0.5, max_repetitive=0.2, min_mean_loss_tokens=4.0)
OLD_FP = "0123456789ab"
_RATE = 900.0  # tokens a second and lane
_SHARE = {"started": (0.0, 0.0), "generating": (0.6, 0.45), "training": (1.0, 1.0), "finished": (1.0, 1.0)}


@dataclass(frozen=True)
class Kind:
    """A shard's worth of rows with their prompts and its audit, shared by many shards."""

    prompts: bytes
    completions: bytes
    rejected: bytes
    audit: AuditResult
    json: bytes
    html: bytes

    @property
    def rows(self) -> int:
        return self.audit.measurements.overall.rows

    @property
    def bad(self) -> int:
        return self.audit.measurements.overall.rejections

    @property
    def tokens(self) -> int:
        return self.audit.measurements.overall.loss_tokens


@dataclass
class MadeStore:
    """All objects of a build with `shards` shards of `rows` prompts at one moment, by key with their times."""

    shards: int = 60
    rows: int = 12
    phase: Phase = "generating"
    windows: int = 10
    lanes: int = 4
    failures: int = 3
    broken_audits: int = 2
    kinds: int = 24
    now: float = 1_800_000_000.0
    seed: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    """Sections of the configuration to change (tests/core/builds.py)."""

    # What is wanted --------------------------------------------------------------------------------------------------

    @cached_property
    def config(self) -> Config:
        window = max(1, -(-len(self.index.train) // self.windows))
        base = {
            "hidden": {"policy": "window", "window_shards": window, "window_lead": 2},
            "generate": {"max_new_tokens": MAX_TOKENS, "max_token_run": 64},
            "audit": LIMITS.model_dump(),
            "device": "cuda",
        }
        return configuration(base, **self.changes)

    @cached_property
    def index(self) -> Index:
        made = random.Random(self.seed)
        names = sorted({f"{made.getrandbits(48):012x}" for _ in range(self.shards)})
        made.shuffle(names)
        held_out = max(1, self.shards // 50)
        entries = [
            ShardEntry(name, self.rows, "train" if place < self.shards - held_out else "held_out", 90 * self.rows)
            for place, name in enumerate(names)
        ]
        train, kept = (self.shards - held_out) * self.rows, held_out * self.rows
        bad = {"empty_turn": BadKind(3, ["chat.jsonl line 9: turn 1 is empty"])}
        counts = Counts(train + kept + 20, train, kept, 17, 0, bad)
        sources = (SourceEntry("prompts/chat.jsonl", "chat", 100_000, "sha256:" + "1" * 64),)
        return Index(1, {"shard_rows": self.rows}, sources, counts, tuple(entries))

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.config, self.index, specs_of(self.config, self.index), frozenset())

    @property
    def fp(self) -> Any:
        return self.graph.specs.fp

    # Shared contents -------------------------------------------------------------------------------------------------

    @cached_property
    def made_kinds(self) -> list[Kind]:
        return [self._kind(number, []) for number in range(self.kinds)]

    @cached_property
    def hostile_kind(self) -> Kind:
        return self._kind(1000, HOSTILE)

    @cached_property
    def spiked_kind(self) -> Kind:
        return self._kind(1001, ["ok"] * round(self.rows * 0.9))

    def _kind(self, number: int, first: list[str]) -> Kind:
        made = random.Random(self.seed * 1000 + number)
        bad = [rejection(made, row) for row in range(number % 5 == 0 and self.rows >= 8)]
        usual = made.choices(("plain", "cut", "repeated", "masked"), (20, 4, 1, 1), k=self.rows)
        kinds = [*first, *usual][: self.rows - len(bad)]
        rows = [completion(made, row, kind, MAX_TOKENS) for row, kind in enumerate(kinds)]
        tables = pa.Table.from_pylist(rows, COMPLETIONS), pa.Table.from_pylist(bad, REJECTED)
        limits = self.config.audit
        result = audit_tables(f"Shard kind {number}", *tables, limits, TOKENS, self.provenance("audit"))
        facts = self.provenance("generate")
        text = canonical_json(result.to_json()) + "\n"
        asked = [made_prompt(row["prompt_id"], row["source"]) for row in (*rows, *bad)]
        return Kind(
            parquet(PROMPTS, asked, {"stage": "prompts"}),
            parquet(COMPLETIONS, rows, facts),
            parquet(REJECTED, bad, facts),
            result,
            text.encode(),
            render(result).encode(),
        )

    def provenance(self, stage: str, **inputs: Any) -> dict[str, Any]:
        return self.graph.specs.provenance(stage, **inputs) | {"versions": {"draftmill": "0.2.0", "torch": "2.13.0"}}

    def kind_of(self, shard: str) -> Kind:
        if shard in self._spiked:
            return self.spiked_kind
        place = self.graph.shards.index(shard) if self.shards < 100 else self._place[shard]
        return self.hostile_kind if place == 1 else self.made_kinds[place % self.kinds]

    @cached_property
    def _spiked(self) -> frozenset[str]:
        """Shards whose audit is over a limit: the last ones generated."""
        return frozenset(
            self.generated[-self.broken_audits :] if self.broken_audits and self.phase != "finished" else ()
        )

    @cached_property
    def _place(self) -> dict[str, int]:
        return {shard: place for place, shard in enumerate(self.graph.shards)}

    @cached_property
    def _hidden(self) -> bytes:
        tensors = {"taps": np.zeros((4, 2, 8), np.float16), "offsets": np.array([0, 4], np.int64)}
        return save(tensors, {"draftmill": canonical_json({"rows": [], "provenance": self.provenance("extract")})})

    # The build's life ------------------------------------------------------------------------------------------------

    @cached_property
    def work_order(self) -> list[str]:
        """Shards as they are worked on: the pilot, held-out ones, the rest by window."""
        first = [self.graph.pilot_shard, *self.graph.held_out]
        return [*first, *(shard for shard in self.graph.train if shard not in set(first))]

    @cached_property
    def generated(self) -> list[str]:
        return self.work_order[: round(self.shards * _SHARE[self.phase][0])]

    @cached_property
    def extracted(self) -> list[str]:
        return self.work_order[: round(self.shards * _SHARE[self.phase][1])]

    @cached_property
    def trained(self) -> int:
        """Windows that are trained on."""
        if self.phase == "finished":
            return len(self.graph.windows)
        whole = [window for window in self.graph.windows if set(window) <= set(self.extracted)]
        return max(len(whole) - 1, 0)

    @cached_property
    def objects(self) -> dict[str, tuple[bytes, float]]:
        """Every object's bytes and time by key."""
        made: dict[str, tuple[bytes, float]] = {}
        for key, data, at in self._all():
            made[key] = (data, min(at, self.now))
        return made

    def _all(self) -> Iterator[tuple[str, bytes, float]]:
        text = json.dumps(dataclasses.asdict(self.index)) + "\n"
        begin = self._ended("generate", 0) - 600
        yield layout.INDEX, text.encode(), begin
        memory = Memory()
        announce(memory, self.graph, "5eed" * 3, clock=lambda: begin)
        yield layout.BUILD, memory.objects[layout.BUILD], begin
        for shard in self.graph.shards:
            yield layout.prompts(shard), self.kind_of(shard).prompts, begin
        for place, shard in enumerate(self.generated):
            yield from self._generated(place, shard)
        for place, shard in enumerate(self.extracted):
            yield from self._extracted(place, shard)
        if self.extracted:
            yield self.graph.pilot(), b"{}", self._ended("extract", 0) + 1
        for window in range(self.trained):
            yield from self._window(window)
        yield from self._ends()
        yield from self._running()
        yield from self._failed()
        yield from self._foreign()

    def _seconds(self, stage: str, place: int) -> float:
        """How long a job took: a few minutes, give or take."""
        return (180.0 if stage == "generate" else 60.0) * random.Random(f"{stage}{place}").uniform(0.8, 1.25)

    def _ended(self, stage: str, place: int) -> float:
        """When the job of that place ended: the last one a while ago, earlier ones a job's time before, on all lanes."""
        count = max(len(self.generated), 1)
        step = (180.0 + 60.0) / self.lanes
        return self.now - 40.0 - (count - place) * step - (0.0 if stage == "extract" else 15.0)

    def _job(self, stage: str, name: str, place: int, keys: dict[str, bytes], **beat: Any) -> Iterator[Any]:
        """A finished job's heartbeat and record."""
        ended, seconds = self._ended(stage, place), self._seconds(stage, place)
        where = {"host": HOSTS[place % 2], "gpus": [GPUS[place % self.lanes]]}
        yield (
            layout.progress(stage, name),
            heartbeat(stage, name, ended - seconds, ended, "done", **where, **beat),
            ended,
        )
        record = self._record(stage, name, keys, ended, seconds + 20, place)
        yield layout.record(stage, name), record, ended + 1

    def _record(self, stage: str, name: str, keys: dict[str, bytes], ended: float, seconds: float, place: int) -> bytes:
        record = {
            "stage": stage,
            "name": name,
            "outputs": {key: {"bytes": len(data), "sha256": "0" * 64} for key, data in keys.items()},
            "inputs": {},
            "run": "5eed" * 3,
            "git": "c0ffee0",
            "host": HOSTS[place % 2],
            "started": ended - seconds,
            "finished": ended + 1,
            "versions": {"draftmill": "0.2.0"},
            "gpus": [] if stage == "audit" else [GPUS[place % self.lanes]],
        }
        return canonical_json(record).encode()

    def _generated(self, place: int, shard: str) -> Iterator[Any]:
        sound = shard not in self._spiked
        kind, at = self.kind_of(shard), self._ended("generate", place)
        done = {self.graph.completions(shard): kind.completions, self.graph.rejected(shard): kind.rejected}
        for key, data in done.items():
            yield key, data, at
        beat = {"total": self.rows, "done": self.rows, "useful": kind.rows, "rejected": kind.bad, "tokens": kind.tokens}
        name = f"{shard}-{self.fp['generate']}"
        server = {"uuid": GPUS[place % self.lanes], "url": "http://127.0.0.1:21000", "state": "ready", "epoch": 1}
        yield from self._job("generate", name, place, done, **beat, trained_tokens=kind.tokens, server=server)
        if sound:
            yield self.graph.audit_page(shard), kind.html, at + 4
            yield self.graph.audit(shard), kind.json, at + 4
            name = f"{shard}-{self.fp['audit']}"
            yield layout.record("audit", name), self._record("audit", name, {}, at + 2, 3.0, place), at + 5
        else:
            failed = self.graph.failed_audit(shard)
            yield failed.removesuffix(".json") + ".html", kind.html, at + 4
            yield failed, kind.json, at + 4
        if place % 10 == 3:
            yield layout.completions(shard, OLD_FP), kind.completions, at - 90_000

    def _extracted(self, place: int, shard: str) -> Iterator[Any]:
        kind, name, at = self.kind_of(shard), f"{shard}-{self.fp['extract']}", self._ended("extract", place)
        spent = {shard for window in self.graph.windows[: self.trained] for shard in window}
        if shard not in spent:
            yield self.graph.hidden(shard), self._hidden, at
        beat = {"total": kind.rows, "done": kind.rows, "tokens": kind.tokens + 40 * kind.rows}
        yield from self._job("extract", name, place, {self.graph.hidden(shard): self._hidden}, **beat)

    def _window(self, window: int) -> Iterator[Any]:
        at = self._ended("extract", len(self.extracted)) - 30 * (self.trained - window)
        for file in ("model.safetensors", "config.json", "resume/trainer.safetensors"):
            if window == self.trained - 1:
                yield self.graph.drafter(window, file), b"{}", at
        value = train_json(
            window, 4, len(self.graph.windows[window]) * self.rows, self.provenance("train", window=window)
        )
        if window == self.trained - 1 or self.phase != "started":
            yield self.graph.drafter(window, "train.json"), json.dumps(value).encode(), at
        name = f"{self.fp['train']}-{window}"
        yield (
            layout.progress("train", name),
            heartbeat(
                "train", name, at - 25, at, "done", unit="steps", total=96, done=96, host="alpha", gpus=[GPUS[0]]
            ),
            at,
        )

    def _ends(self) -> Iterator[Any]:
        old = evaluation(3, {**self.provenance("evaluate"), "fingerprint": OLD_FP})
        yield layout.evaluation(OLD_FP), json.dumps(old).encode(), self.now - 200_000
        if self.phase == "finished":
            yield self.graph.audit_set(), b"<!doctype html><title>Audit</title>", self.now - 9
            new = evaluation(
                5, self.provenance("evaluate", drafter=self.graph.drafter(len(self.graph.windows) - 1, ""))
            )
            yield self.graph.evaluation(), json.dumps(new).encode(), self.now - 8
            yield self.graph.report(), b"<!doctype html><title>Report</title>", self.now - 7

    def _running(self) -> Iterator[Any]:
        """One running job a lane; of two lanes the last ones are silent, for minutes and for long."""
        if self.phase in ("finished",):
            return
        left = [shard for shard in self.work_order if shard not in set(self.generated)]
        for lane, shard in enumerate(left[: self.lanes + 2]):
            silent = {self.lanes: 200.0, self.lanes + 1: 4000.0}.get(lane, 1.0 + lane / 4)
            name = f"{shard}-{self.fp['generate']}"
            done = self.rows // 2
            data = heartbeat(
                "generate",
                name,
                self.now - silent - 90,
                self.now - silent,
                "running",
                total=self.rows,
                done=done,
                useful=done - 1,
                rejected=1,
                retries=1,
                tokens=80_000,
                trained_tokens=72_000,
                tokens_1m=_RATE,
                host=HOSTS[lane % 2],
                gpus=[GPUS[lane]],
                server={"uuid": GPUS[lane], "url": "http://127.0.0.1:21000", "state": "ready", "epoch": 2},
                gate={"verdict": "free", "checked_at": self.now - silent - 120, "reasons": []},
                memory_bytes=120 << 30,
            )
            yield layout.progress("generate", name), data, self.now - silent
            yield layout.journal("generate", name) + "/00000000.jsonl", b"sha256:0\n{}", self.now - silent
        if self.phase == "training":
            name = f"{self.fp['train']}-{self.trained}"
            data = heartbeat(
                "train", name, self.now - 60, self.now - 1, "running", unit="steps", total=96, done=40, tokens=9_000,
                trained_tokens=8_000, host="alpha", gpus=[GPUS[0]], loss=3.2, accuracy=0.31, learning_rate=5e-4,
            )  # fmt: skip
            yield layout.progress("train", name), data, self.now - 1

    def _failed(self) -> Iterator[Any]:
        if self.phase == "finished":
            return
        left = [shard for shard in self.work_order if shard not in set(self.generated)][self.lanes + 2 :]
        for place, shard in enumerate(left[: self.failures]):
            name, at = f"{shard}-{self.fp['generate']}", self.now - 300 * (place + 1)
            error = "CUDA out of memory <script>alert(1)</script>" if place == 0 else "The server gave no answer."
            data = heartbeat("generate", name, at - 60, at, "failed", total=self.rows, done=2, error=error, host="beta",
                             gpus=[GPUS[self.lanes - 1]], useful=2, rejected=0, tokens=400)  # fmt: skip
            yield layout.progress("generate", name), data, at

    def _foreign(self) -> Iterator[Any]:
        at = self.now - 1000
        yield "progress/generate/<img src=x onerror=alert(1)>.json", b'{"state":"running"}', at
        yield "notes/read me \u202e.txt", b"mine", at
        torn = f"{self.graph.shards[-1]}-{OLD_FP}"
        yield layout.progress("generate", torn), b'{"state":"runn', at

    # Writing ---------------------------------------------------------------------------------------------------------

    def write(self, root: Path) -> Path:
        """Write all objects as files with their times."""
        for key, (data, at) in self.objects.items():
            path = root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            os.utime(path, (at, at))
        return root

    def upload(self, store: Store, threads: int = 16) -> None:
        """Put all objects; the store gives them its own times."""
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda item: store.put(item[0], item[1][0]), self.objects.items()))

    def tick(self, store: Store, seconds: float = 2.0) -> str:
        """Let the first running job go on for a while; returns its heartbeat's key."""
        key = next(key for key, _, _ in self._running())
        beat = json.loads(store.get(key))
        beat["updated"] += seconds
        beat["done"] = min(beat["done"] + 1, beat["total"])
        if "useful" in beat:
            beat["useful"] = min(beat["useful"] + 1, beat["done"])
        beat["tokens"] += int(_RATE * seconds)
        store.put(key, canonical_json(beat).encode())
        return key
