"""Unfinished files: those of the living stay, those of the dead go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.store import writer
from draftmill.store.local import LocalStore, publishing

WRITE = """
import os, signal, sys
from pathlib import Path
from draftmill.store.local import publishing
with publishing(Path(sys.argv[1]) / "hidden/a.safetensors") as temporary:
    temporary.write_bytes(b"half")
    print(temporary, flush=True)
    sys.stdin.read()
"""


def test_the_unfinished_file_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(tmp_path):
    store = LocalStore(tmp_path)
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    path = Path(process.stdout.readline().strip())
    assert (store.remove_unfinished(3600), path.exists()) == ([], True)
    process.kill()
    process.wait()
    assert str(path) in store.remove_unfinished(3600)
    assert list(path.parent.iterdir()) == []


def test_the_unfinished_file_of_a_finished_job_goes_even_if_its_writer_lives(tmp_path):
    store = LocalStore(tmp_path)
    with publishing(store.path("hidden/a-b.safetensors")) as temporary:
        temporary.write_bytes(b"half")
        assert store.remove_unfinished(3600, done=["hidden/b", "hidden/a-c"], dry=True) == []
        assert str(temporary) in store.remove_unfinished(3600, done=["hidden/a-b"], dry=True)
    assert store.remove_unfinished(3600, done=["hidden/a-b"]) == []
    assert list(store.list()) == ["hidden/a-b.safetensors"]


def test_this_process_is_not_dead():
    assert not writer.dead(writer.mark())


def test_another_process_of_the_same_pid_is_not_this_one():
    here, pid, start = writer.mark().rsplit(".", 2)
    assert writer.dead(f"{here}.{pid}.{int(start) - 1}")
    assert writer.dead(f"{here}.{2**22 + 1}.1")


@pytest.mark.parametrize("found", ["", "ab12cd34", "x.y.z.1", "00000000.1.1.1", "..", "a.b"])
def test_what_is_no_mark_of_this_host_is_left_alone(found):
    assert not writer.dead(found)
