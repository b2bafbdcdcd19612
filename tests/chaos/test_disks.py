"""Full and read-only disks: real ones, mounted for the test where this user may mount."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftmill import job
from draftmill.progress import Heartbeat
from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def remount(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


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
    said = "The disk has run full: free some and give the same command again; nothing finished is lost."
    assert said in capfd.readouterr().err
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
