"""The signs of a sick server, as values; pauses; the engine for a caller that waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.config import GenerateConfig, SglangConfig
from draftmill.engines.base import Failure, Request, Result
from draftmill.engines.sampling import Mix
from draftmill.engines.sglang_api import FixedServer
from draftmill.engines.sglang_health import CANARY_TOKENS, Canary, Progress, Window
from draftmill.engines.sglang_watch import Asking, pause
from draftmill.errors import UserError
from draftmill.stages.rows import RowRules
from tests.sglang.blocking import SglangEngine
from tests.sglang.servers import OwnServer
from tests.sglang.small_server import VOCABULARY


def test_a_canary_keeps_its_first_answer_and_forgives_a_late_parting():
    canary = Canary((1, 2))
    assert canary.agrees(range(10, 26))
    assert canary.agrees([*range(10, 16), *range(90, 100)])
    assert not canary.agrees([*range(10, 15), 99, *range(16, 26)])
    assert not canary.agrees([])
    assert not canary.agrees(range(10, 13))


def test_a_server_that_is_sick_from_the_start_is_not_taken_for_the_truth():
    canary = Canary((1, 2))
    assert not canary.agrees([0] * CANARY_TOKENS)
    assert canary.answer is None
    assert canary.agrees(range(16))
    assert not canary.agrees([0] * CANARY_TOKENS)


def test_a_canary_that_ends_early_is_held_to_its_end():
    canary = Canary((1,))
    assert canary.agrees([5, 7])
    assert canary.agrees([5, 7])
    assert not canary.agrees([5, 7, 9])


@given(
    st.lists(st.sampled_from(["", "", "empty", "timeout"]), max_size=60),
    st.integers(4, 16),
    st.sampled_from([0.25, 0.5, 1.0]),
)
def test_a_window_speaks_when_it_is_full_and_bad_enough(faults, size, limit):
    window = Window(size, limit)
    for fault in faults:
        window.add(fault)
    last = faults[-size:]
    bad = sum(bool(fault) for fault in last)
    assert bool(window.verdict()) == (len(last) == size and bad >= limit * size)
    if window.verdict():
        assert window.verdict().startswith(f"{bad} of its last {size} rows failed: ")
    window.clear()
    assert not window.verdict()


def test_progress_is_a_count_that_rises_and_not_one_that_starts_anew():
    progress = Progress(0.0)
    progress.count(100.0, 10.0)
    assert progress.still(10.0) == 10.0
    progress.count(101.0, 11.0)
    assert progress.still(12.0) == 1.0
    progress.count(5.0, 20.0)
    progress.count(None, 21.0)
    assert progress.still(21.0) == 10.0
    progress.count(6.0, 22.0)
    assert progress.still(22.0) == 0.0


@given(st.floats(0.01, 5), st.integers(0, 200))
def test_pauses_double_up_to_half_a_minute_and_differ(first, repetition):
    longest = min(first * 2**repetition, 30.0)
    assert longest / 2 <= pause(first, repetition) <= longest


def engine(handles, **settings):
    config = GenerateConfig(max_new_tokens=12)
    rules = RowRules(config, frozenset({7}), VOCABULARY)
    sglang = SglangConfig(**{"in_flight": 4, "backoff_seconds": 0.01, **settings})
    return SglangEngine(handles, Asking(sglang, (7,), rules.check, (1, 2), 12))


def rows(count):
    own = Mix(GenerateConfig(max_new_tokens=12)).own.sampling
    return [Request((f"p{n}", 0), (1, 2, n), n, own) for n in range(count)]


def test_the_engine_answers_every_row_once_over_two_servers(tmp_path):
    servers = [OwnServer(tmp_path / f"record{n}", "--token-seconds", "0.002") for n in range(2)]
    servers[1].uuid = "GPU-other"
    try:
        found = list(engine(servers).run(rows(200), {("p3", 0)}))
        assert sorted(result.key for result in found) == sorted(r.key for r in rows(200) if r.key != ("p3", 0))
        assert all(isinstance(result, Result) for result in found)
        # The same row has the same answer wherever it was asked.
        again = list(engine(servers[:1]).run(rows(200), ()))
        assert {r.key: r for r in found}.items() <= {r.key: r for r in again}.items()
        assert all((tmp_path / f"record{n}").read_text().count("\n") > 5 for n in range(2))
    finally:
        for server in servers:
            server.kill()


def test_a_caller_that_stops_listening_leaves_nothing_behind(tmp_path):
    server = OwnServer(tmp_path / "record", "--token-seconds", "0.01")
    try:
        listening = engine([server]).run(rows(400), ())
        assert isinstance(next(listening), Result)
        listening.close()
        assert (tmp_path / "record").read_text().count("\n") < 100
    finally:
        server.kill()


def test_a_server_of_somebody_else_that_is_not_there_is_said_in_one_sentence():
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 is sick \(.*canary.*\) and is not ours to restart"):
        list(engine([FixedServer("http://127.0.0.1:9")], patience_seconds=0.4).run(rows(3), ()))


def test_a_failure_is_an_answer_too(tmp_path):
    server = OwnServer(tmp_path / "record", "--spare-canary", "--mode", "empty")
    try:
        found = list(engine([server], retries=0).run(rows(3), ()))
        assert {(type(f), f.reason) for f in found} == {(Failure, "length_zero")}
    finally:
        server.kill()
