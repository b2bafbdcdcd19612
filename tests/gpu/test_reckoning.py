"""What the script for GPU hosts counts as a kill, as a loss, and as a step that is over; without a GPU."""

import argparse
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.generate import run
from benchmarks.generate.project import GpuProject, Host
from tests.gpu import generate_kills, real_generate
from tests.gpu.generate_kills import Diary, Kills, bound, judge
from tests.gpu.visit import NotFinal, StepFailed, Unfinished, Visit, add_arguments

FLUSH_ROWS, IN_FLIGHT, SHARDS = 256, 128, 8


@pytest.fixture
def visit(tmp_path: Path) -> Any:
    (tmp_path / "prompts.json").write_text("[]")

    def make(*options: str) -> Visit:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        words = [str(tmp_path / "out"), "--model", "m", "--prompts", str(tmp_path / "prompts.json")]
        return Visit(parser.parse_args([*words, "--work", str(tmp_path / "work"), *options]))

    return make


class Patient(Kills):
    """Kills whose victims and build are made up: `victims` says whom each look finds, `flow` whether rows come."""

    def __init__(self, victims: list[int | None], flow: list[bool]) -> None:
        self.victims, self.flow, self.rng, self.builder = victims, flow, random.Random(0), None
        self.ended = False

    def start(self) -> None:
        pass

    def rows(self) -> int:
        return 5

    def over(self) -> bool:
        return self.ended

    def flowing(self, limit_s: float) -> bool:
        return self.flow.pop(0)

    def victim(self, kind: str) -> int | None:
        return self.victims.pop(0)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_kills.time, "sleep", lambda seconds: None)


def test_a_kill_that_met_nobody_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        if pid == 7:
            raise ProcessLookupError
        killed.append(pid)

    monkeypatch.setattr(generate_kills.os, "kill", kill)
    found = Patient([None, 7, 8], [True] * 4).kill("job")
    assert killed == [8]
    assert found["resumed"]
    with pytest.raises(RuntimeError, match="no job was there to be killed"):
        Patient([None] * 5, [True] * 5).kill("job")
    with pytest.raises(NotFinal, match="over before all kills"):
        Patient([8], [False]).kill("job")


def test_as_many_servers_are_killed_as_was_asked_for(visit: Any) -> None:
    diary = Diary(visit())
    assert {kind: diary.kinds.count(kind) for kind in set(diary.kinds)} == {
        "job": 3, "server": 3, "snakemake": 3, "keeper": 1
    }  # fmt: skip
    diary.done.append({"kind": diary.kinds[0], "resumed": True})
    diary.stops += 1
    diary.save()
    again = Diary(visit())
    assert (again.kinds, again.left, again.stops) == (diary.kinds, diary.kinds[1:], 1)


def reckoning(visit: Any, answered: int, **changes: Any) -> None:
    diary = Diary(visit())
    diary.done = [{"kind": kind, "resumed": True} for kind in diary.kinds]
    diary.tries = {"a": 5}
    found = {"missing": 0, "twice": 0, "strange": 0, "completed": 1000, "rejected": 2, "answered_by_servers": answered}
    for name, value in changes.items():
        if name == "done":
            diary.done = value
        found[name] = value
    judge(found, diary, bound(diary, SHARDS, FLUSH_ROWS, IN_FLIGHT))


def test_the_reckoning_holds_answers_against_what_kills_may_cost(visit: Any) -> None:
    lost = 3 * (FLUSH_ROWS + IN_FLIGHT) + 4 * IN_FLIGHT
    asides = 5 + 4 * (1 + 3 + 4) + 2 * (SHARDS + 3)
    reckoning(visit, 1000)
    reckoning(visit, 1000 + lost + asides)
    with pytest.raises(RuntimeError, match=f"{1001 + lost + asides} rows were answered for 1000"):
        reckoning(visit, 1001 + lost + asides)
    with pytest.raises(RuntimeError, match="no bound is known"):
        reckoning(visit, 0)
    with pytest.raises(RuntimeError, match='"missing": 1'):
        reckoning(visit, 1000, missing=1)
    with pytest.raises(RuntimeError, match="kills that are left"):
        reckoning(visit, 1000, done=[])
    diary = Diary(visit())
    with pytest.raises(RuntimeError, match="nothing went on"):
        reckoning(visit, 1000, done=[{"kind": kind, "resumed": False} for kind in diary.kinds])


