"""Reading a store: what crashes, torn objects, strangers and clocks that differ leave behind; and how little is fetched."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest

from draftmill import layout
from draftmill.build_record import announce, parse_record
from draftmill.dashboard.board import Board
from draftmill.dashboard.samples import Query, Samples
from draftmill.dashboard.tables import Tables
from draftmill.state.cache import Cache, cache_file
from draftmill.state.chosen import plan_for
from draftmill.state.read import Reader
from draftmill.state.state import read_state, state_of
from draftmill.store.local import LocalStore
from tests.core.conftest import is_one_sentence
from tests.state.made_objects import heartbeat
from tests.state.made_store import GPUS, MadeStore
from tests.state.memory import Memory


def waiting(made: MadeStore, place: int = 1) -> tuple[str, str]:
    """A shard that nobody has begun, and the key of the heartbeat of its generate job."""
    shard = made.graph.train[-place]
    return shard, layout.progress("generate", f"{shard}-{made.fp['generate']}")


def beat(
    made: MadeStore, shard: str, ago: float, state: str = "running", ahead: float = 0.0, **fields: object
) -> bytes:
    name = f"{shard}-{made.fp['generate']}"
    at = made.now - ago + ahead
    return heartbeat("generate", name, at - 50, at, state, total=12, done=4, tokens=400, host="crashed", **fields)


@pytest.mark.parametrize(
    ("ago", "state", "lane"), [(5, "running", "running"), (120, "stale", "stale"), (5000, "interrupted", "lost")]
)
def test_a_killed_job_is_known_by_its_silence(
    made: MadeStore, memory: Memory, ago: float, state: str, lane: str
) -> None:
    before = read_state(memory, clock=lambda: made.now).stage("generate").jobs
    shard, key = waiting(made)
    memory.put(key, beat(made, shard, ago), made.now - ago)
    found = read_state(memory, clock=lambda: made.now)
    jobs = found.stage("generate").jobs
    counted = "running" if state == "stale" else state
    assert getattr(jobs, counted) == getattr(before, counted) + 1
    assert jobs.stale == before.stale + (state == "stale")
    assert [one.state for one in found.lanes if one.host == "crashed"] == [lane]


def test_a_claim_keeps_a_silent_job_alive_and_shows_one_that_has_no_heartbeat(made: MadeStore, memory: Memory) -> None:
    shard, key = waiting(made)
    memory.put(key, beat(made, shard, 5000), made.now - 5000)
    before = read_state(memory, clock=lambda: made.now)
    claim = {"host": "h", "run": "r", "expires": made.now + 60, "owner": "o", "holder": {}}
    memory.put(key.replace("progress/", "claims/"), json.dumps(claim).encode(), made.now)
    audited = made.graph.train[-2]
    memory.put(f"claims/audit/{audited}-{made.fp['audit']}.json", json.dumps(claim).encode(), made.now)
    after = read_state(memory, clock=lambda: made.now)
    assert after.stage("generate").jobs.stale == before.stage("generate").jobs.stale + 1
    assert after.stage("audit").jobs.running == before.stage("audit").jobs.running + 1


def test_a_heartbeat_from_a_clock_that_is_ahead_is_timed_by_the_store(made: MadeStore, memory: Memory) -> None:
    shard, key = waiting(made)
    memory.put(key, beat(made, shard, 5, ahead=7200.0), made.now - 5)
    state = read_state(memory, clock=lambda: made.now)
    lane = next(lane for lane in state.lanes if lane.host == "crashed")
    assert (lane.state, lane.age, lane.clock_skew) == ("running", 5.0, 7200.0)
    assert "The clock of crashed is 7200 s ahead of the store's: set it right." in state.notes
    rate = state.stage("generate").token_rate
    assert rate.minute == pytest.approx(
        read_state(_without(memory, key), clock=lambda: made.now).stage("generate").token_rate.minute + 8
    )


def _without(store: Memory, key: str) -> Memory:
    del store.objects[key]
    return store


def test_a_reader_whose_clock_is_behind_sees_no_heartbeat_of_the_future(made: MadeStore, memory: Memory) -> None:
    state = read_state(memory, clock=lambda: made.now - 100_000)
    assert all(lane.age >= 0 for lane in state.lanes)
    assert state.stage("generate").jobs.running > 0
    assert state.now == max(memory.times.values())


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b"\xff\xfe", b'{"done": -1}', b'{"started": "yesterday"}', b'{"done": NaN}', b"[" * 100_000],
)
def test_an_unreadable_heartbeat_is_said_and_counts_nothing(made: MadeStore, memory: Memory, data: bytes) -> None:
    before = read_state(memory, clock=lambda: made.now)
    _, key = waiting(made)
    memory.put(key, data, made.now)
    after = read_state(memory, clock=lambda: made.now)
    assert after.stages == before.stages
    assert any(key in note and is_one_sentence(note) for note in after.notes)


def test_strangers_in_the_store_are_passed_over(made: MadeStore, memory: Memory) -> None:
    before = read_state(memory, clock=lambda: made.now)
    for key in (
        "progress/generate/../../etc/passwd.json", "progress/<b>/x.json", "progress/generate/a b.json", "records/x.json",
        "audits/failed/readme.json", "audits/zzz.json", "eval/x.json", "claims/generate/\u202e.json", ".DS_Store",
    ):  # fmt: skip
        memory.put(key, b'{"state": "running", "verdict": "pass", "by_source": {}}', made.now)
    assert read_state(memory, clock=lambda: made.now) == before


def test_an_empty_store_has_a_state(made: MadeStore) -> None:
    state = read_state(Memory(), clock=lambda: made.now)
    assert (state.lanes, state.failures, state.finished, state.plan.basis) == ((), (), False, None)
    assert all(stage.jobs.wanted is None and stage.jobs.done == 0 for stage in state.stages)
    assert all(is_one_sentence(note) for note in state.notes)
    json.dumps(state.to_json(), allow_nan=False)


def test_without_the_builds_record_what_is_there_is_counted(made: MadeStore, memory: Memory) -> None:
    del memory.objects[layout.BUILD]
    state = read_state(memory, clock=lambda: made.now)
    jobs = state.stage("generate").jobs
    old = sum(place % 10 == 3 for place in range(len(made.generated)))
    assert (jobs.wanted, jobs.done) == (None, len(made.generated) + old)
    assert state.eta.reason == "it is not known what is wanted"
    assert len(state.lanes) == made.lanes + 2


@pytest.mark.parametrize("data", [b"", b"{}", b'{"format": 99}', b"nonsense"])
def test_a_damaged_record_of_the_build_is_said(made: MadeStore, memory: Memory, data: bytes) -> None:
    memory.put(layout.BUILD, data, made.now)
    state = read_state(memory, clock=lambda: made.now)
    assert state.plan.basis is None
    assert any(layout.BUILD in note and is_one_sentence(note) for note in state.notes)


def test_a_record_of_keys_that_this_version_does_not_know_is_said(made: MadeStore, memory: Memory) -> None:
    value = json.loads(memory.objects[layout.BUILD])
    value["config"]["invented"] = 1
    memory.put(layout.BUILD, json.dumps(value).encode(), made.now)
    state = read_state(memory, clock=lambda: made.now)
    assert state.plan.basis is None
    assert any("this version cannot read" in note for note in state.notes)


def test_a_record_of_a_build_holds_no_secret_of_its_servers(made: MadeStore) -> None:
    store = Memory()
    announce(store, made.graph, "r", clock=lambda: 5.0)
    record = parse_record(store.objects[layout.BUILD])
    assert record is not None
    assert (record.run, record.started, record.fingerprints) == ("r", 5.0, dict(made.fp))
    assert "sglang" not in record.config["generate"]


def test_an_index_that_changed_since_the_start_is_said(made: MadeStore, memory: Memory) -> None:
    index = json.loads(memory.objects[layout.INDEX])
    index["shards"] = index["shards"][1:]
    memory.put(layout.INDEX, json.dumps(index).encode(), made.now)
    state = read_state(memory, clock=lambda: made.now)
    assert state.plan.shards == made.shards - 1
    assert "The prompt index has changed since the build was started." in state.notes


def test_work_that_is_finished_but_not_published_is_lag(made: MadeStore, memory: Memory) -> None:
    shard, key = waiting(made)
    memory.put(key, beat(made, shard, 30, "done"), made.now - 30)
    lag = read_state(memory, clock=lambda: made.now).lag
    assert (lag.jobs, lag.oldest) == (1, 30.0)
    assert read_state(memory, clock=lambda: made.now + 5000).lag.jobs == 0


def test_failures_say_what_where_and_how_to_see_more(made: MadeStore, memory: Memory) -> None:
    shard, key = waiting(made)
    memory.put(key, beat(made, shard, 3, "failed", error="It broke."), made.now - 3)
    state = read_state(memory, clock=lambda: made.now)
    newest = state.failures[0]
    assert (newest.stage, newest.subject, newest.message, newest.host) == ("generate", shard, "It broke.", "crashed")
    assert (newest.log, newest.command) == (f"logs/generate/{shard}.log", f"tail -n 40 logs/generate/{shard}.log")
    audits = [failure for failure in state.failures if failure.stage == "audit"]
    assert len(audits) == made.broken_audits
    assert all("loss tokens" in failure.message and failure.page in memory.objects for failure in audits)


def test_a_failure_that_succeeded_since_is_none(made: MadeStore, memory: Memory) -> None:
    shard, key = waiting(made)
    memory.put(key, beat(made, shard, 3, "failed"), made.now - 3)
    for output in made.graph.outputs("generate", shard):
        memory.put(output, b"", made.now)
    assert shard not in {failure.subject for failure in read_state(memory, clock=lambda: made.now).failures}


# Lanes ----------------------------------------------------------------------------------------------------------------


def test_a_gpu_is_one_lane_with_the_job_that_is_at_work(made: MadeStore, memory: Memory) -> None:
    shard, key = waiting(made)
    data = beat(
        made, shard, 2, gpus=[GPUS[0], "GPU-extra"], gate={"verdict": "free", "reasons": ["x"], "checked_at": 1.0}
    )
    memory.put(key, data, made.now - 2)
    lanes = {lane.id: lane for lane in read_state(memory, clock=lambda: made.now).lanes}
    assert lanes["GPU-extra"].subject == shard
    assert lanes["GPU-extra"].gate is not None
    assert lanes["GPU-extra"].gate.reasons == ("x",)
    assert lanes[GPUS[0]].state == "running"
    assert lanes[GPUS[1]].server is not None
    assert lanes[GPUS[made.lanes]].state == "stale"
    assert lanes[GPUS[made.lanes + 1]].state == "lost"


def test_a_job_at_work_comes_before_one_that_ended_later_on_its_gpu(made: MadeStore, memory: Memory) -> None:
    shard, key = waiting(made)
    memory.put(key, beat(made, shard, 8, gpus=["GPU-shared"]), made.now - 8)
    ended, other = waiting(made, 2)
    memory.put(other, beat(made, ended, 1, "done", gpus=["GPU-shared"]), made.now - 1)
    lanes = {lane.id: lane for lane in read_state(memory, clock=lambda: made.now).lanes}
    assert (lanes["GPU-shared"].subject, lanes["GPU-shared"].state) == (shard, "running")


# Fetching -------------------------------------------------------------------------------------------------------------


def test_a_second_look_fetches_only_what_changed(made: MadeStore, memory: Memory) -> None:
    reader = Reader(memory)
    first = state_of(reader.snapshot(), made.now)
    gets = memory.gets
    assert state_of(reader.snapshot(), made.now) == first
    assert memory.gets == gets
    shard, key = waiting(made)
    memory.put(key, beat(made, shard, 0), made.now)
    reader.snapshot()
    assert memory.gets == gets + 1


def test_a_heartbeat_that_went_on_is_read_again(made: MadeStore, memory: Memory) -> None:
    reader = Reader(memory)
    before = state_of(reader.snapshot(), made.now).stage("generate")
    made.tick(memory)  # type: ignore[arg-type]
    after = state_of(reader.snapshot(), made.now).stage("generate")
    assert (after.rows.done, after.tokens - before.tokens) == (before.rows.done + 1, 1800)


def test_what_was_read_is_kept_between_calls(made: MadeStore, local: LocalStore, tmp_path: Path) -> None:
    file = cache_file(tmp_path, local.url)
    first = Reader(local, cache=file)
    seen = state_of(first.snapshot(), made.now)
    second = Reader(local, cache=file)
    assert state_of(second.snapshot(), made.now) == seen
    assert first.fetched > 100
    assert second.fetched == 0


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 0, "held": {}}', '{"format": 1, "held": {"a": 3}}'])
def test_a_damaged_copy_is_read_again(made: MadeStore, local: LocalStore, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "copy.json"
    file.write_text(damage)
    assert state_of(Reader(local, cache=file).snapshot(), made.now) == state_of(Reader(local).snapshot(), made.now)


def test_a_folder_that_cannot_hold_the_copy_is_no_fault(local: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Reader(local, cache=tmp_path / "file/copy.json").snapshot().beats


class Barred(Memory):
    """A store of which some objects cannot be read."""

    barred: tuple[str, ...] = ()

    def get(self, key: str) -> bytes:
        if key in self.barred:
            raise PermissionError(13, "Permission denied", key)
        return super().get(key)


def test_one_object_that_cannot_be_read_is_said_until_it_can(made: MadeStore) -> None:
    store = Barred(made.objects)
    whole = read_state(store, clock=lambda: made.now)
    _, key = waiting(made)
    store.put(key, beat(made, made.graph.train[-1], 3), made.now)
    reader = Reader(store)
    store.barred = (key,)
    barred = state_of(reader.snapshot(), made.now)
    assert barred.stages == whole.stages
    assert any(key in note and is_one_sentence(note) for note in barred.notes)
    store.barred = ()
    assert state_of(reader.snapshot(), made.now) == read_state(store, clock=lambda: made.now) != barred


def test_a_cache_is_saved_while_another_thread_fills_it(tmp_path: Path) -> None:
    store = Memory({f"records/{number}": (b"{}", 0.0) for number in range(4000)})
    cache = Cache(store, tmp_path / "copy.json")  # type: ignore[arg-type]
    listing = store.list()
    keys = sorted(listing)
    faults: list[BaseException] = []

    def fill() -> None:
        try:
            for start in range(0, len(keys), 40):
                cache.values(keys[start : start + 40], listing, len)
        except BaseException as error:
            faults.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=fill) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            cache.save()
            cache.forget_all_but({key: listing[key] for key in keys[::2]})
    finally:
        sys.setswitchinterval(before)
    assert faults == []


def test_an_object_that_goes_between_listing_and_fetching_is_left_out(memory: Memory) -> None:
    listing = memory.list("progress/")
    key = next(key for key in listing if key != layout.BUILD)
    del memory.objects[key]
    cache = Cache(memory)  # type: ignore[arg-type]
    assert key not in cache.values(listing, listing, lambda data: len(data))


# Choosing a plan ------------------------------------------------------------------------------------------------------


def test_the_announced_plan_stands_for_its_own_configuration(made: MadeStore, memory: Memory) -> None:
    priced = made.config.model_copy(
        update={"resources": made.config.resources.model_copy(update={"gpu_hour_price": 3.0})}
    )
    state = read_state(memory, choose=plan_for(priced, memory), clock=lambda: made.now)  # type: ignore[arg-type]
    assert (state.plan.basis, state.cost.price) == ("build", 3.0)


def test_a_configuration_whose_target_is_not_here_falls_back_and_says_so(made: MadeStore, memory: Memory) -> None:
    other = made.config.model_copy(
        update={"target": made.config.target.model_copy(update={"model": "/nowhere/model", "revision": None})}
    )
    state = read_state(memory, choose=plan_for(other, memory), clock=lambda: made.now)  # type: ignore[arg-type]
    assert state.plan.basis == "build"
    assert any("the totals are those of the last build" in note for note in state.notes)


def test_a_large_store_listed_in_parts_shows_the_same(
    made: MadeStore, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftmill.state.read._LARGE", 100)
    reader = Reader(memory)
    board, samples = Board(reader, clock=lambda: made.now), Samples(Tables(memory))  # type: ignore[arg-type]
    looks = []
    for _ in range(2):
        board.look()
        view = board.view
        assert view is not None
        looks.append((view.state, [samples.find(view, Query(kind, text="FATHOMS")) for kind in ("search", "rejected")]))
    assert looks[0] == looks[1]
    for found in looks[0][1]:
        assert "fathoms" in {
            word for row in found["rows"] for piece in row["pieces"] for word in re.findall(r"\w+", piece["text"])
        }
    key = layout.progress("audit_set", made.fp["audit_set"])
    memory.put(key, heartbeat("audit_set", "x", made.now - 9, made.now, "running", host="late"), made.now)
    assert "late" in {lane.host for lane in state_of(reader.snapshot(), made.now).lanes}
