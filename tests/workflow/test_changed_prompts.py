"""Prompts that a person edits between a plan and the start of its build."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmill import config, outcomes
from draftmill.config import read_yaml
from draftmill.errors import UserError
from draftmill.store.local import LocalStore
from draftmill.workflow import Build, graph_of
from tests.tiny import Project, prompt_texts, write_prompts


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """A build that is planned and not yet started."""
    project = Project(tmp_path)
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("DRAFTMILL_RUN", "run")
    monkeypatch.setenv(outcomes.VARIABLE, str(tmp_path / "outcomes"))
    (tmp_path / "outcomes").touch()
    return Build.open(read_yaml(Path("config.yaml")), gpus=1)


def test_a_build_of_prompts_that_changed_since_its_plan_does_not_start(planned: Build, tmp_path: Path) -> None:
    write_prompts(Path("prompts.jsonl"), prompt_texts(60)[:-1])
    with pytest.raises(UserError) as caught:
        planned.start()
    assert str(caught.value) == (
        "The prompts changed after the plan was made: give the same command again to plan with them."
    )
    assert [one.kind for one in outcomes.read(tmp_path / "outcomes")] == ["changed"]
    again = Build.open(read_yaml(Path("config.yaml")), gpus=1)
    again.start()
    assert set(again.graph.index.shards) != set(planned.graph.index.shards)
    assert {again.graph.prompts(shard) for shard in again.graph.shards} <= LocalStore(Path("build")).list().keys()


def test_a_change_that_makes_no_other_shards_stops_nothing(planned: Build) -> None:
    with Path("prompts.jsonl").open("a") as file:
        file.write("\n")
    planned.start()
    found = graph_of(config.parse(read_yaml(Path("config.yaml"))), LocalStore(Path("build")))
    assert found.index.shards == planned.graph.index.shards
