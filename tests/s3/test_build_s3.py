"""The real Snakefile with its store on a real S3 service: the same objects as in a folder, from any machine."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.s3.counting import Door
from tests.s3.project import BESIDE, S3Project
from tests.s3.weed import Weed
from tests.tiny import Project

pytestmark = pytest.mark.slow
WINDOWS = {"taps": [0, 2], "policy": "window", "window_shards": 1, "window_lead": 0}


@pytest.fixture(scope="module")
def door(weed):
    with Door(weed.port) as door:
        yield door


@pytest.fixture(scope="module")
def built_on_s3(weed: Weed, door: Door, tmp_path_factory: pytest.TempPathFactory) -> S3Project:
    """A project that was built once on S3."""
    project = S3Project(tmp_path_factory.mktemp("built"), weed, "built", endpoint=door.endpoint)
    project.build()
    project.requests = [*door.requests]
    return project


@pytest.fixture
def project(built_on_s3: S3Project, s3_environment: Weed) -> S3Project:
    return built_on_s3


def elsewhere(project: S3Project, folder: Path) -> S3Project:
    """The same project on a machine that has a clone, the target and the prompts, and nothing else."""
    folder.mkdir()
    shutil.copytree(project.folder / "target", folder / "target")
    other = S3Project(folder, project.weed, "unused", endpoint=project.endpoint)
    shutil.copy(project.folder / "prompts.jsonl", folder)
    other.url = project.url
    other.configure()
    return other


def test_the_store_is_that_of_a_local_build_object_by_object(project: S3Project, built: Project) -> None:
    expected = {key: data for key, data in built.objects().items() if not key.startswith(BESIDE)}
    found = project.objects()
    assert found.keys() == expected.keys()
    assert [key for key, data in expected.items() if found[key] != data] == []
    assert all(project.store.info(key).sha256 for key in found)


def test_an_output_is_looked_at_once_and_a_job_s_first_before_it_and_behind_the_others_too(project: S3Project) -> None:
    asked = [(method, path.partition("/built/")[2]) for method, path in project.requests]
    looks = Counter(key for method, key in asked if method == "HEAD")
    objects = project.objects()
    # Prompt shards and their index are published by no job.
    made = [key for key in objects if not key.startswith("prompts/")]
    jobs = [json.loads(project.store.get(key))["outputs"] for key in project.store.list("records/")]
    assert max(looks[key] for key in made) <= 3
    assert sum(looks[key] for key in made) <= len(made) + sum(1 + (len(outputs) > 1) for outputs in jobs)


def test_a_fresh_machine_has_nothing_to_do_and_fetches_and_writes_nothing(
    project: S3Project, door: Door, tmp_path: Path
) -> None:
    other = elsewhere(project, tmp_path / "other")
    del door.requests[:]
    assert other.plan() == {}
    counts = door.counts()
    assert set(counts) <= {"LIST", "GET"}
    assert counts["LIST"] <= 8
    assert not [path for path in (other.folder / ".snakemake/storage").rglob("*") if path.is_file()]


def test_a_plan_of_everything_asks_nothing_of_missing_objects_and_writes_nothing(
    weed: Weed, door: Door, project: S3Project, tmp_path: Path
) -> None:
    other = S3Project(tmp_path / "new", weed, "new", endpoint=door.endpoint)
    del door.requests[:]
    assert other.plan()["generate"] > 1
    assert set(door.counts()) <= {"LIST", "GET"}
    assert len(door.requests) <= 12
    assert other.objects() == {}


def test_a_deleted_object_is_made_again_alone_on_another_machine(project: S3Project, tmp_path: Path) -> None:
    key = next(key for key in project.store.list("hidden/") if "held-out" not in key)
    before = project.objects()
    project.store.delete(key)
    other = elsewhere(project, tmp_path / "other")
    assert other.plan() == {"extract": 1}
    other.build()
    assert other.objects() == before
    assert other.plan() == {}


def test_jobs_do_not_list_the_store(project: S3Project, door: Door, tmp_path: Path) -> None:
    project.store.delete(next(iter(project.store.list("eval/"))))
    other = elsewhere(project, tmp_path / "other")
    del door.requests[:]
    other.build()
    objects = [path for method, path in door.requests if "list-type=2" in path and "prefix=built%2Fhidden%2F&" in path]
    assert len(objects) == 2, "the plan lists, and the end of the build does"


def test_hidden_states_go_from_s3_when_their_window_is_trained_on(
    weed: Weed, s3_environment: Weed, tmp_path: Path
) -> None:
    project = S3Project(tmp_path / "windows", weed, "windows", prompts=28)
    project.configure(hidden=WINDOWS)
    project.build()
    index = json.loads(project.store.get("prompts/index.json"))
    windows = sum(shard["split"] == "train" for shard in index["shards"])
    assert windows > 1
    states = list(project.store.list("hidden/"))
    assert states
    assert all("held-out" in key for key in states)
    assert len({key.split("/")[2] for key in project.store.list("drafter/")}) == windows
    assert elsewhere_windows(project, tmp_path).plan() == {}
    left = [key for key in project.store.list() if key.startswith(("journal/", "claims/"))]
    assert left == []


def elsewhere_windows(project: S3Project, tmp_path: Path) -> S3Project:
    other = elsewhere(project, tmp_path / "other")
    other.configure(hidden=WINDOWS)
    return other


@pytest.mark.parametrize(
    ("environment", "store", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "s3://bucket/a", "refuses these credentials"),
        ({}, "s3://no-such-bucket/a", "names a bucket that does not exist"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "s3://bucket/a", "does not answer at http://127.0.0.1:9"),
    ],
    ids=["credentials", "bucket", "endpoint"],
)
def test_what_a_person_can_mend_is_one_sentence(
    project: S3Project, tmp_path: Path, environment: dict[str, str], store: str, said: str
) -> None:
    class Broken(S3Project):
        @property
        def environment(self) -> dict[str, str]:
            return {**super().environment, **environment}

    other = elsewhere(project, tmp_path / "other")
    other.__class__ = Broken
    other.configure(store=store, s3={"wait_s": 3.0, "retries": 1})
    result = other.run("-n")
    text = result.stdout + result.stderr
    assert result.returncode == 1
    assert said in text
    assert "Traceback" not in text
