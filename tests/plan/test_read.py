"""What a plan reads from a store, and the command: bounded, harmless, and one sentence for a mistake."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftmill import layout
from draftmill.canonical import canonical_json
from draftmill.cli import main
from draftmill.graph import Graph
from draftmill.plan import read
from draftmill.plan.jobs import all_jobs
from draftmill.plan.rates import Pilot
from draftmill.plan.read import plan_of
from draftmill.plan.types import Plan
from draftmill.provenance import read as read_provenance
from draftmill.records import Record, write_record
from draftmill.schemas import COMPLETIONS, REJECTED, write_rows
from draftmill.specs import Specs
from draftmill.store.local import LocalStore
from draftmill.workflow import current_index, graph_of
from tests.core.builds import TARGET
from tests.tiny import config_values, prompt_texts, write_prompts

CONFIG = Path("config.yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose prompts are published and nothing else; it is the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps({**TARGET, "max_position_embeddings": 4096}))
    write_prompts(tmp_path / "prompts.jsonl", prompt_texts(60))
    configure()
    current_index(config(), LocalStore(Path("build")), write=True)
    return tmp_path


def configure(**changes: Any) -> None:
    CONFIG.write_text(yaml.safe_dump(config_values(**changes)))


def config() -> Any:
    from draftmill.config import load

    return load(CONFIG)


def store() -> LocalStore:
    return LocalStore(Path("build"))


def planned() -> Plan:
    return plan_of(config(), store())


def write_all(graph: Graph) -> None:
    """Every object of a build, with its provenance inside where its kind has a place for it."""
    for stage, name in all_jobs(graph):
        for key in graph.outputs(stage, name):
            path = Path("build") / key
            provenance = graph.specs.provenance(stage)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".parquet":
                write_rows(path, REJECTED if ".rejected" in key else COMPLETIONS, [], provenance)
            elif path.suffix == ".json":
                path.write_text(canonical_json({"provenance": provenance, "draftmill": provenance}))
            elif path.suffix == ".safetensors" and stage == "extract":
                _write_states(path, provenance)
            else:
                path.write_text("made")


def _write_states(path: Path, provenance: Specs | dict[str, Any]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file(
        {"offsets": np.zeros(1, dtype=np.int64)},
        path,
        metadata={"draftmill": canonical_json({"provenance": provenance})},
    )
    assert read_provenance(path) == provenance


def beat(stage: str, name: str, **fields: Any) -> None:
    values = {"state": "done", "done": 10, "resumed": 0, "tokens": 100, "started": 0.0, "updated": 20.0, **fields}
    store().put(layout.progress(stage, name), canonical_json(values).encode())


def contents(folder: Path) -> dict[str, bytes]:
    cache = folder / ".draftmill"
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and cache not in path.parents
    }


def test_a_plan_writes_nothing(folder: Path) -> None:
    configure(generate={"temperature": 0.25})
    write_prompts(folder / "prompts.jsonl", prompt_texts(70))
    before = contents(folder)
    assert planned().jobs
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("changes", "stage", "setting"),
    [
        ({"generate": {"temperature": 0.25}}, "generate", "generate.temperature"),
        ({"audit": {"max_cut": 0.5}}, "audit", "audit.max_cut"),
        ({"hidden": {"taps": [0, 1]}}, "extract", "hidden.taps"),
        ({"train": {"learning_rate": 1e-4}}, "train", "train.learning_rate"),
        ({"evaluate": {"bootstrap": 7}}, "evaluate", "evaluate.bootstrap"),
        ({"pilot": 1}, "pilot", "pilot"),
        (
            {"target": {"chat_template_args": {"enable_thinking": False}}},
            "generate",
            "target.chat_template_args.enable_thinking",
        ),
    ],
)
def test_the_setting_that_changed_is_read_from_an_old_object(
    folder: Path, changes: dict[str, Any], stage: str, setting: str
) -> None:
    write_all(graph_of(config(), store()))
    assert planned().jobs == 0
    configure(**changes)
    found = planned()
    (cause,) = found.stage(stage).causes
    assert cause.kind == "setting"
    assert [one.setting for one in cause.differences] == [setting]


def test_an_edited_prompt_is_one_changed_shard_whose_other_rows_are_taken_over(folder: Path) -> None:
    write_all(graph_of(config(), store()))
    texts = prompt_texts(60)
    texts[40] += " please"
    write_prompts(folder / "prompts.jsonl", texts)
    found = planned()
    assert sum(edited.new_rows for edited in found.edited) == 1
    generate = found.stage("generate")
    assert (generate.new, generate.changed, generate.missing) == (0, len(found.edited), 0)
    assert generate.need.rows_taken_over == generate.need.rows - 1
    assert {cause.kind for cause in found.stage("train").causes} == {"prompts"}


def test_damaged_objects_only_leave_settings_unnamed(folder: Path) -> None:
    write_all(graph_of(config(), store()))
    for path in Path("build").rglob("*"):
        if path.is_file() and "prompts" not in path.parts:
            path.write_bytes(b"{")
    configure(generate={"temperature": 0.25}, train={"learning_rate": 1e-4})
    found = planned()
    assert found.stage("generate").causes[0].differences == ()
    assert found.stage("generate").changed == found.stage("generate").planned


def test_rates_come_from_heartbeats_and_records_of_finished_jobs_only(folder: Path) -> None:
    graph = graph_of(config(), store())
    shard, other, third, fourth = graph.shards[:4]
    fp = graph.specs.fp["generate"]
    assert planned().stage("generate").need.rates["speed"].source == "default"
    beat("generate", f"{shard}-{fp}", tokens=100, updated=20.0)
    beat("generate", f"{other}-{fp}", done=18, resumed=8, tokens=50, updated=20.0)
    write_record(
        store(), Record(stage="generate", name=f"{other}-{fp}", outputs={}, started=5.0, finished=35.0, gpus=["a", "b"])
    )
    beat("generate", f"{third}-{fp}", state="failed", tokens=10**9)
    beat("generate", f"{fourth}-{fp}", done=5, resumed=5, tokens=10**9)
    store().put(layout.progress("generate", f"{fourth}-{'0' * 12}"), b"[1]")
    need = planned().stage("generate").need
    # 20 seconds on one GPU, and 30 seconds on two by the record, for 100 and 50 tokens in ten rows each.
    assert need.rates["speed"].estimate.value == pytest.approx((20 + 60) / 150)
    assert need.rates["answer"].estimate.value == pytest.approx(150 / 20)
    assert need.rates["speed"].source == "history"
    assert need.rates["speed"].jobs == 2


def test_jobs_whose_rows_were_answered_ahead_add_up_to_the_time_that_their_rows_took(folder: Path) -> None:
    """A lane answers on while one job publishes and the next one starts; a job behind a pause counts by itself."""
    graph = graph_of(config(), store())
    fp = graph.specs.fp["generate"]
    spans = [(0.0, 110.0), (115.0, 210.0), (215.0, 310.0), (5000.0, 5090.0)]
    for number, (began, ended) in enumerate(spans):
        name = f"{number:012x}-{fp}"
        beat("generate", name, tokens=1000, started=began + 3, updated=ended - 1, gpus=["a"])
        record = Record(stage="generate", name=name, outputs={}, started=began, finished=ended, gpus=["a"])
        write_record(store(), record)
    # One that found all its rows in the journal did nothing, but its GPU was no idle one.
    beat("generate", f"{9:012x}-{fp}", resumed=10, started=4950.0, updated=4990.0, gpus=["a"])
    need = planned().stage("generate").need
    assert need.rates["answer"].estimate.value == pytest.approx(4 * 1000 / 40)
    assert need.rates["speed"].estimate.value == pytest.approx((310 + 10 + 90) / 4000)
    assert need.rates["speed"].jobs == 4


def test_the_pilots_record_gives_lengths_and_a_damaged_one_nothing(folder: Path) -> None:
    key = graph_of(config(), store()).pilot()
    record = {"rows": 10, "tokens": 500, "output_tokens": 200, "completions_bytes": 3000}
    store().put(key, canonical_json(record).encode())
    graph = graph_of(config(), store())
    assert read._pilot(graph, store()) == Pilot(tokens=50.0, output_tokens=20.0, completions_bytes=300.0)
    assert planned().stage("generate").need.rates["answer"].source == "pilot"
    for damaged in (
        b"{",
        b"[]",
        b'{"rows": 0}',
        b'{"rows": 0, "tokens": 1, "output_tokens": 1, "completions_bytes": 1}',
    ):
        store().put(key, damaged)
        assert read._pilot(graph, store()) is None


def test_what_is_read_of_a_long_history_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        beat("extract", f"{number:012x}-{'1' * 12}")
    read_keys: list[str] = []
    get = LocalStore.get
    monkeypatch.setattr(LocalStore, "get", lambda self, key: read_keys.append(key) or get(self, key))
    planned()
    assert sum(key.startswith("progress/extract/") for key in read_keys) == 24


# The command ----------------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["draftmill", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_prints_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--configfile", "config.yaml") == 0
    text = capsys.readouterr().out
    assert text.startswith("build: 60 prompts in ")
    assert "not made before" in text


def test_the_command_prints_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--configfile", "config.yaml", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["format"] == 1
    assert values["rules"]["generate"] == values["stages"][0]["new"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: configure(train={"learning_rat": 1}), "train.learning_rat is not a known key"),
        (lambda: configure(pilot=99), "pilot: 99 is no train shard"),
        (lambda: Path("prompts.jsonl").unlink(), "There is no prompt source prompts.jsonl"),
        (lambda: CONFIG.write_text("a: [", encoding="utf-8"), "is not valid YAML"),
        (CONFIG.unlink, "There is no configuration file"),
    ],
)
def test_a_mistake_is_one_sentence(
    folder: Path, change: Any, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change()
    assert run(monkeypatch, "--configfile", "config.yaml") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("draftmill: ")
    assert len(err.strip().splitlines()) == 1
