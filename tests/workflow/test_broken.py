"""Faults that rough use has found: each was a traceback, a dead end or a wrong place before."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from draftmill import job
from draftmill.config import parse
from draftmill.drafter.checkpoint import load_trainer
from draftmill.errors import UserError
from draftmill.graph import DRAFTER_FILES, Graph
from draftmill.hidden_states import HiddenShard
from draftmill.preflight import needs
from draftmill.schemas import COMPLETIONS, read_provenance, read_rows, write_rows
from draftmill.store.local import LocalStore
from draftmill.target import files
from tests.core.builds import TARGET, TRAIN, configuration, graph_of
from tests.tiny import config_values


def window_graph(pilot: int, lead: int, present: frozenset[str] = frozenset()) -> Graph:
    hidden = {"policy": "window", "window_shards": 1, "window_lead": lead}
    return graph_of(configuration(hidden=hidden, pilot=pilot), present)


def jobs(graph: Graph) -> dict[str, tuple[str, str]]:
    shards = [(stage, shard) for stage in ("generate", "audit", "extract") for shard in graph.shards]
    once = [(stage, "0") for stage in ("pilot", "audit_set", "evaluate", "report")]
    trainings = [("train", str(number)) for number in range(len(graph.windows))]
    return {key: one for one in (*shards, *once, *trainings) for key in graph.outputs(*one)}


def order(graph: Graph) -> list[tuple[str, str]]:
    """A serial order of all jobs that the results need; fails on a cycle."""
    maker, done, open_ = jobs(graph), [], set()

    def visit(wanted: tuple[str, str]) -> None:
        if wanted in done:
            return
        assert wanted not in open_, f"{wanted} waits for itself"
        open_.add(wanted)
        for key in (key for keys in graph.inputs(*wanted).values() for key in keys):
            if key in maker and key not in graph.present:
                visit(maker[key])
        done.append(wanted)

    for key in graph.results():
        if key not in graph.present:
            visit(maker[key])
    return done


@pytest.mark.parametrize("lead", [0, 1, 2])
@pytest.mark.parametrize("pilot", range(len(TRAIN)))
def test_a_pilot_of_a_later_window_waits_for_no_window(pilot, lead):
    done = order(window_graph(pilot, lead))
    assert done.index(("pilot", "0")) < min(done.index(one) for one in done if one[0] == "train")


def test_an_extraction_waits_for_no_deleted_drafter_behind_which_training_has_come():
    graph = window_graph(0, 0)
    kept = frozenset(graph.drafter(2, name) for name in DRAFTER_FILES) | {graph.pilot()}
    graph = replace(graph, present=kept)
    assert graph.inputs("extract", TRAIN[1])["after"] == [graph.audit(TRAIN[1]), graph.pilot()]
    assert graph.drafter(3, "model.safetensors") in graph.inputs("extract", TRAIN[4])["after"]


def test_preflight_counts_the_states_of_a_pilot_of_a_later_window(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "read_config", lambda target: TARGET)
    monkeypatch.setattr(files, "context_length", lambda target: 512)
    early, late = (needs(window_graph(pilot, 0), LocalStore(tmp_path)).hidden for pilot in (0, 1))
    assert late > early


@pytest.mark.parametrize("store", ["", "/", "gs://bucket/folder", "~/build", "build-{shard}"])
def test_a_store_that_rules_would_take_for_another_place_is_refused(store):
    with pytest.raises(
        UserError,
        match=r"^The configuration is wrong: store: give s3://bucket/prefix or a local folder of the build's own",
    ):
        parse(config_values(store=store))


@pytest.mark.parametrize(
    "store", ["s3://", "s3:///a", "s3://b//a", "s3://b/../a", "s3://b/a?x", "s3://b/{a}", "s3://b/a#c"]
)
def test_a_bucket_that_rules_would_take_for_another_place_is_refused(store):
    with pytest.raises(UserError, match=r"^The configuration is wrong: store: give s3://bucket/prefix, of letters"):
        parse(config_values(store=store))


def test_a_bucket_has_one_spelling():
    assert parse(config_values(store="s3://bucket/a/b/")).store == "s3://bucket/a/b"


@pytest.mark.parametrize("store", ["build/", "./build", "build//"])
def test_a_store_has_one_spelling(store):
    assert parse(config_values(store=store)).store == "build"


def test_a_store_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"^store: .*/file is no folder: choose another one\.$"):
        LocalStore(tmp_path / "file").list()


def test_a_store_whose_name_looks_like_a_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("run:2/completions/a.parquet")
    write_rows(path, COMPLETIONS, [], {"stage": "generate"})
    assert read_rows(path, COMPLETIONS) == []
    assert read_provenance(path) == {"stage": "generate"}


@pytest.mark.parametrize("text", ["{bro", "[1]", "\x00", "7"])
def test_a_broken_config_of_the_target_is_one_sentence(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        UserError, match=r"^target.model: .*config\.json is no readable config .*: copy the model again"
    ):
        files.read_config(parse(config_values(target={"model": str(tmp_path)})).target)


@pytest.mark.parametrize("data", [b"", b"PAR1 cut", b"\xff" * 100])
@pytest.mark.parametrize(
    "reader", [lambda path: read_rows(path, COMPLETIONS), HiddenShard, load_trainer], ids=["rows", "states", "trainer"]
)
def test_a_damaged_object_says_what_to_do(tmp_path, reader, data):
    (tmp_path / "object").write_bytes(data)
    with pytest.raises(UserError, match=r"object is not a readable .*: delete it and build again\.$"):
        reader(tmp_path / "object")


FULL = "The disk has run full: free some and give the same command again; nothing finished is lost."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), FULL),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), FULL),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), FULL),
        (KeyboardInterrupt(), "Interrupted: give the same command again to go on."),
    ],
    ids=["disk", "quota", "safetensors", "interrupt"],
)
def test_what_is_no_fault_is_one_sentence_without_traceback(error, said, tmp_path, capfd, monkeypatch):
    def broken(snakemake):
        raise error

    monkeypatch.setattr(job, "Job", broken)
    monkeypatch.setattr(job, "follow_builder", lambda: None)
    monkeypatch.setattr(job, "_redirect", lambda log: None)
    with pytest.raises(SystemExit):
        job.run(SimpleNamespace(log=[tmp_path / "log"]), lambda job: None)
    assert capfd.readouterr() == (f"{said}\n", f"\ndraftmill: {said}\n")


def test_states_of_trained_windows_are_spent_unless_the_pilot_reads_them():
    everything = frozenset(jobs(window_graph(0, 1)))
    graph = window_graph(0, 1, everything)
    assert sorted(graph.spent_states()) == sorted(graph.hidden(shard) for shard in graph.train)
    waiting = window_graph(0, 1, everything - {graph.pilot()})
    assert waiting.hidden(waiting.pilot_shard) not in waiting.spent_states()
    untrained = window_graph(0, 1, everything - {graph.drafter(1, "train.json")})
    assert graph.hidden(graph.windows[1][0]) not in untrained.spent_states()
    assert graph_of(configuration(), everything).spent_states() == []


def test_only_old_unfinished_files_are_removed(tmp_path):
    store = LocalStore(tmp_path)
    store.put("hidden/a.safetensors", b"whole")
    old, young = (tmp_path / "hidden" / f".unfinished-{name}-b.safetensors.part" for name in ("0", "1"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert store.remove_unfinished(3600) == [str(old)]
    assert young.exists()
    assert list(store.list()) == ["hidden/a.safetensors"]
