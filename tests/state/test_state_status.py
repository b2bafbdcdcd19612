"""`draftmill status` as a person calls it: one screen, JSON, Prometheus, a store that goes away and comes back."""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from draftmill.commands.status import _shown, look
from draftmill.errors import UserError
from draftmill.state.read import Reader
from draftmill.state.screen import screen
from draftmill.state.state import read_state
from draftmill.state.types import Eta
from draftmill.state.words import duration, eta, number, whole_eta
from draftmill.store.base import ObjectInfo
from draftmill.store.local import LocalStore
from tests.core.conftest import is_one_sentence
from tests.state.made_objects import heartbeat
from tests.state.made_store import MadeStore
from tests.state.memory import Memory

WAIT_S = 60.0


def shown(store: Memory, now: float, width: int = 120) -> str:
    console = Console(width=width, record=True, highlight=False, emoji=False, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(read_state(store, clock=lambda: now), width))  # type: ignore[arg-type]
    return console.export_text()


def status(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftmill", "status", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "140"}
    )


# The screen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 140, 250])
def test_one_screen_tells_the_state_at_any_width(made: MadeStore, memory: Memory, width: int) -> None:
    text = shown(memory, made.now, width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert "36/60" in text
    assert "tail -n 40 logs/generate/" in text
    assert "GPU-00000001" in text
    assert len(text.splitlines()) < (45 if width >= 120 else 70)


def test_a_hostile_store_plays_no_tricks_on_a_terminal(made: MadeStore, memory: Memory) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07 [red]x[/red] \u202e evil [/] \x00"
    shard = made.graph.train[-1]
    name = f"{shard}-{made.fp['generate']}"
    fields = {"host": evil, "error": evil * 100, "gpus": [evil]}
    data = heartbeat("generate", name, made.now - 9, made.now, "failed", total=9, unit=evil, **fields)
    memory.put(f"progress/generate/{name}.json", data, made.now)
    text = shown(memory, made.now)
    assert not set(text) & set("\x1b\x07\x00\u202e")
    assert "[red]x[/red]" in text


def test_the_screen_of_an_empty_store_has_dashes_and_a_sentence(made: MadeStore) -> None:
    text = shown(Memory(), made.now)
    assert "no totals" in text
    assert "--configfile" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (9000, "2 h 30 min"),
        (180_000, "2 d 2 h"),
    ],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_and_estimates_in_words() -> None:
    assert [number(value) for value in (None, 0, 12.34, 1234.5, 1_000_000)] == ["–", "0", "12.3", "1,234", "1,000,000"]
    assert eta(Eta(60.0, 90.0, 120.0)) == "1 min to 2 min"
    assert eta(Eta(reason="stalled")) == "unknown: stalled"
    assert (
        whole_eta(Eta(60.0, 90.0, 120.0, leaves_out=("train",))) == "1 min to 2 min, without train (not measured yet)"
    )


# The command ----------------------------------------------------------------------------------------------------------


def test_json_is_the_state(folder: Path, tmp_path: Path) -> None:
    result = status("--store", str(folder), "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
    assert value["format"] == 1
    assert [stage["name"] for stage in value["stages"]][:3] == ["generate", "audit", "extract"]
    assert value["stages"][0]["jobs"]["done"] == 36
    assert value == json.loads(json.dumps(read_state(LocalStore(folder), clock=lambda: value["now"]).to_json()))


def test_prometheus_and_screen_are_printed(folder: Path, tmp_path: Path) -> None:
    assert "draftmill_jobs{" in status("--store", str(folder), "--prometheus", cwd=tmp_path).stdout
    assert "36/60" in status("--store", str(folder), cwd=tmp_path).stdout


def test_status_writes_nothing_into_the_store(folder: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert status("--store", str(folder), cwd=tmp_path).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    "arguments", [["--store", "nowhere"], ["--configfile", "nowhere.yaml"], [], ["--store", "x", "--json", "--watch"]]
)
def test_what_cannot_be_shown_is_one_sentence(arguments: list[str], tmp_path: Path) -> None:
    result = status(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert is_one_sentence(result.stderr.strip())
    assert result.stderr.startswith("draftmill: ")


def test_status_needs_neither_torch_nor_snakemake(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from draftmill.cli import app\n"
        f"app(['status', '--store', {str(folder)!r}], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'snakemake', 'boto3', 'plotly'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


class Watched:
    """A running `draftmill status --watch` whose output can be waited for."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.text = ""

    def wait_for(self, words: str) -> None:
        """Read until the words come that were not there before."""
        self.text, end = "", time.monotonic() + WAIT_S
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while words not in self.text:
                assert time.monotonic() < end, f"{words!r} did not come: {self.text[-2000:]}"
                if selector.select(1.0):
                    data = os.read(self.process.stdout.fileno(), 1 << 16)
                    assert data, f"it ended: {self.text[-2000:]}"
                    self.text += data.decode()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    MadeStore(shards=10, windows=2, kinds=4).write(tmp_path / "store")
    command = [sys.executable, "-m", "draftmill", "status", "--store", "store", "--watch", "--every", "0.2"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, env={**os.environ, "COLUMNS": "140"})
    try:
        yield Watched(process)
    finally:
        process.kill()
        process.wait()


def test_watch_waits_for_a_store_that_vanished_and_ends_with_ctrl_c(watched: Watched, tmp_path: Path) -> None:
    watched.wait_for("120 prompts in 10 shards")
    (tmp_path / "store").rename(tmp_path / "away")
    watched.wait_for("holds nothing")
    (tmp_path / "away").rename(tmp_path / "store")
    watched.wait_for("120 prompts in 10 shards")
    watched.process.send_signal(signal.SIGINT)
    assert watched.process.wait(WAIT_S) == 0


def test_a_reader_goes_on_after_its_store_was_away(folder: Path, tmp_path: Path, made: MadeStore) -> None:
    place = tmp_path / "linked"
    place.symlink_to(folder)
    reader = Reader(LocalStore(place))
    first = reader.snapshot()
    place.unlink()
    assert not reader.snapshot().listing
    place.symlink_to(folder)
    assert reader.snapshot() == first


def test_a_store_that_the_system_refuses_to_read_is_one_sentence(
    made: MadeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(Memory):
        def list(self, prefix: str = "") -> dict[str, ObjectInfo]:
            raise OSError(116, "Stale file handle", "/mnt/store/progress")

    with pytest.raises(UserError) as caught:
        look(Reader(Refused()))
    assert is_one_sentence(caught.value)
    assert "Stale file handle" in str(caught.value)
    assert "Looking again until it is back." in str(_shown(Reader(Refused()), 80))


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_looked_at_is_one_sentence(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = Path.stat

    def stat(path: Path, **given: bool) -> os.stat_result:
        if path.suffix == ".json" and "progress" in path.parts:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, **given)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(UserError) as caught:
        local.list()
    assert is_one_sentence(caught.value)
