"""Policy `window` on the real Snakefile: states are extracted, trained on and removed, window by window."""

import json
from pathlib import Path

import pytest

from tests.tiny import Project

pytestmark = pytest.mark.slow

WINDOWS = {"taps": [0, 2], "policy": "window", "window_shards": 1, "window_lead": 0}


def test_states_go_when_their_window_is_trained_on(tmp_path: Path) -> None:
    project = Project(tmp_path / "windows", prompts=28)
    project.configure(hidden=WINDOWS)
    project.build()

    store = project.folder / "build"
    index = json.loads((store / "prompts/index.json").read_text())
    windows = sum(shard["split"] == "train" for shard in index["shards"])
    assert windows > 1
    assert len(list(store.glob("drafter/*/window-*"))) == windows
    assert not list(store.glob("hidden/*.safetensors")), "states of trained windows are removed"
    assert list(store.glob("hidden/held-out/*.safetensors")), "held-out states stay"
    assert project.plan() == {}

    # With a policy that removes, another learning rate has to extract again.
    project.configure(hidden=WINDOWS, train={"learning_rate": 1e-4})
    plan = project.plan()
    assert (plan["train"], plan["extract"]) == (windows, windows)
    assert "generate" not in plan
