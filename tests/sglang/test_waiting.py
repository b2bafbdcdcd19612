"""A job waits for a lane that lives, however long the store or a canary takes, and is told what the lane cannot mend."""

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from draftmill.config import parse
from draftmill.errors import UserError
from draftmill.gpu import processes
from draftmill.stages import lane_link, serving
from draftmill.stages.lane_link import LaneLink, LaneOrder, LanePlace
from draftmill.stages.lane_process import Server
from draftmill.stages.shards import Shards
from draftmill.store.local import LocalStore
from tests.sglang.lane_site import Site
from tests.sglang.servers import OwnServer, generated
from tests.sglang.test_process import Works, target
from tests.tiny import ROOT, config_values

__all__ = ["target"]
BEAT_S = 0.02


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch):
    monkeypatch.setattr("draftmill.stages.lane._BEAT_S", BEAT_S)


@pytest.fixture
def server(tmp_path):
    found = OwnServer(tmp_path / "record", "--token-seconds", "0.001")
    yield found
    found.kill()


# The lane's beats ------------------------------------------------------------------------------------------------------


class Gate:
    """Holds up whoever comes until it was waited for `beats` times."""

    def __init__(self):
        self.open, self.inside, self.most = threading.Event(), 0, 0

    def __call__(self):
        self.inside += 1
        self.most = max(self.most, self.inside)
        assert self.open.wait(30)
        self.inside -= 1


def test_beats_come_while_a_shard_is_read(tmp_path, server):
    here = Site(tmp_path, server, rows=3)
    load = here.load

    def slow(name, coming):
        assert processes.wait_until(lambda: here.waited >= 5, 30.0)
        return load(name, coming)

    here.load = slow
    here.run(lambda: here.do("s0"))
    here.right("s0")


def test_beats_come_while_the_last_rows_are_flushed(tmp_path, server):
    here, gate = Site(tmp_path, server, rows=3, flush_rows=1000, flush_seconds=60.0), Gate()
    put = here.store.put
    here.store.put = lambda key, data: (gate(), put(key, data))
    full = 0

    def until(beat):
        nonlocal full
        full += beat.get("done") == 3
        if full == 5:
            gate.open.set()
        return False

    here.run(lambda: here.do("s0", until=until))
    assert full > 5
    here.right("s0")


def test_two_never_write_one_journal_although_a_job_is_gone(tmp_path, server):
    """The thread that writes for a killed job goes on; another segment of the same name would take its place."""
    here, gate = Site(tmp_path, server, rows=3, flush_rows=1000, flush_seconds=60.0), Gate()
    put = here.store.put
    here.store.put = lambda key, data: (gate(), put(key, data))

    async def work():
        async def gone():
            await here.do("s0")

        job = asyncio.create_task(gone())
        while not gate.inside:
            await asyncio.sleep(BEAT_S)
        job.cancel()
        second = asyncio.create_task(here.do("s0"))
        for _ in range(10):
            await asyncio.sleep(BEAT_S)
        gate.open.set()
        with contextlib.suppress(asyncio.CancelledError):
            await job
        await second

    here.run(work)
    assert gate.most == 1
    here.right("s0")
    assert set(generated(server.record).values()) == {1}


@pytest.mark.slow
def test_a_full_disk_is_said_as_such(tmp_path, server):
    here = Site(tmp_path, server, rows=30, flush_rows=1)

    tries = []

    def put(key, data):
        tries.append(key)
        raise OSError(errno.ENOSPC, "No space left on device")

    here.store.put = put
    with pytest.raises(UserError, match=r"journal of shard s0 cannot be written \(.*No space left") as told:
        here.run(lambda: here.do("s0"))
    assert told.value.kind == "full"
    # By itself, for the job, and at the lane's end: not again for each row that lands.
    assert len(tries) <= 3


def test_a_lane_outlives_a_full_disk_that_its_log_is_on():
    words = "from draftmill.stages.lane_process import Log; Log.install(); "
    words += "[print('x' * 100, flush=True) for _ in range(1000)]; open('/dev/fd/2', 'w').write('well')"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", words], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (done.returncode, done.stderr) == (0, "well")


# What the lane says of a fault ------------------------------------------------------------------------------------------


class Paper:
    def __init__(self):
        self.said = []

    def write(self, data):
        self.said.append(json.loads(data))

    async def drain(self):
        pass


def test_a_file_that_the_lane_cannot_read_is_no_job_that_is_gone():
    async def serve(order):
        yield {"done": 0}
        raise OSError(errno.ENOSPC, "No space left on device", "/store/x")

    paper = Paper()
    asyncio.run(Server(SimpleNamespace(serve=serve, idle_since=0.0), 1.0)._serve(None, paper))
    assert paper.said[0] == {"done": 0}
    assert "No space left on device" in paper.said[1]["error"]
    assert paper.said[1]["kind"] == "full"


