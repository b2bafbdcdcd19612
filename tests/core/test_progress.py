"""Heartbeats: true counts and rates by a given clock, few writes, and a last word on how a job ended."""

import json
import sys

import pytest

from draftmill.progress import Heartbeat, rows_left
from tests.waiting import until

KEY = "progress/generate/x.json"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def beat(store, clock):
    return Heartbeat(store, KEY, stage="generate", name="x", total=10, clock=clock)


def told(store, beat=None):
    if beat is not None:
        assert beat.settle()
    return json.loads(store.get(KEY))


def test_the_first_heartbeat_comes_at_once(store, beat):
    with beat:
        found = told(store, beat)
    assert {name: found[name] for name in ("stage", "name", "unit", "total", "state", "done", "tokens")} == {
        "stage": "generate",
        "name": "x",
        "unit": "rows",
        "total": 10,
        "state": "running",
        "done": 0,
        "tokens": 0,
    }
    assert found["started"] == found["updated"] == 100.0


def test_units_tokens_and_facts_add_up_and_are_told_every_two_seconds(store, clock, beat):
    with beat:
        clock.now += 1
        beat.advance(2, 30, {"loss": 3.5})
        assert told(store, beat)["done"] == 0
        clock.now += 1
        beat.advance(1, 10, {"failures": 1})
        found = told(store, beat)
        assert (found["done"], found["tokens"], found["loss"], found["failures"]) == (3, 40, 3.5, 1)
        assert (found["tokens_per_second"], found["updated"]) == (20.0, 102.0)


def test_what_an_earlier_run_had_done_counts_but_not_in_the_rate(store, clock, beat):
    with beat:
        beat.resume(7)
        clock.now += 2
        beat.advance(1, 10)
        found = told(store, beat)
    assert (found["done"], found["resumed"], found["tokens_per_second"]) == (8, 7, 5.0)


def test_what_an_earlier_try_told_stands_until_it_is_counted_again(store, clock, beat):
    beat.recall({"done": 7, "total": 20, "useful": 6, "rejected": 1})
    with beat:
        first = told(store, beat)
        clock.now += 2
        beat.report(5, 10, 4, {"useful": 5}, 21)
        found = told(store, beat)
    names = ("total", "done", "resumed", "useful", "tokens_per_second")
    assert [first[name] for name in names] == [20, 7, 7, 6, 0.0]
    assert [found[name] for name in names] == [21, 5, 4, 5, 5.0]


@pytest.mark.parametrize(
    ("heartbeat", "rows"),
    [
        (
            b'{"state": "failed", "done": 7, "total": 20, "useful": 6, "tokens": 9}',
            {"done": 7, "total": 20, "useful": 6},
        ),
        (b'{"done": -1, "total": "many", "rejected": 2}', {"rejected": 2}),
        (b'{"state": "done", "done": 7}', {}),
        (b'{"done": 7', {}),
        (b"[7]", {}),
    ],
)
def test_the_rows_of_an_earlier_try_are_read_with_patience(heartbeat, rows):
    assert rows_left(heartbeat) == rows


def test_a_job_that_waits_for_something_that_gets_on_is_not_silent(store, clock, beat, monkeypatch):
    monkeypatch.setattr("draftmill.progress._BEAT_SECONDS", 0.01)
    with beat:
        told(store, beat)
        with beat.waiting():
            clock.now += 50
            until(lambda: told(store)["updated"] == 150.0, "a heartbeat")
    assert told(store, beat)["state"] == "done"


def test_the_last_heartbeat_says_how_it_ended(store, beat, clock):
    with beat:
        beat.advance(10, 5)
    assert (told(store)["state"], told(store)["done"]) == ("done", 10)
    again = Heartbeat(store, KEY, stage="generate", name="x", total=10, clock=clock)
    with pytest.raises(KeyboardInterrupt), again:
        raise KeyboardInterrupt
    assert told(store)["state"] == "failed"


def test_the_first_word_on_what_ended_a_job_stands(store, beat):
    beat.advance(4, 5)
    with pytest.raises(ValueError, match="canary"), beat:
        raise ValueError("The canary disagrees.")
    beat.fail("The job has failed.")
    found = told(store)
    assert (found["state"], found["error"], found["done"]) == ("failed", "The canary disagrees.", 4)


def test_a_job_that_fails_behind_its_heartbeats_end_has_failed(store, beat):
    with beat:
        beat.advance(10)
    beat.fail("The disk has run full.", {"gpus": ["GPU-1"]})
    found = told(store)
    assert (found["state"], found["error"], found["done"], found["gpus"]) == (
        "failed", "The disk has run full.", 10, ["GPU-1"],
    )  # fmt: skip


def test_without_a_terminal_there_is_a_plain_line_every_ten_seconds(beat, clock, capsys):
    with beat:
        for _ in range(25):
            clock.now += 1
            beat.advance(0, 4)
    assert capsys.readouterr().out == ("generate x: 0/10 rows, 4.0 tokens/s\ngenerate x: 0/10 rows, 4.0 tokens/s\n")


def test_on_a_terminal_there_is_a_bar_and_no_line(store, clock, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    beat = Heartbeat(store, KEY, stage="train", name="y", total=4, unit="steps", clock=clock)
    with beat:
        clock.now += 60
        beat.advance(3)
    said = capsys.readouterr()
    assert said.out == ""
    assert "train y" in said.err
    assert "3/4" in said.err
    assert told(store)["done"] == 3
