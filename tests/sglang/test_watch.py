"""The watch of a server: planned restarts, steady shares of bad rows, faults in a restart, successors on the same port."""

import asyncio
import random

import pytest

from draftmill.config import GenerateConfig, SglangConfig
from draftmill.engines import sglang_watch
from draftmill.engines.base import Failure, Result
from draftmill.engines.sglang_api import FixedServer
from draftmill.engines.sglang_health import Window
from draftmill.engines.sglang_pool import Pool
from draftmill.engines.sglang_watch import Asking, Watched
from draftmill.errors import UserError
from tests.sglang.lane_site import Site
from tests.sglang.servers import OwnServer, generated

LONG_AGO = 1.0


class Aging(OwnServer):
    """A server that a planned restart makes young again."""

    def restart(self, reason):
        self.began = 0.0
        return super().restart(reason)


@pytest.fixture
def server(tmp_path):
    found = Aging(tmp_path / "record", "--token-seconds", "0.002")
    yield found
    found.kill()


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr("draftmill.stages.lane._BEAT_S", 0.02)
    monkeypatch.setattr(sglang_watch, "_HOST_S", 0.0)
    monkeypatch.setattr(sglang_watch, "_TICK_S", 0.05)


def state(here):
    return [server.state for server in here.lane.pool.servers.values()]


async def until(true):
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


def test_an_old_server_is_drained_and_restarted_and_no_row_is_asked_twice(tmp_path, server):
    here = Site(tmp_path, server, rows=60, sglang={"restart_hours": 24.0})

    async def work():
        await here.do("s0", until=lambda beat: beat["done"] >= 8)
        server.began = LONG_AGO
        await here.do("s0")
        await until(lambda: server.reasons and state(here) == ["serving"])

    here.run(work)
    here.right("s0")
    assert server.reasons == ["planned after 24 hours"]
    assert set(generated(server.record).values()) == {1}


def test_rows_before_a_planned_restart_stand_only_behind_a_good_canary(tmp_path, server):
    here = Site(tmp_path, server, rows=60, flush_rows=1, sglang={"canary_minutes": 60.0})

    async def work():
        await here.do("s0", until=lambda beat: beat["done"] >= 8)
        server.misbehave("garbage")  # keeps every rule: only the canary can tell
        before = here.lane._answered
        await until(lambda: here.lane._answered > before + 10)
        server.began = LONG_AGO
        await here.do("s0")

    here.run(work)
    here.right("s0")
    assert server.reasons == ["it answers the canary with other tokens than at first"]


def test_a_server_that_hangs_while_it_is_drained_is_found(tmp_path, server):
    here = Site(tmp_path, server, sglang={"stall_seconds": 1.0})

    async def work():
        await here.do("s0", until=lambda beat: beat["done"] >= 4)
        server.misbehave("hang")
        server.began = LONG_AGO
        await until(lambda: state(here) == ["draining"])
        await here.do("s0")

    here.run(work)
    here.right("s0")
    assert "decoded no token" in server.reasons[0] or "canary" in server.reasons[0]


def test_a_server_that_dies_while_it_is_drained_is_found(tmp_path, server):
    here = Site(tmp_path, server)

    async def work():
        await here.do("s0", until=lambda beat: beat["done"] >= 4)
        server.misbehave("hang")
        server.began = LONG_AGO
        await until(lambda: state(here) == ["draining"])
        server.kill()
        await here.do("s0")

    here.run(work)
    here.right("s0")
    assert len(server.reasons) == 1


@pytest.mark.parametrize(("mode", "asked"), [("die", {1}), ("reset", {2})])
def test_rows_stand_when_their_server_died_under_the_canary_behind_them(tmp_path, server, mode, asked):
    """A connection that breaks while the process lives is no death: then nobody vouches for the rows."""
    here = Site(tmp_path, server, rows=12, flush_rows=1, sglang={"canary_minutes": 60.0})

    async def work():
        confirm, todo = here.lane.pool.confirm, [mode]

        async def spoilt(stamps):
            while todo:
                server.misbehave(todo.pop(), 1)
            await confirm(stamps)

        here.lane.pool.confirm = spoilt
        await here.do("s0")
        await until(lambda: server.reasons and state(here) == ["serving"])

    here.run(work)
    here.right("s0")
    assert len(server.reasons) == 1
    assert "connection" in server.reasons[0]
    assert set(generated(server.record).values()) == asked


class Broken(OwnServer):
    """A server whose restart fails by a fault that nobody thought of."""

    def restart(self, reason):
        raise RuntimeError("the record is no record")


