"""Rows that their servers die of: found with few deaths, while all others are answered; and deaths from outside."""

import asyncio
import random
from dataclasses import replace

import pytest

from draftmill.config import GenerateConfig, SglangConfig
from draftmill.engines import sglang_pool, sglang_watch
from draftmill.engines.base import Failure, Request, Result, Stamp
from draftmill.engines.sampling import Mix
from draftmill.engines.sglang_api import FixedServer
from draftmill.engines.sglang_pool import Pool
from draftmill.engines.sglang_watch import Asking, Interrupted
from draftmill.errors import UserError
from draftmill.stages.lane import Lane, Order
from tests.sglang.lane_site import Site
from tests.sglang.servers import OwnServer, Phoenix
from tests.sglang.small_server import VOCABULARY

MOST_RESTARTS = SglangConfig().server.max_restarts
OWN = Mix(GenerateConfig(max_new_tokens=12)).own.sampling


class Imagined:
    """A server that answers when the test says so, in place of Watched."""

    def __init__(self, handle, asking, events):
        self.handle, self.most, self.events = handle, asking.config.in_flight, events
        self.state, self.rows, self.replies, self.restarts = "starting", set(), {}, 0
        self.tokens = self.retries = 0

    @property
    def flying(self):
        return len(self.rows)

    def start(self):
        self.serve()

    async def close(self):
        self.state = "lost"
        self.interrupt()

    async def ask(self, request):
        assert self.state == "serving"
        self.rows.add(request.key)
        assert self.flying <= self.most
        self.replies[request.key] = asyncio.get_running_loop().create_future()
        try:
            return await self.replies[request.key]
        finally:
            self.rows.discard(request.key)
            del self.replies[request.key]
            self.events.changed()

    def answer(self, key):
        found = Result(key, (1,), "stop"), Stamp(self.handle.uuid, 0, "era", 0)
        if not self.replies[key].done():
            self.replies[key].set_result(found)

    def die(self):
        self.state = "restarting"
        self.events.died(self)
        self.restarts += 1
        self.interrupt()

    def interrupt(self):
        for reply in self.replies.values():
            if not reply.done():
                reply.set_exception(Interrupted())

    def serve(self):
        self.state = "serving"
        self.events.changed()


class World:
    """A pool of imagined servers, and somebody who keeps as many rows in it as it says it takes."""

    def __init__(self, monkeypatch, servers, in_flight, rows, killers=()):
        monkeypatch.setattr(sglang_pool, "Watched", Imagined)
        self.pool = Pool(Asking(SglangConfig(in_flight=in_flight), (7,), lambda _, found: found, (1,), 12))
        self.todo = [Request((f"p{n}", 0), (1,), n, OWN) for n in range(rows)]
        self.killers = {(f"p{n}", 0) for n in killers}
        self.tasks, self.found = set(), []
        for n in range(servers):
            self.pool.add(FixedServer(f"http://imagined:{n}"))

    @property
    def servers(self):
        return list(self.pool.servers.values())

    async def settle(self):
        """Send what the pool takes, until nothing moves any more."""
        for _ in range(12):
            while self.todo and len(self.tasks) < self.pool.capacity:
                task = asyncio.create_task(self.pool.answer(self.todo.pop(0)))
                self.tasks.add(task)
                task.add_done_callback(self._landed)
            await asyncio.sleep(0)

    def _landed(self, task):
        self.tasks.discard(task)
        self.found.append(task.result()[0])

    def die_of(self, server):
        if self.killers & server.rows:
            server.die()

    async def finish(self, rng, outside=0.0):
        """One thing after another happens until every row has ended. `outside`: deaths for each row that is answered."""
        await self.settle()
        while self.tasks or self.todo:
            server = rng.choice(self.servers)
            if server.state != "serving":
                server.serve()
            elif rng.random() < 0.5:
                self.die_of(server)
            elif rng.random() < outside:
                server.die()
            elif server.rows:
                for key in rng.sample(sorted(server.rows), rng.randint(1, len(server.rows))):
                    if key not in self.killers:
                        server.answer(key)
            await self.settle()

    def check(self, rows):
        assert sorted(one.key for one in self.found) == sorted((f"p{n}", 0) for n in range(rows))
        refused = {one.key: one.reason for one in self.found if isinstance(one, Failure)}
        assert refused == dict.fromkeys(self.killers, "server_death")


def imagine(work):
    async def whole():
        return await asyncio.wait_for(work(), 60)

    return asyncio.run(whole())


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("in_flight", [1, 4, 8, 64, 512])
def test_one_row_that_kills_is_refused_before_a_server_is_given_up(monkeypatch, servers, in_flight):
    for seed in range(5):
        rng = random.Random(f"{servers} {in_flight} {seed}")
        rows = min(3 * servers * in_flight + 5, 2000)

        async def work(rng=rng, rows=rows):
            world = World(monkeypatch, servers, in_flight, rows, [rng.randrange(rows)])
            await world.finish(rng)
            world.check(rows)
            return [server.restarts for server in world.servers]

        restarts = imagine(work)
        assert sum(restarts) == 5
        assert max(restarts) <= MOST_RESTARTS


def test_several_rows_that_kill_are_refused_and_no_other(monkeypatch):
    for seed in range(8):
        rng = random.Random(seed)

        async def work(rng=rng):
            world = World(monkeypatch, 2, 64, 600, rng.sample(range(600), 3))
            await world.finish(rng)
            world.check(600)
            return sum(server.restarts for server in world.servers)

        assert imagine(work) <= 5 * 3