def test_a_step_that_passed_is_not_made_again_and_one_that_has_no_time_is_kept(visit: Any, tmp_path: Path) -> None:
    first = visit("--resume")
    assert first.step("build", lambda: 7, 60) == 7
    with pytest.raises(StepFailed):
        first.step("bare", lambda: 1 // 0, 60)
    again = visit("--resume")
    assert again.step("build", lambda: 8, 60) == 7
    assert again.step("bare", lambda: 9, 60) == 9
    assert again.step("server_start", lambda: 1, 60) == 1
    assert again.step("server_start", lambda: 2, 60) == 2, "a server is gone with the call that started it"
    short = visit("--resume", "--minutes", "1")
    with pytest.raises(Unfinished):
        short.step("idle", lambda: 1, 60)
    assert "idle" not in [step["step"] for step in json.loads((tmp_path / "out/generate.json").read_text())["steps"]]
    assert visit("--minutes", "1").step("idle", lambda: 1, 60) == 1


def test_what_is_broken_off_in_the_middle_is_left_to_the_next_call(visit: Any) -> None:
    def half() -> None:
        raise Unfinished("kills")

    found = visit("--resume")
    with pytest.raises(Unfinished):
        found.step("kills", half, 60)
    assert found.steps[-1]["ok"] is None
    assert visit("--resume").step("kills", lambda: [1], 60) == [1]


@pytest.mark.parametrize(
    ("fault", "options", "made"), [(NotFinal, ["--resume"], 2), (RuntimeError, ["--resume"], 1), (NotFinal, [], 1)]
)
def test_kills_for_which_the_build_was_over_too_soon_are_made_again(
    visit: Any, monkeypatch: pytest.MonkeyPatch, fault: type[Exception], options: list[str], made: int
) -> None:
    tries: list[str] = []

    def soon_over() -> None:
        tries.append("kills")
        if len(tries) == 1:
            raise fault("the build was over before all kills were made")

    args = visit(*options).args
    monkeypatch.setattr(real_generate.signal, "signal", lambda *_: None)
    monkeypatch.setattr(Visit, "clear", lambda self: {"verdict": "free"})
    monkeypatch.setattr(real_generate, "STEPS", {"kills": lambda found: found.step("kills", soon_over, 60)})
    args.steps = "kills"
    assert real_generate.visit(args) == 1
    args.resume = True
    assert real_generate.visit(args) == (0 if made == 2 else 1)
    assert len(tries) == made


def test_a_diary_that_was_forgotten_is_new(visit: Any) -> None:
    diary = Diary(visit())
    assert diary.new
    diary.save()
    assert not Diary(visit()).new
    diary.forget()
    assert Diary(visit()).new


def test_the_logs_of_a_build_that_was_broken_off_do_not_begin_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, forgotten, seen = GpuProject(tmp_path, Host(), "m", []), list[str](), list[str]()
    logs, shards = tmp_path / "logs/generate", ["s1", "s2", "s3", "s4"]
    logs.mkdir(parents=True)
    for name in ("s1", "s2", "pilot"):
        (logs / f"{name}.log").touch()
    (tmp_path / "measured.json").write_text(json.dumps(shards))
    graph = SimpleNamespace(shards=shards, pilot_shard="pilot", wanted=lambda *_: True, completions=str)

    def build(*_: Any, **__: Any) -> float:
        seen.extend(path.name for path in logs.iterdir())
        raise RuntimeError("that is enough")

    monkeypatch.setattr(project, "forget", forgotten.extend)
    monkeypatch.setattr(project, "graph", lambda: graph)
    monkeypatch.setattr(project, "journalled", lambda *_: 0)
    monkeypatch.setattr(project, "build", build)
    with pytest.raises(RuntimeError, match="that is enough"):
        run.build(project, tmp_path, samples=1)
    assert forgotten == shards
    assert seen == ["pilot.log"]
