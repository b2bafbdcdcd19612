"""A store that vanishes, hangs, holds nothing or has no plan; what history keeps."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from draftmill.dashboard.app import application
from draftmill.dashboard.board import SILENT_S, Board
from draftmill.dashboard.history import History
from draftmill.dashboard.wire import embedded, to_bytes
from draftmill.errors import UserError
from draftmill.state.read import Reader
from draftmill.state.types import GateVerdict, Lane
from draftmill.store.local import LocalStore
from tests.dashboard.conftest import BASE, until
from tests.state.made_store import MadeStore, Memory


class Fragile(Memory):
    """A store that can be made to fail or to hang."""

    def __init__(self, objects: dict[str, tuple[bytes, float]]) -> None:
        super().__init__(objects)
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def list(self, prefix: str = ""):
        self.go.wait(60)
        if self.error is not None:
            raise self.error
        return super().list(prefix)


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
