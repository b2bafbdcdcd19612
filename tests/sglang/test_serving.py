"""What a job tells of itself before its rows: that it lives while its server loads, and what an earlier try had done."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill import layout
from draftmill.canonical import canonical_json
from draftmill.engines import server_record
from draftmill.gpu import lease
from draftmill.progress import Heartbeat
from draftmill.stages import serving
from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore
from tests.gpu_gate.conftest import fake_driver, host, policy
from tests.sglang.test_managed_servers import Place, place
from tests.waiting import until

__all__ = ["fake_driver", "host", "place", "policy"]
KEY = layout.progress("generate", "s-g")


class Link:
    """In place of the lane: it is there at once, and the shard is written when the test says so."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def begin(self) -> None:
        pass

    def wait(self, servers: Any, beat: Heartbeat) -> None:
        assert self.over.wait(60)


def job_of(place: Place, store: LocalStore) -> Any:
    config = place.config()

    def heartbeat(total: int) -> Heartbeat:
        return Heartbeat(store, KEY, stage="generate", name="s-g", total=total, facts={"gpus": ["GPU-0"]})

    return SimpleNamespace(
        config=config, stage="generate", name="s-g", store=store, heartbeat=heartbeat,
        gpus=lambda spec: place.take(config, server_spec=spec), journal=lambda: Journal(store, "journal/generate/s-g"),
        provenance={"spec": {"target": {"model": "model-1"}}},
    )  # fmt: skip


def told(store: LocalStore) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get(KEY))
    return found


EARLIER = {
    "total": 20,
    "done": 7,
    "useful": 6,
    "rejected": 1,
    "resumed": 2,
    "tokens": 900,
    "started": 1.0,
    "updated": 9.0,
}


@pytest.mark.parametrize(("state", "rows"), [("running", (20, 7, 7, 6, 1)), ("done", (0, 0, 0, None, None))])
def test_a_job_lives_while_its_server_loads_and_its_rows_stand(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, rows: tuple[int | None, ...]
) -> None:
    """Of a try that was done and whose objects were removed since, nothing is left."""
    loaded, store, link = tmp_path / "loaded", LocalStore(tmp_path / "store"), Link()
    place.order(hold=str(loaded))
    store.put(KEY, canonical_json({**EARLIER, "state": state}).encode())
    monkeypatch.setattr(serving, "_link", lambda job: link)
    work = threading.Thread(target=serving.generate_on_servers, args=(job_of(place, store),))
    work.start()
    try:
        until(lambda: told(store)["started"] > 1.0, "the first heartbeat")
        first = told(store)
        until(lambda: told(store)["updated"] > first["updated"], "another one")
        until(lambda: bool(place.records()), "the keeper's record")
        (record,) = place.records()
        folder = server_record.folder(lease.lock_dir(place.policy.lock_dir))
        assert server_record.proven(folder, record.token) is None, "the server has not loaded"
    finally:
        loaded.touch()
        link.over.set()
        work.join()
    names = ("total", "done", "resumed", "useful", "rejected")
    assert tuple(first.get(name) for name in names) == rows
    assert (first["state"], first["tokens"], first["gpus"]) == ("running", 0, ["GPU-0"])
    assert told(store)["state"] == "done"


def test_a_store_that_is_away_for_the_earlier_heartbeat_stops_no_job(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: LocalStore, key: str) -> bytes:
        raise OSError("away")

    job = job_of(place, LocalStore(tmp_path / "store"))
    monkeypatch.setattr(LocalStore, "get", away)
    with serving._heartbeat(job) as beat:
        assert beat.done == 0
