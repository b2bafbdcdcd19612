"""What is planned after a change, on the real Snakefile: names decide, and undoing a change plans nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.config import load
from draftmill.prompts.index import bring_up_to_date
from draftmill.store.local import LocalStore
from tests.tiny import Project, prompt_texts, write_prompts

pytestmark = pytest.mark.slow

AFTER_STATES = {"train": 1, "evaluate": 1, "report": 1}


def shard_counts(project: Project) -> tuple[int, int]:
    index = json.loads((project.folder / "build/prompts/index.json").read_text())
    splits = [shard["split"] for shard in index["shards"]]
    return splits.count("train"), splits.count("held_out")


def test_nothing_is_planned_after_a_build(project: Project) -> None:
    assert project.plan() == {}


def test_nothing_is_planned_after_every_file_was_touched(project: Project) -> None:
    for path in project.folder.rglob("*"):
        if path.is_file():
            os.utime(path)
    assert project.plan() == {}


def test_nothing_is_planned_without_snakemakes_own_records(project: Project) -> None:
    shutil.rmtree(project.folder / ".snakemake")
    shutil.rmtree(project.folder / ".draftmill")
    assert project.plan() == {}


def test_a_plan_writes_nothing_into_the_store(project: Project) -> None:
    before = project.objects()
    write_prompts(project.folder / "prompts.jsonl", prompt_texts(70))
    project.configure(generate={"temperature": 0.5})
    assert project.plan()["generate"] > 0
    assert project.objects() == before


def edited_prompts(project: Project) -> list[str]:
    """Prompts with one changed so that no boundary, duplicate or held-out row is touched and the pilot is not hit."""
    texts = prompt_texts(60)
    store = LocalStore(project.folder / "build")
    os.chdir(project.folder)

    def shards() -> list[tuple[str, str]]:
        config = load(Path("config.yaml"))
        index = bring_up_to_date(
            config,
            store,
            write=False,
            limit_tokens=492,
            tokenizer="t",
            count_tokens=lambda _: 1,
            cache_dir=Path(".draftmill"),
        )
        return [(shard.name, shard.split) for shard in index.shards]

    before = shards()
    for position in range(30, 60):
        edited = [*texts]
        edited[position] += " please"
        write_prompts(project.folder / "prompts.jsonl", edited)
        after = shards()
        changed = [new for old, new in zip(before, after, strict=False) if old != new]
        if len(before) == len(after) and len(changed) == 1 and changed[0][1] == "train" and before[0] == after[0]:
            return edited
    raise AssertionError("no harmless edit was found")


def test_one_edited_prompt_plans_one_shard(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    write_prompts(project.folder / "prompts.jsonl", edited_prompts(project))
    assert project.plan() == {"generate": 1, "audit": 1, "extract": 1, "audit_set": 1, **AFTER_STATES}
    write_prompts(project.folder / "prompts.jsonl", prompt_texts(60))
    assert project.plan() == {}


def test_the_learning_rate_plans_training_and_later(project: Project) -> None:
    project.configure(train={"learning_rate": 1e-4})
    assert project.plan() == AFTER_STATES
    project.configure()
    assert project.plan() == {}


def test_an_audit_limit_plans_audits_only(project: Project) -> None:
    train, held_out = shard_counts(project)
    project.configure(audit={"max_cut": 0.99})
    assert project.plan() == {"audit": train + held_out, "audit_set": 1}


def test_a_new_pilot_plans_the_pilot_only(project: Project) -> None:
    project.configure(pilot=1)
    assert project.plan() == {"pilot": 1}


def test_a_tap_plans_extraction_and_later(project: Project) -> None:
    train, held_out = shard_counts(project)
    project.configure(hidden={"taps": [0, 1]})
    assert project.plan() == {"extract": train, "extract_held_out": held_out, "pilot": 1, **AFTER_STATES}


def test_the_temperature_plans_generation_and_later(project: Project) -> None:
    train, held_out = shard_counts(project)
    project.configure(generate={"temperature": 0.9})
    assert project.plan() == {
        "generate": train + held_out,
        "audit": train + held_out,
        "audit_set": 1,
        "extract": train,
        "extract_held_out": held_out,
        "pilot": 1,
        **AFTER_STATES,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"generate": {"flush_rows": 7, "flush_seconds": 3.0}},
        {"train": {"save_every": 5}},
        {"resources": {"cpu_threads": 2}},
        {"gate": {"wait_s": 5.0}},
        {"prompts": {"max_bad": 0.5}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_decides_no_bytes_plans_nothing(project: Project, changes: dict[str, dict[str, object]]) -> None:
    project.configure(**changes)
    assert project.plan() == {}


def test_a_deleted_object_is_planned_with_what_only_it_needs(project: Project) -> None:
    states = sorted((project.folder / "build/hidden").glob("*.safetensors"))[0]
    kept = states.read_bytes()
    states.unlink()
    try:
        assert project.plan() == {"extract": 1}
    finally:
        states.write_bytes(kept)


def test_a_missing_limit_of_gpus_is_refused(project: Project, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("cores: 1\nrerun-triggers: [mtime]\n")
    result = project.run("-n", "--workflow-profile", str(tmp_path), gpus="")
    assert result.returncode == 1
    assert "No limit of GPUs is given" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_a_job_that_asks_for_more_gpus_than_there_are_is_refused(project: Project) -> None:
    project.configure(resources={"train_gpus": 4})
    result = project.run("-n", gpus="gpu=2")
    assert result.returncode == 1
    assert "A job needs 4 GPUs (resources.train_gpus) but the limit is gpu=2" in result.stdout + result.stderr


def test_more_than_one_training_gpu_is_refused(project: Project) -> None:
    project.configure(resources={"train_gpus": 2})
    result = project.run("-n", gpus="gpu=2")
    assert result.returncode == 1
    assert "training runs on one GPU in this version" in result.stdout + result.stderr


def test_other_rerun_triggers_are_refused(project: Project) -> None:
    result = project.run("-n", "--rerun-triggers", "mtime", "params")
    assert result.returncode == 1
    assert "must be `mtime` alone" in result.stdout + result.stderr


def test_a_misspelt_key_is_one_sentence(project: Project) -> None:
    project.configure(generate={"temprature": 0.1})
    result = project.run("-n")
    assert result.returncode == 1
    assert "generate.temprature is not a known key" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_the_cpu_gate_says_not_required(project: Project) -> None:
    logs = sorted((project.folder / "logs/gpu_free").glob("generate-*.log"))
    assert logs
    assert all(json.loads(log.read_text())["verdict"] == "not_required" for log in logs)


def test_no_sentinel_outlives_its_run(project: Project) -> None:
    left = list((project.folder / ".draftmill").glob("gpu/*/*.json"))
    assert left == []


def test_show_prints_what_an_object_was_made_from(project: Project) -> None:
    for path in sorted((project.folder / "build").rglob("*")):
        if (
            path.suffix not in (".parquet", ".safetensors", ".json")
            or {"progress", "records"} & set(path.parts)
            or path.name in ("index.json", "kin.json", "history.parquet")
        ):
            continue
        command = [sys.executable, "-m", "draftmill", "show", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=True, env=project.environment)
        assert json.loads(result.stdout)
