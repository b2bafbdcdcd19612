"""A store that vanishes, hangs, holds nothing or has no plan; what history keeps."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from draftmill import layout
from draftmill.dashboard.app import application
from draftmill.dashboard.board import SILENT_S, Board
from draftmill.dashboard.history import History
from draftmill.dashboard.wire import embedded, to_bytes
from draftmill.errors import UserError
from draftmill.state.read import Reader
from draftmill.state.types import GateVerdict, Lane
from draftmill.store.local import LocalStore
from tests.dashboard.conftest import BASE
from tests.state.made_store import MadeStore
from tests.state.memory import Memory
from tests.waiting import until


class Fragile(Memory):
    """A store that can be made to fail or to hang."""

    def __init__(self, objects: dict[str, tuple[bytes, float]]) -> None:
        super().__init__(objects)
        self.error: Exception | None = None
        self.asked: list[str] = []
        self.go = threading.Event()
        self.go.set()

    def list(self, prefix: str = ""):
        self.answer()
        return super().list(prefix)

    def info(self, key: str):
        self.answer()
        self.asked.append(key)
        return super().info(key)

    def answer(self) -> None:
        self.go.wait(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def fragile(made: MadeStore) -> Fragile:
    return Fragile(made.objects)


@pytest.mark.parametrize("error", [UserError("The store is away."), OSError("I/O error"), RuntimeError("a bug")])
def test_a_store_that_cannot_be_read_is_told_with_the_time_and_comes_back(fragile: Fragile, error: Exception) -> None:
    times = iter(range(1_800_000_000, 1_900_000_000))
    board = Board(Reader(fragile), clock=lambda: float(next(times)))
    board.look()
    kept = board.view
    fragile.error = error
    board.look()
    first = board.problem()
    board.look()
    second = board.problem()
    assert first is not None
    assert second is not None
    assert str(error) in first.message
    assert first.since == second.since, "since when it is away, not since the last try"
    assert board.view is kept, "what was read before stays"
    fragile.error = None
    board.look()
    assert board.problem() is None
    assert board.view is not None
    assert board.view.number > kept.number


def test_a_store_that_hangs_is_told_and_pages_are_answered_meanwhile(fragile: Fragile) -> None:
    now = [1_800_000_000.0]
    board = Board(Reader(fragile), clock=lambda: now[0])
    with TestClient(application(board), base_url=BASE) as client:
        until(lambda: board.view is not None)
        fragile.go.clear()
        until(lambda: board._looking_since is not None)
        now[0] += SILENT_S + 1
        until(lambda: board.problem() is not None)
        found = client.get("/api/state").json()
        assert "does not answer" in found["problem"]["message"]
        assert found["state"]["stages"]
        assert client.get("/metrics").status_code == 503
        fragile.go.set()
        until(lambda: board.problem() is None)


def test_a_folder_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    MadeStore(shards=10).write(tmp_path / "store")
    board = Board(Reader(LocalStore(tmp_path / "store")))
    board.look()
    (tmp_path / "store").rename(tmp_path / "away")
    board.look()
    assert board.problem() is not None
    assert "any more" in board.problem().message
    (tmp_path / "away").rename(tmp_path / "store")
    board.look()
    assert board.problem() is None


def test_a_store_that_is_empty_is_waited_for(tmp_path: Path) -> None:
    board = Board(Reader(LocalStore(tmp_path / "none")))
    with TestClient(application(board), base_url=BASE) as client:
        until(lambda: board.problem() is not None)
        assert client.get("/").status_code == 200
        assert client.get("/api/state").json()["state"] is None
        assert client.get("/api/quality").status_code == 503
        board.close()


def test_a_store_without_a_plan_shows_lanes_and_rows(made: MadeStore) -> None:
    objects = {key: one for key, one in made.objects.items() if key != "progress/build.json"}
    board = Board(Reader(Memory(objects)), clock=lambda: made.now)
    with TestClient(application(board), base_url=BASE) as client:
        until(lambda: board.view is not None)
        assert client.get("/api/state").json()["state"]["notes"]
        assert client.get("/api/lanes?hours=1").json()["lanes"]
        assert client.get("/api/samples?kind=random").json()["rows"]
        for part in ("quality", "shards", "training"):
            assert client.get(f"/api/{part}").json() is None


def test_the_revision_stays_while_only_heartbeats_change(tmp_path: Path) -> None:
    made = MadeStore(shards=10)
    store = LocalStore(made.write(tmp_path))
    board = Board(Reader(store))
    board.look()
    assert board.view is not None
    before = board.view
    made.tick(store)
    board.look()
    assert board.view.revision == before.revision
    assert board.view.number == before.number + 1
    store.put("eval/0123456789ab.json", b"{}")
    board.look()
    assert board.view.revision == before.revision + 1


def rows_done(board: Board) -> int:
    assert board.view is not None
    return sum(stage.rows.done for stage in board.view.state.stages)


def test_a_glance_shows_a_new_heartbeat_and_lists_nothing() -> None:
    made = MadeStore(shards=20)
    fragile = Fragile(made.objects)
    board = Board(Reader(fragile), clock=lambda: made.now)
    board.look()
    before, rows = board.view, rows_done(board)
    assert before is not None
    board.glance()
    assert board.view is before, "nothing changed"
    ticked = made.tick(fragile)
    fragile.put("eval/fedcba987654.json", b"{}")
    gets = fragile.gets
    running = [layout.progress(*job) for job, beat in before.snapshot.beats.items() if beat.state == "running"]
    fragile.asked.clear()
    board.glance()
    assert (board.view.number, board.view.revision) == (before.number + 1, before.revision)
    assert rows_done(board) == rows + 1
    assert fragile.gets == gets + 1
    assert "eval/fedcba987654.json" not in board.view.snapshot.listing, "that is for the next look"
    assert len(fragile.asked) == len(running) - 1, "of the one that was killed an hour ago nothing is to be expected"
    seen, beat = board.view, json.loads(fragile.get(ticked))
    fragile.put(ticked, json.dumps({**beat, "state": "done"}).encode(), at=made.now)
    board.glance()
    assert board.view is seen, "its outputs are not listed yet"


def test_a_heartbeat_that_is_gone_or_a_store_that_is_away_is_for_the_next_look(
    made: MadeStore, fragile: Fragile
) -> None:
    board = Board(Reader(fragile), clock=lambda: made.now)
    board.glance()
    assert board.view is None
    board.look()
    before = board.view
    assert before is not None
    key = made.tick(fragile)
    fragile.error = OSError("I/O error")
    board.glance()
    assert board.view is before
    assert board.problem() is None
    fragile.error = None
    fragile.objects.pop(key)
    board.glance()
    assert board.view is before


def test_between_two_looks_at_s3_heartbeats_are_seen_and_a_silence_is_told(made: MadeStore, fragile: Fragile) -> None:
    now = [made.now]
    board = Board(Reader(fragile), remote=True, clock=lambda: now[0])
    board._pause = 3600.0
    with TestClient(application(board), base_url=BASE) as client:
        until(lambda: board.view is not None)
        fragile.times[made.tick(fragile)] = made.now
        until(lambda: board.view is not None and board.view.number == 2)
        fragile.go.clear()
        until(lambda: board._looking_since is not None)
        now[0] += SILENT_S + 1
        until(lambda: board.problem() is not None)
        assert "does not answer" in client.get("/api/state").json()["problem"]["message"]
        fragile.go.set()
        until(lambda: board.problem() is None)


def lane(verdict: str, memory: int) -> Lane:
    gate = GateVerdict(verdict, None, ())
    return Lane("g", "g", "h", 1, "running", "generate", "n", "s", "rows", 1, 2, 3.0, 0.0, None, None, gate, memory)


def test_history_keeps_changes_and_is_bounded() -> None:
    history = History()
    for second in range(20_000):
        history.add([lane("busy" if second // 10_000 else "free", second)], float(second))
    seen = history.to_json(["g", "unknown"])["g"]
    assert [change["verdict"] for change in seen["changes"]] == ["free", "busy"]
    assert len(seen["memory"]) <= 360
    assert seen["memory"][-1][0] > 19_980


def test_history_forgets_lanes_that_nobody_has_seen_for_an_hour() -> None:
    history = History()
    for process in range(100):
        history.add([replace(lane("free", 1), id=f"h/{process}")], 100.0 * process)
    known = history.to_json(f"h/{process}" for process in range(100))
    assert list(known) == [f"h/{process}" for process in range(64, 100)]


def test_json_can_always_be_parsed_and_never_ends_a_script() -> None:
    hostile = {"a": float("nan"), "b": [float("inf"), "</script><!--", "\ud800", "\x00", "\u2028"]}
    text = embedded(hostile)
    assert "<" not in text
    assert to_bytes(hostile).isascii()
    assert "NaN" not in text
    assert "Infinity" not in text