def test_a_lane_ends_at_once_whatever_its_threads_wait_for():
    """One may be in the restart of a server for half an hour, and the lane's lock must not be held so long."""
    words = """
import asyncio, time
from draftmill.stages import lane_process
async def run(config, generate, path):
    task = asyncio.create_task(asyncio.to_thread(time.sleep, 500))
    await asyncio.sleep(0.1)
    task.cancel()
lane_process._run, lane_process.parse, lane_process.follow_builder = run, lambda config: config, lambda: None
lane_process._leave(lane_process.main)
"""
    plan = {"config": {}, "generate": "g", "place": {"socket": "s", "lock": "/dev/null", "log": "l"}}
    done = subprocess.run(
        [sys.executable, "-c", words], input=json.dumps(plan), text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 0


# The job's end ----------------------------------------------------------------------------------------------------------


class Beat:
    def __init__(self):
        self.done = []

    def report(self, done, tokens, resumed, facts, total):
        self.done.append(done)


NEWS = {
    "done": 1, "tokens": 1, "resumed": 0, "total": 2, "servers": [], "useful": 1, "rejected": 0, "failures": 0,
    "retries": 0, "tokens_1m": 0, "tokens_per_second": 0, "lane": {}, "found": 0,
}  # fmt: skip


@pytest.fixture
def link(tmp_path):
    place = LanePlace(tmp_path / "lane.sock", tmp_path / "lane.lock", tmp_path / "lane.log")
    return LaneLink(LaneOrder(parse(config_values()), "g", "s", [], {}), place)


@contextlib.contextmanager
def lane_that_says(link, *news):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(link._place.socket))
        listening.listen()

        def work():
            end, _ = listening.accept()
            with end:
                end.makefile("rb").readline()
                for one in news:
                    end.sendall(json.dumps(one).encode() + b"\n")

        thread = threading.Thread(target=work)
        thread.start()
        yield
        thread.join()


def test_a_job_takes_a_beat_without_figures_for_a_sign_of_life(link):
    beat = Beat()
    with lane_that_says(link, {"waiting": True}, {"waiting": True}, NEWS, {"finished": True}):
        link.wait([], beat)
    assert beat.done == [1]


def test_a_job_is_told_what_kind_of_fault_it_is(link):
    with lane_that_says(link, {"error": "The disk is full.", "kind": "full"}), pytest.raises(UserError) as told:
        link.wait([], Beat())
    assert (str(told.value), told.value.kind) == ("The disk is full.", "full")


def test_while_another_lane_loads_no_process_after_the_other_is_started(link, monkeypatch):
    """A lane that finds the lock taken ends at once with status 0: time after time a start of Python."""
    monkeypatch.setattr(lane_link, "_START_S", 1.5)
    started = []
    monkeypatch.setattr(link, "_start", lambda: started.append(1) or SimpleNamespace(poll=lambda: 0))
    with pytest.raises(UserError, match="does not answer"):
        link._connect()
    assert 1 <= len(started) <= 2


def test_between_two_lanes_that_die_there_is_a_pause(link, monkeypatch):
    pauses = []
    monkeypatch.setattr(lane_link.time, "sleep", pauses.append)

    def talk(servers):
        raise ConnectionResetError("it closed the connection")

    monkeypatch.setattr(link, "_talk", talk)
    with pytest.raises(UserError, match="ended 5 times"):
        link.wait([], Beat())
    assert pauses == [lane_link._AGAIN_S] * 4


# Several hosts ----------------------------------------------------------------------------------------------------------


def test_a_shard_that_another_host_of_the_same_run_works_on_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTMILL_RUN_ID", "r")
    monkeypatch.setattr("draftmill.stages.shards.RUN_VARIABLE", "DRAFTMILL_RUN_ID")
    store = LocalStore(tmp_path)
    shards = Shards(parse(config_values()), None, store, "g")

    def claimed(run, host):
        store.put("claims/generate/s-g.json", json.dumps({"run": run, "host": host}).encode())
        return shards._claimed_elsewhere("s")

    assert not claimed("r", socket.gethostname())
    assert claimed("r", "another-host")
    assert claimed("another run", socket.gethostname())


def test_where_a_cluster_runs_the_jobs_no_lane_begins_another_host_s_shards(monkeypatch):
    def ahead(sentinel):
        job = SimpleNamespace(
            config=parse(config_values(gate={"sentinel": sentinel})),
            stage="generate",
            name="s-g",
            provenance={},
            param=lambda name: ["t", "u"],
            output=lambda name: ROOT / name,
        )
        return serving._link(job)._order.ahead

    assert ahead("rule") == ["t", "u"]
    assert ahead("in_job") == []


# Open files -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lane_may_have_more_rows_in_flight_than_the_soft_limit_of_open_files(tmp_path, target):
    few, hard = 64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    server = OwnServer(tmp_path / "record", "--row-seconds", "2", "--row-tokens", "16", "--vocabulary", "1000000")
    try:
        here = Works(tmp_path, target, server, 150, shards=1, in_flight=140, idle_seconds=60.0)
        job = here.job("0" * 12, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard)))
        assert job.wait(120) == 0, here.said()
        here.whole()
        assert "does not answer" not in here.said()
        (lane,) = here.lanes()
        limits = (ROOT.__class__(f"/proc/{lane}/limits")).read_text()
        assert [line.split()[3] for line in limits.splitlines() if "open files" in line] == [str(hard)]
        assert set(generated(tmp_path / "record").values()) == {1}
        os.kill(lane, 15)
    finally:
        server.kill()
    end = time.monotonic() + 30
    while here.lanes() and time.monotonic() < end:
        time.sleep(0.05)
    assert here.lanes() == []
