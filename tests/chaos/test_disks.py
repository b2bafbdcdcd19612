"""Full and read-only disks: real ones, mounted for the test where this user may mount."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftmill import job, outcomes, snapshot
from draftmill.errors import UserError
from draftmill.outcomes import noted
from draftmill.progress import Heartbeat
from draftmill.prompts import write
from draftmill.snapshot import Seen
from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore
from tests.chaos.disks import fill, remount
from tests.core.builds import make_index
from tests.supervise.test_supervise import Bench

FULL = "The disk has run full: free some and give the same command again; nothing finished is lost."


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """What was told to a supervisor."""
    with outcomes.listening() as place:
        monkeypatch.setenv(outcomes.VARIABLE, str(place))
        yield lambda: [(one.kind, one.sentence) for one in outcomes.read(place)]


def ending(work: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run work as a job's, up to its end with status 1."""
    monkeypatch.setattr(job, "Job", lambda snakemake: work())
    monkeypatch.setattr(job, "follow_builder", lambda: None)
    monkeypatch.setattr(job, "_redirect", lambda log: None)
    with pytest.raises(SystemExit):
        job.run(SimpleNamespace(log=[tmp_path / "log"]), lambda job: None)


def test_a_full_disk_ends_a_job_with_a_sentence_and_costs_no_flushed_row(disk, tmp_path, monkeypatch, capfd):
    journal = Journal(LocalStore(disk), "journal/generate/a")
    flushed = []

    def work() -> None:
        for number in range(10_000):
            journal.append([{"row": number, "text": "x" * 1000}])
            flushed.append(number)

    ending(work, tmp_path, monkeypatch)
    assert FULL in capfd.readouterr().err
    assert flushed
    again = Journal(LocalStore(disk), "journal/generate/a")
    assert [row["row"] for row in again.rows()] == flushed
    remount(disk, "size=1m")
    again.append([{"row": -1}])
    assert again.rows()[-1] == {"row": -1}
    assert not list(disk.rglob(".unfinished*"))


def test_heartbeats_do_not_fail_a_job_on_a_full_or_read_only_disk(disk):
    store = LocalStore(disk)
    with pytest.raises(OSError, match="No space left"):
        store.put("filler", b"x" * 2**20)
    (disk / "filler").write_bytes(b"x" * (2**18 - 2**12))
    for option in ("size=256k", "ro"):
        remount(disk, option)
        with Heartbeat(store, "progress/a.json", stage="generate", name="a", total=2) as beat:
            beat.advance(1)
    remount(disk, "rw")


def test_a_read_only_disk_ends_a_job_with_a_sentence(disk, tmp_path, monkeypatch, capfd):
    remount(disk, "ro")
    ending(lambda: LocalStore(disk).put("hidden/a.safetensors", b"x"), tmp_path, monkeypatch)
    assert f"draftmill: {disk}/hidden cannot be written or read (Read-only file system): mend" in capfd.readouterr().err
    remount(disk, "rw")


def test_a_folder_that_may_not_be_written_ends_a_job_with_a_sentence(tmp_path, monkeypatch, capfd):
    def work() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/data/x")

    ending(work, tmp_path, monkeypatch)
    assert "draftmill: /data/x cannot be written or read (Permission denied): mend its" in capfd.readouterr().err


# Outside of jobs: when a build starts, and in its supervisor ----------------------------------------------------------


def test_a_full_disk_at_the_build_s_start_is_a_sentence_and_told(disk, told):
    fill(disk)
    with pytest.raises(UserError) as refused, noted():
        snapshot.save(disk, "run", Seen(make_index(), frozenset(f"eval/{number}.json" for number in range(1000))))
    assert (refused.value.kind, str(refused.value)) == ("full", FULL)
    assert told() == [("full", FULL)]


def test_a_read_only_disk_at_the_build_s_start_is_a_sentence_and_told(disk, told):
    remount(disk, "ro")
    with (
        pytest.raises(UserError, match=r"plans cannot be written or read \(Read-only file system\): mend") as refused,
        noted(),
    ):
        snapshot.save(disk, "run", Seen(make_index(), frozenset()))
    remount(disk, "rw")
    assert told() == [("full", str(refused.value))]


def test_a_full_disk_of_temporary_files_at_the_build_s_start_is_a_sentence_and_told(disk, told, tmp_path, monkeypatch):
    """Prompt shards on their way to S3 lie there."""
    fill(disk)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(disk)])
    places = write._places(SimpleNamespace())  # of any store but a local one
    with pytest.raises(UserError, match="No folder for temporary files can be written") as refused, noted(), places:
        pass
    assert told() == [("full", str(refused.value))]


def test_the_log_of_a_job_on_a_full_disk_costs_no_sentence(disk, tmp_path, capfd):
    (disk / "log").touch()
    fill(disk)
    script = (
        "from types import SimpleNamespace\nimport errno, sys\nfrom draftmill import job\n"
        "job.Job = lambda snakemake: print('x' * 100_000, flush=True)\n"
        "job.run(SimpleNamespace(log=[sys.argv[1]]), lambda job: None)\n"
    )
    for log in ("log", "folder/log"):  # written into, and not even made
        result = subprocess.run(
            [sys.executable, "-c", script, str(disk / log)], capture_output=True, text=True, check=False
        )
        assert result.returncode != 0
        assert f"draftmill: {FULL}" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", ["size=256k", "ro"])
def test_a_supervisor_on_a_disk_that_takes_nothing_hears_why(disk, tmp_path, monkeypatch, option):
    bench = Bench(tmp_path, monkeypatch)
    fill(disk)
    remount(disk, option)
    monkeypatch.chdir(disk)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    # The first Snakemake tells why it ended, the second only fails: its own files lie there too.
    assert bench.run({"status": 1, "tell": [["full", "Told."]]}) == 1
    assert bench.run({"status": 1}) == 1
    remount(disk, "rw")
    why = FULL if option != "ro" else f"{disk} cannot be written or read (Read-only file system): mend its"
    assert len(bench.starts) == 2
    assert bench.said[0] == "Not started again, because a person must act: Told."
    assert bench.said[1].startswith(f"Not started again, because a person must act: {why}")


def test_a_disk_that_takes_files_is_no_reason(disk):
    assert outcomes.refusal(disk) == ""
    assert outcomes.refusal(disk / "absent") == ""
    assert list(disk.iterdir()) == []
