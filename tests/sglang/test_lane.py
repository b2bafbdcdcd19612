"""The lane in one event loop with real servers and a real journal: order, overlap, redoing, and handing over."""

import asyncio
import threading
from dataclasses import replace

import pytest

from draftmill.config import GenerateConfig
from draftmill.engines.base import Result, row_seed
from draftmill.engines.sampling import Mix
from draftmill.errors import UserError
from draftmill.stages.lane_watch import Look, Timeline
from draftmill.stages.rows import Asked
from draftmill.store.journal import Journal
from tests.sglang.lane_site import Site, wanted
from tests.sglang.servers import OwnServer, generated


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch):
    monkeypatch.setattr("draftmill.stages.lane._BEAT_S", 0.02)


@pytest.fixture
def server(tmp_path):
    found = OwnServer(tmp_path / "record", "--token-seconds", "0.002")
    yield found
    found.kill()


@pytest.fixture
def site(tmp_path, server):
    def make(**settings):
        return Site(tmp_path, server, **settings)

    return make


def test_a_shard_is_done_when_its_journal_is_full(site, server):
    here = site()
    beats = here.run(lambda: here.do("s0"))
    here.right("s0")
    assert (beats[-1]["done"], beats[-1]["useful"], beats[-1]["rejected"]) == (20, 20, 0)
    assert beats[-1]["servers"] == [{"uuid": server.uuid, "url": server.url, "state": "serving", "epoch": 0}]
    assert set(generated(server.record).values()) == {1}


def test_coming_shards_are_begun_while_the_last_rows_run_and_are_asked_only_once(site, server):
    here = site(rows=10)

    async def work():
        await here.do("s0", ["s1", "s2"])
        first = (await here.do("s1", ["s2"]))[0]
        await here.do("s2")
        return first

    first = here.run(work)
    for name in here.rows:
        here.right(name)
    assert first["done"] > 0, "nothing of the second shard was there when its job came"
    assert set(generated(server.record).values()) == {1}


def test_rows_answered_ahead_are_work_of_this_run_and_those_of_the_journal_are_not(site, server):
    here = site()
    journalled = here.rows["s1"][:7]
    ledger = here.ledger("s1")
    for asked in journalled:
        assert ledger.note(Result(asked.key, *wanted(asked.request(here.config.seed, 0))), 0)
    ledger.write(ledger.take())

    async def work():
        await here.do("s0", ["s1", "s2"])
        while sum(shard.finished for shard in here.lane._shards.values()) < 2:
            await asyncio.sleep(0.01)
        return [await here.do(name) for name in ("s1", "s2")]

    resumed, ahead = here.run(work)
    assert {(beat["resumed"], beat["found"], beat["done"]) for beat in resumed} == {(7, 20, 20)}
    assert {(beat["resumed"], beat["found"], beat["done"]) for beat in ahead} == {(0, 20, 20)}
    tokens = [sum(len(found.output_ids) for found in here.answers(name).answers.values()) for name in ("s1", "s2")]
    known = sum(len(wanted(asked.request(here.config.seed, 0))[0]) for asked in journalled)
    assert (resumed[-1]["tokens"], ahead[-1]["tokens"]) == (tokens[0] - known, tokens[1])


def test_a_job_that_comes_again_to_a_lane_that_lives_resumes_what_the_first_has_left(site, server):
    here = site(sglang={"in_flight": 2, "ahead_rows": 0})

    async def work():
        first = await here.do("s0", until=lambda beat: beat["done"] >= 5)
        return first, await here.do("s0")

    first, second = here.run(work)
    assert {beat["resumed"] for beat in first} == {0}
    (resumed,) = {beat["resumed"] for beat in second}
    # A row that was in flight may land between the two counts.
    assert 0 <= second[0]["found"] - resumed <= 2
    assert 5 <= resumed < 20


