"""Records: what a finished job says of its bytes, and that nothing depends on them."""

import json
import os
import subprocess

import pytest

from draftmill import layout, records
from draftmill.errors import UserError
from draftmill.records import Content, Record, Work, content_of, git_revision, record_of, recording
from draftmill.store.local import LocalStore
from tests.integrity.stores import Toy, read_records

SHARD, FP = "ab" * 6, "cd" * 6
KEY, NAME = layout.completions(SHARD, FP), f"{SHARD}-{FP}"


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


def run(store, tmp_path, text=b"answers", read=None, fail=False):
    """One job: it reads a file and makes another."""
    made = tmp_path / "made"
    work = Work("generate", NAME, "run-1", {"torch": "2"})
    with recording(store, work, outputs={KEY: made}, inputs=read or {}):
        made.write_bytes(text)
        work.gpus.append("GPU-1")
        if fail:
            raise RuntimeError("no")


def test_a_finished_job_is_recorded_with_the_digests_of_its_own_files(store, tmp_path):
    read = tmp_path / "read"
    read.write_bytes(b"prompts")
    run(store, tmp_path, read={layout.prompts(SHARD): read, layout.prompts("ff" * 6): tmp_path / "absent"})
    (record,) = read_records(store)
    assert record.key == "records/generate/abababababab-cdcdcdcdcdcd.json"
    assert record.outputs == {KEY: content_of(tmp_path / "made")}
    assert record.inputs == {layout.prompts(SHARD): content_of(read)}
    assert (record.run, record.gpus, record.versions) == ("run-1", ["GPU-1"], {"torch": "2"})
    assert record.host
    assert 0 < record.started <= record.finished
    assert record_of(store, KEY) == record
    assert record_of(store, layout.prompts(SHARD)) is None


def test_the_input_is_digested_before_the_job_can_touch_it(store, tmp_path):
    read = tmp_path / "read"
    read.write_bytes(b"before")
    known = content_of(read)
    work = Work("generate", NAME)
    with recording(store, work, outputs={KEY: read}, inputs={layout.prompts(SHARD): read}):
        read.write_bytes(b"after!")
    assert read_records(store)[0].inputs[layout.prompts(SHARD)] == known


def test_large_inputs_go_without_digest(store, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "INPUT_DIGEST_BYTES", 3)
    read = tmp_path / "read"
    read.write_bytes(b"four")
    run(store, tmp_path, read={layout.prompts(SHARD): read})
    assert read_records(store)[0].inputs[layout.prompts(SHARD)] == Content(bytes=4)


def test_a_failed_job_leaves_no_record(store, tmp_path):
    with pytest.raises(RuntimeError):
        run(store, tmp_path, fail=True)
    assert store.list() == {}


def test_a_job_that_is_run_again_replaces_its_record(store, tmp_path):
    for text in (b"one", b"two"):
        run(store, tmp_path, text)
    (record,) = read_records(store)
    assert record.outputs[KEY] == content_of(tmp_path / "made")


def test_a_record_that_cannot_be_written_does_not_spoil_the_job(tmp_path, capsys):
    class Away(LocalStore):
        def put(self, key, data):
            raise UserError("The store is away: wait.")

    run(Away(tmp_path / "store"), tmp_path)
    assert capsys.readouterr().out == "No record of this job was written: The store is away: wait.\n"


def test_damaged_records_are_passed_over(store, tmp_path):
    run(store, tmp_path)
    for name, data in {"a": b"", "b": b"{", "c": b"[]", "d": b'{"stage": 1}', "e": b"\xff"}.items():
        store.put(f"records/generate/{name}.json", data)
    assert [record.name for record in read_records(store)] == [NAME]


def test_fields_of_a_later_release_are_passed_over(store, tmp_path):
    run(store, tmp_path)
    key = layout.record("generate", NAME)
    store.put(key, json.dumps({**json.loads(store.get(key)), "colour": "blue"}).encode())
    assert read_records(store)[0].name == NAME


def test_the_revision_is_that_of_the_checkout_or_nothing(tmp_path, monkeypatch):
    """Marked when files differ from it."""
    package = tmp_path / "draftmill"
    package.mkdir()
    monkeypatch.setattr(records, "__file__", str(package / "records.py"))
    git_revision.cache_clear()
    assert git_revision() == ""
    environment = {
        **os.environ,
        **{f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }

    def git(*arguments):
        found = subprocess.run(["git", "-C", tmp_path, *arguments], env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        return found.stdout.strip()

    (package / "x.py").write_text("1\n")
    git("init")
    git("add", "draftmill/x.py")
    git("commit", "-m", "x")
    git_revision.cache_clear()
    assert git_revision() == git("rev-parse", "HEAD")
    (package / "x.py").write_text("2\n")
    git_revision.cache_clear()
    assert git_revision() == git("rev-parse", "HEAD") + "+"
    git_revision.cache_clear()


def test_every_job_of_a_build_is_recorded_with_all_that_it_made(toy: Toy):
    made = {key for record in read_records(toy.store) for key in record.outputs}
    assert made == set(toy.graph.results()) | {toy.graph.hidden(shard) for shard in toy.graph.shards}


def test_a_record_survives_the_trip_through_json():
    record = Record(stage="train", name="x-0", outputs={"a": Content(bytes=1, sha256="0")}, started=1.5)
    assert records.parse_record(record.model_dump_json().encode()) == record
