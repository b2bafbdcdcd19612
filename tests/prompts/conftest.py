"""Small data sets, a store and one way to build an index over them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftmill import config
from draftmill.prompts.index import bring_up_to_date
from draftmill.store.local import LocalStore


def refuse_to_count(record):
    raise AssertionError("no record here is long enough to be tokenised")


def chat(*contents, **more):
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": turns, **more}


def write_lines(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def build(tmp_path) -> Callable:
    """Build (or look at) the index of some sources; keyword arguments go to the prompts section."""

    def _build(
        *sources,
        write=True,
        limit=100_000,
        tokenizer="t",
        count=refuse_to_count,
        progress=None,
        store=None,
        s3=None,
        **prompts,
    ):
        listed = [source if isinstance(source, dict) else {"path": str(source)} for source in sources]
        values = {"held_out": 0.3, "shard_rows": 9, **prompts, "sources": listed}
        others = {"device": "cpu", "store": str(tmp_path / "store"), "target": {"model": "m"}, "s3": s3 or {}}
        settings = config.parse({**others, "prompts": values})
        return bring_up_to_date(
            settings,
            store or LocalStore(tmp_path / "store"),
            write=write,
            limit_tokens=limit,
            tokenizer=tokenizer,
            count_tokens=count,
            cache_dir=tmp_path / ".draftmill",
            progress=progress,
        )

    return _build


@pytest.fixture
def data(tmp_path):
    """Where test data is written, and how."""
    folder = tmp_path / "data"
    folder.mkdir()
    return SimpleNamespace(
        folder=folder,
        chat=chat,
        lines=lambda name, records: write_lines(folder / name, records),
        prompts=lambda name, count, start=0: write_lines(
            folder / name, [chat(f"question {number}") for number in range(start, start + count)]
        ),
    )