def test_a_shard_that_is_begun_ahead_while_its_job_still_reads_it_keeps_its_answers(site, server):
    here = site(rows=10, flush_rows=1000, flush_seconds=3600.0)
    load, begun = here.load, threading.Event()

    def slow(name, coming):
        loaded = load(name, coming)
        if (name, coming) == ("s1", False):
            assert begun.wait(30)
        return loaded

    here.load = slow

    async def work():
        job = asyncio.create_task(here.do("s1"))
        while not here.waited:
            await asyncio.sleep(0.01)
        other = asyncio.create_task(here.do("s0", ["s1"]))
        while "s1" not in here.lane._shards or len(here.lane._shards["s1"].ledger.answers) < 4:
            await asyncio.sleep(0.01)
        begun.set()
        await asyncio.gather(job, other)

    here.run(work)
    here.right("s1")
    assert set(generated(server.record).values()) == {1}


def test_no_more_rows_are_taken_ahead_than_is_allowed(site, server):
    here = site(sglang={"ahead_rows": 7, "in_flight": 3})

    async def work():
        await here.do("s0", ["s1", "s2"])
        while here.lane._flying:
            await asyncio.sleep(0.01)
        return sum(shard.taken for shard in here.lane._shards.values())

    assert 0 < here.run(work) <= 7


class Waiting(asyncio.Event):
    """The sender's event: what the lane had in flight and unsent each time that the sender had no more to do."""

    def __init__(self, lane):
        super().__init__()
        self.lane, self.seen = lane, []

    async def wait(self):
        self.seen.append((self.lane._flying, self.lane._unsent()))
        return await super().wait()


@pytest.mark.slow
def test_between_two_jobs_every_place_stays_taken(tmp_path):
    """Counts, not times: whenever the sender rests while no job is there, as many rows as the server takes are in flight."""
    server = OwnServer(tmp_path / "record", "--row-seconds", "0.25", "--row-tokens", "16")
    here = Site(tmp_path, server, rows=40, shards=6)

    async def work():
        here.lane._wake = waiting = Waiting(here.lane)
        await here.do("s0", ["s1", "s2", "s3", "s4", "s5"])
        before, waiting.seen[:] = here.lane._answered, []
        while here.lane._answered < before + 100:  # more than two shards, and no job
            await asyncio.sleep(0.01)
        seen = list(waiting.seen)
        beats = await here.do("s1", ["s2", "s3", "s4", "s5"])
        return seen, beats

    try:
        seen, beats = here.run(work)
    finally:
        server.kill()
    assert len(seen) >= 100 // 8
    assert {flying for flying, _ in seen} == {8}
    assert all(unsent > 0 for _, unsent in seen)
    assert beats[0]["done"] == 40, "the next job found its shard unfinished"
    # A beat may come between a row that lands and the next one.
    assert beats[0]["lane"]["places"] == 8
    assert 0 < beats[0]["lane"]["in_flight"] <= 8


def test_the_bound_of_rows_ahead_follows_the_servers_rate(site, server):
    here = site()

    async def work():
        await here.do("s0")
        here.lane.timeline = Timeline()
        least = here.lane._most_ahead()
        for second in range(20):
            here.lane.timeline.note(Look(8, 8, 0, 9, 200 * second, ""), 0.0)
        return least, here.lane._most_ahead()

    assert here.run(work) == (64, 120 * 200)


def test_the_account_says_how_full_the_servers_were_and_why_not():
    found = Timeline()
    lines = [found.note(Look(8, 8, 3, 5, 4 * n, ""), 0.0) for n in range(60)]
    assert lines[:59] == [None] * 59
    assert "8 of 8 in flight for 60 s; 4 rows/s, 3 ahead, 5 unsent" in lines[59]
    lines = [found.note(Look(8 - n % 2, 8, 0, 0, 240 + n, "reading a shard"), 0.3 * (n == 3)) for n in range(10)]
    assert "8 7 8 7 8 7 8 7 8 7 of 8 in flight" in lines[9]
    assert "loop at most 0.30 s late" in lines[9]
    assert lines[9].endswith("too few, s: reading a shard 5")
    assert found.rate() == 4.0
    assert [found.note(Look(0, 0, 0, 0, 250, ""), 0.0) for _ in range(60)] == [None] * 60


