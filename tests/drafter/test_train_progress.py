"""What a training's heartbeat says, and how it says that the training failed."""

import json

import pytest

from draftmill.progress import Heartbeat
from draftmill.stages.assemble import _steps
from draftmill.store.local import LocalStore


@pytest.fixture
def heartbeat(tmp_path):
    store = LocalStore(tmp_path)
    return lambda total, unit: Heartbeat(store, "beat.json", stage="train", name="x", total=total, unit=unit)


def told(tmp_path):
    return json.loads((tmp_path / "beat.json").read_text())


def test_steps_of_an_earlier_run_count_as_done_and_as_resumed(heartbeat, tmp_path):
    with _steps(heartbeat) as progress:
        progress(8, 10, {"loss": 2.0})
        progress(9, 10, {"loss": 1.0})
    beat = told(tmp_path)
    assert (beat["state"], beat["done"], beat["resumed"], beat["total"], beat["loss"]) == ("done", 9, 7, 10, 1.0)


def test_a_training_that_fails_says_so(heartbeat, tmp_path):
    def fail(progress):
        progress(1, 10, {"loss": 2.0})
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), _steps(heartbeat) as progress:
        fail(progress)
    assert told(tmp_path)["state"] == "failed"
