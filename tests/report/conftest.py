"""A run's objects as the stages leave them, of any size: audits, train.json by window, evaluation, specs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftmill.audit.counts import Counts, Measurements
from draftmill.audit.result import judge
from draftmill.config import AuditConfig
from draftmill.drafter.acceptance import Answer, summarize
from draftmill.report.page import build_report
from draftmill.stages.audit import publish

VERSIONS = {"draftmill": "0.1.0", "torch": "2.13.0"}
FINGERPRINTS = {
    stage: f"{number:012x}"
    for number, stage in enumerate(
        ("generate", "audit", "audit_set", "extract", "pilot", "train", "evaluate", "report"), 0xABC000
    )
}


@dataclass
class RunFiles:
    """Where a run's objects are, and the values that the rule gives beside them."""

    store: Path
    sources: Sequence[str]
    audits: list[Path] = field(default_factory=list)
    train: list[Path] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    specs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def evaluation_path(self) -> Path:
        return self.store / "eval/e.json"

    def build(self, name: str = "r") -> str:
        """Build the report and return its text."""
        write(self.evaluation_path, self.evaluation)
        output = self.store / f"report/{name}.html"
        build_report(
            audits=self.audits,
            train=self.train,
            evaluation=self.evaluation_path,
            audit_page=self.store / "audits/set-5e7.html",
            counts=self.counts,
            specs=self.specs,
            fingerprints=FINGERPRINTS,
            output=output,
            provenance=provenance("report", evaluation="eval/e.json"),
        )
        return output.read_text(encoding="utf-8")


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def provenance(stage: str, **inputs: Any) -> dict[str, Any]:
    return {"stage": stage, "fingerprint": FINGERPRINTS[stage], "spec": {}, "inputs": inputs, "versions": VERSIONS}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunFiles]:
    def make(
        *, sources: Sequence[str] = ("simple", "multiple"), shards: int = 3, windows: int = 1, epochs: int = 3
    ) -> RunFiles:
        run = RunFiles(tmp_path / "store", sources)
        run.audits = [_audit(run.store, f"{number:012x}-aud", sources, number) for number in range(1, shards + 1)]
        run.train = [_window(run.store, number, epochs) for number in range(windows)]
        run.evaluation = _evaluation(sources)
        run.counts = {
            "read": 1951,
            "train": 198,
            "held_out": 18,
            "duplicates": 4,
            "beyond_max_prompts": 1729,
            "bad": {
                "broken_json": {"count": 2, "first": ["prompts.jsonl line 7: not JSON", "prompts.jsonl line 9: x"]}
            },
        }
        names = [path.stem.removesuffix("-aud") for path in run.audits]
        run.specs = {
            "generate": {"version": 1, "target": {"model": "sha256:1234"}, "sampling": {"temperature": 0.6}},
            "extract": {"version": 1, "taps": [2, 9, 16]},
            "train": {"version": 1, "windows": [names[:-1]], "held_out": names[-1:], "training": {"epochs": epochs}},
            "evaluate": {"version": 1, "decoding": {"max_new_tokens": 32}},
            "audit": {"version": 1, "limits": {"max_spike": 0.1234567}},
        }
        return run

    return make


def _audit(store: Path, name: str, sources: Sequence[str], seed: int) -> Path:
    made = random.Random(seed)
    by_source, pairs = {}, {}
    for source in sources:
        values = [made.randint(4, 47) for _ in range(9)] + [12] * 6
        histogram = {value: values.count(value) for value in sorted(set(values))}
        rows = len(values) + 11
        by_source[source] = Counts(
            rows=rows,
            histogram=histogram,
            histogram_cut={48: 11},
            finish={"length": 11, "stop": len(values)},
            thinking={"none": rows},
            empty=1,
            repetitive=2,
        )
        pairs[source] = np.array([[made.getrandbits(64), made.getrandbits(64)] for _ in range(rows)], np.uint64)
    result = judge(name, Measurements(by_source, pairs), [], AuditConfig(), provenance("audit"))
    path = store / f"audits/{name}.json"
    publish(result, path, path.with_suffix(".html"))
    return path


def _window(store: Path, number: int, epochs: int) -> Path:
    steps, base = 24 * epochs, 24 * epochs * number
    curve = [
        {
            "step": step,
            "learning_rate": 1e-3 * (1 - (base + step) / 1000),
            "loss": 3 + 7 / (1 + 0.02 * (base + step)),
            "accuracy": 0.1,
            "accepted": 0.2,
        }
        for step in range(1, steps + 1)
    ]
    scored = [
        {"epoch": epoch, "step": 24 * epoch, "train": _scores(epoch + 2), "held_out": _scores(epoch)}
        for epoch in range(1, epochs + 1)
    ]
    value = {
        "rows": 195 + number,
        "rows_without_anchor": 3,
        "held_out_rows": 18,
        "steps": steps,
        "steps_before": base,
        "span": [0.0, 1.0],
        "curve": curve,
        "epochs": scored,
        "shape": {"num_layers": 2, "block_size": 8, "taps": [2, 9, 16], "hidden_size": 576},
        "provenance": provenance("train"),
    }
    return write(store / f"drafter/t/window-{number}/train.json", value)


def _scores(level: int) -> dict[str, Any]:
    shares = [0.05 * level / position for position in range(1, 8)]
    return {
        "loss": 8.0 - 0.317 * level,
        "accuracy": sum(shares) / 7,
        "accuracy_by_position": shares,
        "accepted": 0.111 * level,
        "blocks": 144,
    }


def _evaluation(sources: Sequence[str]) -> dict[str, Any]:
    made = random.Random(5)
    drafted, looked_up = [], []
    for number in range(max(16, len(sources))):
        source = sources[number % len(sources)]
        drafted.append(_answer(made, source, 32, (0, 0, 0, 1, 0, 2)))
        looked_up.append(_answer(made, source, 32, (0, 0, 1, 4, 0, 10)))
    return {
        "prompts": len(drafted),
        "identical": len(drafted),
        "divergences": [],
        "target": {"tokens": sum(answer.tokens for answer in drafted)},
        "drafter": summarize(drafted, 7, 200),
        "prompt_lookup": summarize(looked_up, 10, 200),
        "rows": [],
        "too_long": 0,
        "provenance": provenance("evaluate"),
    }


def _answer(made: random.Random, source: str, tokens: int, choices: Sequence[int]) -> Answer:
    accepted, done = [], 1
    while done < tokens:
        accepted.append(min(made.choice(choices), tokens - done - 1))
        done += accepted[-1] + 1
    return Answer(source, tokens, accepted)


class Page(HTMLParser):
    """A parsed page: its visible text, start tags with attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._parts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self._parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif self._inside != "style":
            self._parts.append(data)

    def data(self, name: str) -> Any:
        """The JSON of a data script."""
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == name))