def test_a_killed_job_s_shard_is_taken_up_where_it_was(site, server):
    here = site(sglang={"ahead_rows": 0, "in_flight": 2})

    async def work():
        await here.do("s0", until=lambda beat: True)
        await here.do("s0")

    here.run(work)
    here.right("s0")
    assert set(generated(server.record).values()) == {1}


def test_another_lane_goes_on_from_the_journal(site, server):
    here = site()

    async def broken_off():
        async with asyncio.timeout(30):
            await here.do("s0", until=lambda beat: beat["done"] >= 8)

    here.run(broken_off)
    there = site()
    beats = there.run(lambda: there.do("s0"))
    there.right("s0")
    assert beats[0]["resumed"] >= 8
    assert sum(generated(server.record).values()) <= 20 + here.config.sglang.in_flight


def test_a_journal_that_vanished_is_filled_again(site, server):
    here = site()

    async def work():
        await here.do("s0", ["s1"])
        while not here.lane._shards["s1"].finished:
            await asyncio.sleep(0.01)
        await here.lane._shards["s1"].flush()
        Journal(here.store, "journal/s1").clear()
        await here.do("s1")

    here.run(work)
    here.right("s1")


@pytest.mark.parametrize("mode", ["500", "503", "abort", "empty", "count", "html", "reset"])
def test_a_bad_answer_now_and_then_is_asked_again(site, server, mode):
    here = site(attempts=3)
    server.misbehave("well")

    async def work():
        await here.do("s1", until=lambda beat: beat["done"] > 0)
        server.misbehave(mode, 3)
        await here.do("s0")

    here.run(work)
    here.right("s0", attempts=3)


def test_a_row_that_fails_every_time_is_refused_with_its_reason(tmp_path):
    broken = OwnServer(tmp_path / "record", "--spare-canary")
    here = Site(tmp_path, broken, rows=3, sglang={"bad_window": 100, "retries": 1})
    broken.misbehave("500")
    try:
        beats = here.run(lambda: here.do("s0"))
    finally:
        broken.kill()
    ledger = here.answers("s0")
    assert (beats[-1]["done"], beats[-1]["useful"], beats[-1]["rejected"]) == (3, 0, 3)
    for asked in here.rows["s0"]:
        assert ledger.rejection(asked.key).reason == "server_error"
    assert len(ledger.failures) == 3 * here.config.attempts
    assert beats[-1]["retries"] == 3 * here.config.attempts
    assert broken.reasons == []


def test_bad_rows_that_restarts_do_not_cure_are_left_to_the_cap(tmp_path):
    """Such as a model that falls into runs of one token: restarting for ever would never end."""
    odd = OwnServer(tmp_path / "record", "--spare-canary", "--mode", "zeros")
    here = Site(tmp_path, odd, rows=40, max_token_run=8)
    try:
        here.run(lambda: here.do("s0"))
    finally:
        odd.kill()
    assert {f.reason for f in here.answers("s0").failures.values()} == {"token_run"}
    assert len(here.answers("s0").failures) == 80
    assert len(odd.reasons) == 2


def test_a_row_that_the_server_refuses_is_not_tried_again(site, server):
    here = site(rows=3)
    long = replace(here.rows["s0"][1], prompt_ids=tuple(range(250)) * 3)
    here.rows["s0"][1] = long
    here.run(lambda: here.do("s0"))
    failure = here.answers("s0").rejection(long.key)
    assert failure.reason == "too_long"
    assert list(here.answers("s0").failures) == [(long.key, 0)]


