"""The plan counts the very jobs that `snakemake -n` would start, on the real Snakefile and a store filled with names."""

import json
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from draftmill.config import load
from draftmill.graph import Graph
from draftmill.plan.jobs import all_jobs
from draftmill.plan.read import plan_of
from draftmill.store.local import LocalStore
from draftmill.workflow import current_index, graph_of
from tests.tiny import Project, prompt_texts, write_prompts

pytestmark = pytest.mark.slow

WINDOWS = {"taps": [0, 2], "policy": "window", "window_shards": 1, "window_lead": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("planned") / "project")


@pytest.fixture
def project(made: Project) -> Iterator[Project]:
    """A project whose store holds its prompts and nothing else, with its first configuration and prompts."""
    made.configure()
    write_prompts(made.folder / "prompts.jsonl", prompt_texts(60))
    with chdir(made.folder):
        current_index(load(Path("config.yaml")), LocalStore(Path("build")), write=True)
        yield made
        for path in Path("build").rglob("*"):
            if path.is_file():
                path.unlink()


def graph(project: Project) -> Graph:
    return graph_of(load(project.folder / "config.yaml"), LocalStore(Path("build")))


def fill(project: Project, **without: Any) -> None:
    """Every object as an empty file, but the hidden states of train shards if `states` is False."""
    found = graph(project)
    keys = [key for job in all_jobs(found) for key in found.outputs(*job)]
    if not without.get("states", True):
        keys = [key for key in keys if key not in set(map(found.train_hidden, found.train))]
    for key in keys:
        path = Path("build") / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def agree(project: Project) -> dict[str, int]:
    """The jobs by rule, after a look that both say the same."""
    before = project.objects()
    rules = dict(plan_of(load(project.folder / "config.yaml"), LocalStore(Path("build"))).rules)
    assert rules == project.table()
    assert project.objects() == before
    return rules


def test_nothing_built(project: Project) -> None:
    rules = agree(project)
    assert rules["generate"] == rules["audit"] == len(graph(project).shards)


def test_all_built(project: Project) -> None:
    fill(project)
    assert agree(project) == {}


def test_one_prompt_edited(project: Project) -> None:
    fill(project)
    texts = prompt_texts(60)
    texts[40] += " please"
    write_prompts(project.folder / "prompts.jsonl", texts)
    rules = agree(project)
    assert 1 <= rules["generate"] <= 3
    assert rules["train"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"learning_rate": 1e-4}},
        {"hidden": {"taps": [0, 1]}},
        {"pilot": 1},
        {"generate": {"temperature": 0.5}},
        {"gate": {"sentinel": "in_job"}, "generate": {"temperature": 0.5}},
    ],
    ids=["learning_rate", "taps", "pilot", "temperature", "in_job"],
)
def test_a_setting_changed(project: Project, changes: dict[str, Any]) -> None:
    fill(project)
    project.configure(**changes)
    assert agree(project)


@pytest.mark.parametrize("stage", ["generate", "audit", "extract", "pilot", "train"])
def test_an_object_deleted(project: Project, stage: str) -> None:
    fill(project)
    found = graph(project)
    job = next(job for job in all_jobs(found) if job[0] == stage)
    (Path("build") / found.outputs(*job)[0]).unlink()
    assert agree(project)[stage] == 1


def test_under_windows_another_learning_rate_extracts_again(project: Project) -> None:
    project.configure(hidden=WINDOWS)
    fill(project, states=False)
    assert agree(project) == {}
    project.configure(hidden=WINDOWS, train={"learning_rate": 1e-4})
    rules = agree(project)
    assert rules["extract"] == rules["train"] == len(graph(project).train)
    assert "generate" not in rules


def test_the_command_prints_the_same_plan(project: Project) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "draftmill", "plan", "--configfile", "config.yaml", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=project.environment)
    assert json.loads(result.stdout)["rules"] == project.table()