def test_of_a_prompt_that_kills_no_other_sample_is_asked(monkeypatch):
    async def work():
        world = World(monkeypatch, 1, 64, 200)
        world.killers = {("bad", sample) for sample in range(4)}
        world.todo[20:20] = [Request(key, (1,), 0, OWN) for key in sorted(world.killers)]
        await world.finish(random.Random(2))
        assert {one.key: one.reason for one in world.found if isinstance(one, Failure)} == dict.fromkeys(
            world.killers, "server_death"
        )
        assert len(world.found) == 204
        return world.servers[0].restarts

    assert imagine(work) == 5


def test_deaths_from_outside_refuse_no_row(monkeypatch):
    """As many deaths as one for a hundred events, far more than any build sees."""
    deaths = 0
    for seed in range(10):
        rng = random.Random(seed)

        async def work(rng=rng):
            world = World(monkeypatch, 2, 16, 1500)
            await world.finish(rng, outside=0.05)
            world.check(1500)
            return sum(server.restarts for server in world.servers)

        deaths += imagine(work)
    assert deaths > 50


def test_a_death_from_outside_leaves_no_place_empty(monkeypatch):
    """Suspects go out a few at a time, and rows that met no death take the other places."""

    async def work():
        world, rng = World(monkeypatch, 2, 64, 2000), random.Random(3)
        await world.settle()
        first, second = world.servers
        first.die()
        await world.settle()
        assert (second.flying, first.flying) == (64, 0)
        first.serve()
        suspects = set()
        await world.settle()
        while world.todo:
            assert (first.flying, second.flying) == (64, 64)
            out = [{key for key in s.rows if key in world.pool._suspects} for s in world.servers]
            assert not all(out), "suspects are at two servers"
            assert len(out[0]) + len(out[1]) <= 8
            suspects |= {*out[0], *out[1]}
            for server in (first, second):
                for key in rng.sample(sorted(server.rows), 16):
                    server.answer(key)
            await world.settle()
        assert len(suspects) == 64
        await world.finish(rng)
        world.check(2000)

    imagine(work)


def test_rows_that_wait_as_suspects_hear_when_the_last_server_is_lost(monkeypatch):
    async def work():
        world = World(monkeypatch, 1, 8, 0)
        tasks = [asyncio.create_task(world.pool.answer(Request((f"p{n}", 0), (1,), n, OWN))) for n in range(8)]
        await world.settle()
        (server,) = world.servers
        server.die()
        await world.settle()
        world.pool.lost(server, UserError("It was restarted too often."))
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, UserError)
        # The deaths are not forgotten: with another server the rows go out one at a time.
        world.pool.add(FixedServer("http://imagined:9"))
        again = [asyncio.create_task(world.pool.answer(Request((f"p{n}", 0), (1,), n, OWN))) for n in range(8)]
        await world.settle()
        (server,) = world.servers
        assert server.flying == 1
        again[-1].cancel()  # a row that nobody wants any more keeps no other waiting
        while server.rows:
            server.answer(next(iter(server.rows)))
            await world.settle()
        assert [task.done() for task in again] == [True] * 8

    imagine(work)


class Hosts(Site):
    """A site with several servers."""

    def __init__(self, folder, servers, **settings):
        super().__init__(folder, None, **settings)
        self.servers = servers

    def order(self, name, ahead=()):
        return Order(name, list(ahead), [{"number": number} for number in range(len(self.servers))])

    async def open(self):
        self.lane = Lane(self.config, self._asking, self.load, lambda reference: self.servers[reference["number"]])
        self._work = asyncio.create_task(self.lane.run())

    def poison(self, name, number):
        """Make a row one that the small server, like the real one, dies of."""
        asked = self.rows[name][number]
        self.rows[name][number] = replace(asked, prompt_ids=(*asked.prompt_ids, VOCABULARY))
        return asked.key

    def right_but(self, name, key):
        ledger = self.answers(name)
        assert ledger.rejection(key).reason == "server_death"
        assert list(ledger.failures) == [(key, 0)]
        self.rows[name] = [asked for asked in self.rows[name] if asked.key != key]
        self.right(name)


@pytest.mark.parametrize("count", [1, 2])
def test_a_row_that_kills_its_server_is_refused_and_all_others_are_answered(tmp_path, count):
    servers = [OwnServer(tmp_path / f"record{n}", "--token-seconds", "0.002", restarts=6) for n in range(count)]
    for number, server in enumerate(servers):
        server.uuid = f"GPU-{number}"
    here = Hosts(tmp_path, servers, rows=40, shards=2)
    killer = here.poison("s0", 11)

    async def work():
        beats = await here.do("s0", ["s1"])
        await here.do("s1")
        return beats[-1]

    try:
        beat = here.run(work)
    finally:
        for server in servers:
            server.kill()
    assert (beat["done"], beat["useful"], beat["rejected"]) == (40, 39, 1)
    here.right_but("s0", killer)
    here.right("s1")
    assert sum(len(server.reasons) for server in servers) == 5


def test_a_row_that_kills_a_server_of_somebody_else_is_refused_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_watch, "_WELL_S", 0.1)
    server = Phoenix(tmp_path / "record", "--token-seconds", "0.002")
    here = Hosts(tmp_path, [FixedServer(server.url)], rows=20, shards=1)
    killer = here.poison("s0", 3)
    try:
        here.run(lambda: here.do("s0"))
    finally:
        server.end()
    here.right_but("s0", killer)
