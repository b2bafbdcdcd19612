"""A tiny target with its tokenizer, prompt shards, and the stage in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.config import Config, parse
from draftmill.prompts.record import identify
from draftmill.schemas import COMPLETIONS, PROMPTS, REJECTED, Row, read_rows, write_rows
from draftmill.stages.generate import Answering, generate_shard, open_engine
from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore
from tests.tiny import config_values, make_target, prompt_texts


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_target(folder, layers=2)
    return folder


@pytest.fixture
def configure(target: Path) -> Callable[..., Config]:
    def make(**changes: Any) -> Config:
        return parse(config_values(**{**changes, "target": {**changes.get("target", {}), "model": str(target)}}))

    return make


@pytest.fixture
def open_with(configure: Callable[..., Config]) -> Callable[..., tuple[Config, Answering]]:
    """A configuration and what answers under it, with a model of its own."""

    def make(**changes: Any) -> tuple[Config, Answering]:
        config = configure(**changes)
        return config, open_engine(config)

    return make


def prompt(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def prompts(count: int = 9) -> list[dict[str, Any]]:
    """Prompts of different lengths."""
    return [prompt(text + " please" * (number % 3)) for number, text in enumerate(prompt_texts(count))]


class Beat:
    """A heartbeat that only counts, and tells how it ended."""

    ended: str | None = None

    def __init__(self, total: int) -> None:
        self.total, self.done, self.resumed = total, 0, 0

    def __enter__(self) -> Beat:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.ended = "done" if kind is None else "failed"

    def resume(self, done: int) -> None:
        self.done = self.resumed = done

    def advance(self, units: int, tokens: int = 0, facts: Mapping[str, Any] | None = None) -> None:
        self.done += units


class Stage:
    """One shard's generate stage in a folder; `run` may be called again and again."""

    def __init__(self, folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
        self.store = LocalStore(folder)
        rows = [identify(dict(record)) for record in records]
        self.ids = [row.prompt_id for row in rows]
        table = [{"prompt_id": row.prompt_id, "source": "chat", "record": row.text} for row in rows]
        write_rows(folder / "prompts.parquet", PROMPTS, table, {})
        self.journal = Journal(self.store, "journal/generate/x")
        self.beat = Beat(0)

    def run(self, config: Config, answering: Answering) -> None:
        def heartbeat(total: int) -> Beat:
            self.beat = Beat(total)
            return self.beat

        generate_shard(
            config,
            answering,
            prompts=self.store.path("prompts.parquet"),
            completions=self.store.path("completions.parquet"),
            rejected=self.store.path("rejected.parquet"),
            journal=self.journal,
            heartbeat=heartbeat,  # type: ignore[arg-type]
            provenance={"stage": "generate"},
        )

    @property
    def good(self) -> list[Row]:
        return read_rows(self.store.path("completions.parquet"), COMPLETIONS)

    @property
    def bad(self) -> list[Row]:
        return read_rows(self.store.path("rejected.parquet"), REJECTED)

    @property
    def reasons(self) -> dict[tuple[str, int], tuple[str, str]]:
        return {(row["prompt_id"], row["sample"]): (row["reason"], row["detail"]) for row in self.bad}

    def outputs(self) -> dict[str, bytes]:
        return {name: self.store.get(name) for name in ("completions.parquet", "rejected.parquet")}


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Stage]:
    def make(records: Sequence[Mapping[str, Any]] | None = None, name: str = "store") -> Stage:
        return Stage(tmp_path / name, records if records is not None else prompts())

    return make
