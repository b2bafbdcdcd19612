"""The fault this project exists for: 87% of the answers are six tokens long. The build must stop at the pilot."""

import json
import random
from pathlib import Path

import pytest

from tests.tiny import Project

pytestmark = pytest.mark.slow

ROWS, BROKEN = 100, 87


def write_broken_set(path: Path) -> None:
    """Rows of ids with a loss mask: 87 of 100 have exactly six loss tokens, the rest are honest answers."""
    made = random.Random(5)
    with path.open("w", encoding="utf-8") as stream:
        for row in range(ROWS):
            prompt = [made.randrange(250) for _ in range(20)]
            answer = [made.randrange(250) for _ in range(6 if row % ROWS < BROKEN else made.randrange(40, 60))]
            mask = [0] * len(prompt) + [1] * len(answer)
            stream.write(json.dumps({"input_ids": prompt + answer, "loss_mask": mask}) + "\n")


def test_a_set_of_six_token_answers_stops_at_the_pilot(tmp_path: Path) -> None:
    project = Project(tmp_path / "historic")
    write_broken_set(project.folder / "broken.jsonl")
    sources = [{"path": "broken.jsonl", "answers": "keep"}]
    project.configure(prompts={"sources": sources, "shard_rows": 40}, audit={"max_spike": 0.3})

    result = project.run()

    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("draftmill: ")]
    assert len(said) == 1
    assert "fails its audit" in said[0]
    assert "have exactly 6 loss tokens (limit 30%)" in said[0]
    assert "most likely thinking used up max_new_tokens" in said[0]
    store = project.folder / "build"
    assert len(list(store.glob("completions/????????????-????????????.parquet"))) == 1, (
        "only the pilot's shard was generated"
    )
    assert not list(store.glob("hidden/**/*.safetensors")), "nothing was extracted behind a failed audit"
    assert not list(store.glob("audits/*.json"))
    failed = list(store.glob("audits/failed/*.json"))
    assert len(failed) == 1
    assert failed[0].with_suffix(".html").name in said[0]

    # The person looks, raises the limit on purpose, and the build goes on with what was made.
    pilot = next(store.glob("completions/????????????-????????????.parquet"))
    made = pilot.stat().st_mtime_ns
    project.configure(prompts={"sources": sources, "shard_rows": 40}, audit={"max_spike": 1.0})
    assert project.run("--until", "pilot").returncode == 0
    assert pilot.stat().st_mtime_ns == made, "the pilot's shard was not generated again"