def test_a_fault_in_a_restart_is_told_to_the_job_in_one_sentence(tmp_path, capfd):
    broken = Broken(tmp_path / "record", "--token-seconds", "0.002")
    here = Site(tmp_path, broken)

    async def work():
        await here.do("s0", until=lambda beat: beat["done"] >= 2)
        broken.kill()
        await here.do("s0")

    with pytest.raises(UserError, match=r"given up because of a fault.*RuntimeError: the record is no record"):
        here.run(work)
    assert "Traceback" in capfd.readouterr().err


def test_a_fault_in_the_first_start_is_told_too(tmp_path):
    broken = Broken(tmp_path / "record")
    broken.kill()
    here = Site(tmp_path, broken)
    with pytest.raises(UserError, match="the record is no record"):
        here.run(lambda: here.do("s0"))


def test_a_fault_while_a_server_is_looked_at_is_told_too(tmp_path, server):
    here = Site(tmp_path, server, sglang={"restart_hours": 1.0})

    async def work():
        await here.do("s0", until=lambda beat: beat["done"] >= 2)
        server.began = "yesterday"
        await here.do("s0")
        await here.do("s1")
        await here.do("s2")

    with pytest.raises(UserError, match="given up because of a fault"):
        here.run(work)


class Judged(Watched):
    """Takes outcomes, and counts its restarts in place of doing them."""

    restarts = 0

    def fall(self, reason, **_):
        self.restarts += 1
        self._window.clear()


class Deaf:
    """Hears nothing."""

    def voided(self, era, span):
        pass

    def changed(self):
        pass


def restarts_at(shares, seed=0):
    """How often a server is restarted whose rows are bad with each of the shares for 6,000 rows."""

    async def work():
        found = Judged(FixedServer("http://127.0.0.1:9"), Asking(SglangConfig(), (7,), None, (1,), 12), Deaf())
        found.state, rng, key = "serving", random.Random(seed), ("p", 0)
        good, bad = Result(key, (1,), "length"), Failure(key, "token_run", "")
        for share in shares:
            for _ in range(6000):
                await found._judge(bad if rng.random() < share else good)
        return found.restarts

    return asyncio.run(work())


@pytest.mark.parametrize("share", [0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.8, 1.0])
def test_a_steady_share_of_bad_rows_is_left_to_the_cap_after_two_restarts(share):
    assert restarts_at([share] * 3) <= 2


def test_a_server_that_was_well_for_long_may_be_restarted_again():
    assert restarts_at([0.9, 0.05, 0.9]) == 4
    assert restarts_at([0.05] * 3) == 0


def test_a_window_counts_as_it_goes():
    window, rng = Window(8, 0.5), random.Random(1)
    seen = []
    for _ in range(200):
        seen.append(rng.choice(["", "empty"]))
        window.add(seen[-1])
        assert bool(window.verdict()) == (len(seen) >= 8 and sum(map(bool, seen[-8:])) >= 4)


class Successor(OwnServer):
    """Another process of the same server."""

    def __init__(self, *args, epoch):
        super().__init__(*args)
        self.epoch = epoch


@pytest.mark.parametrize(("epoch", "taken"), [(0, False), (7, True)])
def test_a_successor_on_the_same_port_is_known_by_its_epoch(epoch, taken):
    """A new keeper takes the lowest free port again, while the old server is dead and not yet given up."""

    class Handle(FixedServer):
        def alive(self):
            return False

    async def work():
        config = SglangConfig(patience_seconds=30)
        pool = Pool(Asking(config, (7,), lambda _, found: found, (1,), GenerateConfig().max_new_tokens))
        first, second = Handle("http://127.0.0.1:9"), Handle("http://127.0.0.1:9", epoch)
        pool.add(first)
        pool.add(second)
        (server,) = pool.servers.values()
        await pool.close()
        return server.handle is second

    assert asyncio.run(work()) == taken


def test_a_job_that_comes_again_while_its_old_follower_still_waits_counts_once(tmp_path, server):
    """As after a kill: the lane hears of the old job's end later than of the new one."""
    here = Site(tmp_path, server, rows=40, sglang={"ahead_rows": 0, "in_flight": 2})

    async def work():
        old = here.lane.serve(here.order("s0"))
        async for beat in old:
            if "waiting" not in beat:
                break
        new = here.lane.serve(here.order("s0"))
        async for beat in new:
            if "waiting" not in beat:
                break
        counts = [len(here.lane._shards["s0"].jobs)]
        await old.aclose()
        counts.append(len(here.lane._shards["s0"].jobs))
        await new.aclose()
        return [*counts, len(here.lane._shards["s0"].jobs)]

    assert here.run(work) == [2, 1, 0]