def test_a_dead_server_is_started_again_and_loses_no_finished_row(site, server):
    here = site(rows=60, flush_rows=1)

    async def work():
        await here.do("s0", until=lambda beat: beat["done"] >= 5)
        server.kill()
        return await here.do("s0")

    beats = here.run(work)
    here.right("s0")
    assert server.epoch == 1
    assert beats[-1]["servers"][0]["epoch"] == 1
    assert len(server.reasons) == 1


def test_rows_since_the_last_good_canary_are_done_again_when_a_server_turns_sick(tmp_path):
    sick = OwnServer(tmp_path / "record", "--token-seconds", "0.002")
    here = Site(tmp_path, sick, rows=40, flush_rows=1, sglang={"canary_minutes": 60.0})
    try:

        async def work():
            await here.do("s0", until=lambda beat: beat["done"] >= 8)
            sick.misbehave("garbage")  # keeps every rule: only the canary can tell
            return await here.do("s0")

        here.run(work)
        here.right("s0")
    finally:
        sick.kill()
    assert sick.reasons == ["it answers the canary with other tokens than at first"]
    assert sum(generated(sick.record).values()) > 40


def test_a_server_that_answers_zeros_is_sick_before_its_rows_are_refused(site, server):
    here = site(rows=60, max_token_run=8, attempts=2)

    async def work():
        await here.do("s0", until=lambda beat: beat["done"] >= 8)
        server.misbehave("zeros")
        await here.do("s0")

    here.run(work)
    # A row whose first try was zeros may be under way with its second when the server is found sick.
    here.right("s0", attempts=2)
    assert not here.answers("s0").failures
    assert len(server.reasons) == 1


@pytest.mark.parametrize("metrics", [True, False])
def test_a_server_whose_tokens_stand_still_is_restarted(tmp_path, metrics):
    hung = OwnServer(tmp_path / "record", "--token-seconds", "0.002", *([] if metrics else ["--no-metrics"]))
    here = Site(tmp_path, hung, sglang={"stall_seconds": 1.5})
    try:

        async def work():
            await here.do("s0", until=lambda beat: beat["done"] >= 4)
            hung.misbehave("hang")
            await here.do("s0")

        here.run(work)
        here.right("s0")
    finally:
        hung.kill()
    assert len(hung.reasons) == 1
    assert "decoded no token" in hung.reasons[0] or "canary" in hung.reasons[0]


@pytest.mark.slow
def test_slow_rows_are_no_standstill_as_long_as_tokens_move(tmp_path):
    slow = OwnServer(tmp_path / "record", "--token-seconds", "0.05")
    here = Site(tmp_path, slow, rows=4, max_new_tokens=64, sglang={"stall_seconds": 1.5})
    try:
        here.run(lambda: here.do("s0"))
        here.right("s0")
    finally:
        slow.kill()
    assert slow.reasons == []


def test_a_server_that_stays_sick_ends_the_job_with_its_error(tmp_path):
    sick = OwnServer(tmp_path / "record", restarts=1)
    here = Site(tmp_path, sick)
    sick.options = ("--context", "1")  # after its restart it refuses every prompt
    try:

        async def work():
            await here.do("s0", until=lambda beat: beat["done"] >= 0)
            sick.kill()
            await here.do("s0")

        with pytest.raises(UserError, match="restarted too often"):
            here.run(work)
    finally:
        sick.kill()


def test_two_jobs_have_their_shards_done_at_once(site, server):
    here = site()

    async def work():
        await asyncio.gather(here.do("s0"), here.do("s1"), here.do("s2"))

    here.run(work)
    for name in here.rows:
        here.right(name)
    assert set(generated(server.record).values()) == {1}


def test_a_row_s_seed_is_that_of_its_key_alone():
    asked = Asked(("p", 1), "chat", (1,), Mix(GenerateConfig()).own)
    assert asked.request(3, 1).seed == row_seed(3, ("p", 1), 1)
