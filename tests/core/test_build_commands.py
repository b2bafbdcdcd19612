"""`draftmill fetch`, `index`, `show` and the build's own `sentinel`, called as a person or a rule calls them."""

import json
import sys

import pytest
import yaml

from draftmill import outcomes
from draftmill.cli import main
from tests.core.builds import TARGET
from tests.core.objects import write_both
from tests.tiny import config_values, prompt_texts, write_prompts


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the command line in an empty folder: its status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRAFTMILL_BUILDER", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["draftmill", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_show_prints_what_an_object_was_made_from(call, tmp_path):
    write_both(tmp_path)
    code, out, err = call("show", "x.parquet")
    assert (code, err) == (0, "")
    assert json.loads(out)["spec"] == {"of": "spec"}


def test_show_of_nothing_is_one_sentence(call):
    assert call("show", "absent.parquet") == (2, "", "draftmill: There is no file absent.parquet.\n")


def test_there_is_one_thing_to_fetch(call, tmp_path):
    assert call("fetch", "moon") == (
        2,
        "",
        "draftmill: There is nothing called moon to fetch: `draftmill fetch demo`.\n",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def project(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(TARGET))
    write_prompts(tmp_path / "prompts.jsonl", prompt_texts(60))
    values = config_values(target={"context_length": 4096})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def test_index_publishes_shards_and_counts_them(call, project):
    code, out, err = call("index", "--configfile", "config.yaml")
    assert (code, err) == (0, "")
    index = json.loads((project / "build/prompts/index.json").read_text())
    splits = [shard["split"] for shard in index["shards"]]
    rows = sum(shard["rows"] for shard in index["shards"])
    assert out == f"{splits.count('train')} train and {splits.count('held_out')} held-out shards, {rows} prompts\n"
    assert rows == 60
    published = {path.stem for path in (project / "build/prompts").glob("*.parquet")}
    assert published == {shard["name"] for shard in index["shards"]} | {"history"}
    assert call("index", "--configfile", "config.yaml")[1] == out


def test_index_without_configuration_or_sources_is_one_sentence(call, project):
    assert call("index") == (
        2,
        "",
        "draftmill: There is no configuration file config/config.yaml: give one with --configfile.\n",
    )
    (project / "prompts.jsonl").unlink()
    code, out, err = call("index", "--configfile", "config.yaml")
    assert (code, out) == (2, "")
    assert "prompts.jsonl" in err
    assert err.count("\n") == 1


def test_an_answer_that_leaves_no_room_for_a_prompt_is_one_sentence(call, project):
    values = config_values(target={"context_length": 24})
    (project / "config.yaml").write_text(yaml.safe_dump(values))
    assert call("index", "--configfile", "config.yaml") == (
        2,
        "",
        "draftmill: generate.max_new_tokens: 24 leaves no room for a prompt in a context of 24 tokens; lower it or set "
        "target.context_length.\n",
    )


def test_the_sentinel_of_a_cpu_job_says_not_required(call, tmp_path):
    job = ("--job", "generate-abc-def", "--policy", "{}", "--out", "folder/verdict.json")
    code, out, err = call("sentinel", "--device", "cpu", "--gpus", "1", *job)
    assert (code, err) == (0, "")
    verdict = json.loads((tmp_path / "folder/verdict.json").read_text())
    assert (verdict["verdict"], verdict["stage"], verdict["shard"]) == ("not_required", "generate", "abc-def")
    assert json.loads(out) == verdict


@pytest.mark.parametrize(
    ("job", "key"),
    [
        ("generate-abc", "progress/generate/abc-01.json"),
        ("train-3", "progress/train/02-3.json"),
        ("evaluate-0", "progress/evaluate/03.json"),
    ],
)
def test_a_refused_sentinel_tells_the_store_of_its_job(call, tmp_path, monkeypatch, job, key):
    """No GPU here: what cannot be read is not proven free. The job is never begun, and yet it has failed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(outcomes.VARIABLE, str(tmp_path / "outcomes"))
    (tmp_path / "outcomes").touch()
    place = {"store": "store", "s3": {}, "fp": {"generate": "01", "train": "02", "evaluate": "03"}}
    policy = json.dumps({"wait_s": 0.0, "lock_dir": str(tmp_path / "locks")})
    given = ("--job", job, "--policy", policy, "--out", "verdict.json", "--tell", json.dumps(place))
    code, _, err = call("sentinel", "--device", "cuda", "--gpus", "1", *given)
    told = json.loads((tmp_path / "store" / key).read_text())
    assert code == 2
    assert err.startswith("draftmill: GPU gate: ")
    assert (told["state"], told["gate"]["verdict"], told["stage"]) == ("failed", "unknown", job.partition("-")[0])
    assert told["error"] in err
    assert told["gate"]["reasons"]
    (supervised,) = outcomes.read(tmp_path / "outcomes")
    assert (supervised.kind, supervised.sentence) == ("mistake", told["error"]), "`draftmill run` knows why"
