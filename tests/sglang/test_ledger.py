"""The ledger of a shard: whatever happens to it, a row is there once or not at all, and what was voided stays so."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.config import GenerateConfig
from draftmill.engines.base import Failure, Result, Stamp
from draftmill.stages.rows import Ledger
from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore

CONFIG = GenerateConfig(attempts=3, flush_rows=4)
KEYS = [(f"p{n}", n % 2) for n in range(4)]


def ledger(folder, store=None):
    return Ledger(CONFIG, Journal(store or LocalStore(Path(folder)), "journal/x"))


def answer(key, token, era="e", span=0):
    return Result(key, (token, 7), "stop"), Stamp("gpu", 0, era, span)


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("answer"), st.sampled_from(KEYS), st.integers(0, 2), st.sampled_from("ef"), st.integers(0, 4)
        ),
        st.tuples(st.just("fail"), st.sampled_from(KEYS), st.integers(0, 2), st.sampled_from("ef"), st.integers(0, 4)),
        st.tuples(st.just("void"), st.sampled_from("ef"), st.integers(0, 4)),
        st.tuples(st.just("flush")),
        st.tuples(st.just("kill")),
        st.tuples(st.just("tear"), st.integers(0, 30), st.integers(1, 40)),
        st.tuples(st.just("second writer"), st.sampled_from(KEYS), st.integers(0, 2)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(EVENTS)
def test_a_row_is_answered_once_or_not_at_all_whatever_happens(events):
    """The ledger against a model of it, over flushes, voids, kills, torn segments and another machine's segments."""
    with TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        book = ledger(folder, store)
        token, torn = 0, False
        voids: set[tuple[str, int]] = set()
        for event in events:
            match event:
                case ("answer", key, attempt, era, span):
                    token += 1
                    result, stamp = answer(key, token, era, span)
                    known = key in book.answers or (key, attempt) in book.failures
                    known = known or any(era == e and span >= s for e, s in voids)
                    assert book.note(result, attempt, stamp) == (not known)
                    assert known or book.answers[key] == result
                case ("fail", key, attempt, era, span):
                    known = key in book.answers or (key, attempt) in book.failures
                    known = known or any(era == e and span >= s for e, s in voids)
                    assert book.note(Failure(key, "empty", "x"), attempt, Stamp("gpu", 0, era, span)) == (not known)
                case ("void", era, span):
                    book.void(era, span)
                    voids.add((era, span))
                    assert not [s for s in book.stamps() if s.era == era and s.span >= span]
                case ("flush",):
                    book.flush()
                case ("kill",):
                    book = ledger(folder, store)
                    book.load()
                    records = Journal(store, "journal/x").rows()
                    voids = {(r["void"]["era"], r["void"]["span"]) for r in records if "void" in r}
                case ("tear", number, cut):
                    segments = sorted(store.list("journal/"))
                    if segments:
                        key = segments[number % len(segments)]
                        store.put(key, store.get(key)[:-cut])
                        torn = True
                case ("second writer", key, attempt):
                    token += 1
                    other = ledger(folder, store)
                    other.note(Result(key, (1000 + token, 7), "stop"), attempt)
                    other.flush()
        book.flush()
        again = ledger(folder, store)
        again.load()
        raw = [r for r in Journal(store, "journal/x").rows() if "void" not in r]
        assert set(again.answers) <= {tuple(r["key"]) for r in raw if "output_ids" in r}
        third = ledger(folder, store)
        third.load()
        assert (third.answers, third.failures) == (again.answers, again.failures)
        if not torn and not any(event[0] == "second writer" for event in events):
            assert again.answers == book.answers


def test_two_writers_of_one_journal_replace_nothing_of_each_other(tmp_path):
    one, two = ledger(tmp_path), ledger(tmp_path)
    one.note(*_args(answer(KEYS[0], 1)))
    two.note(*_args(answer(KEYS[1], 2)))
    one.flush()
    two.flush()
    both = ledger(tmp_path)
    both.load()
    assert set(both.answers) == {KEYS[0], KEYS[1]}


def _args(found):
    result, stamp = found
    return result, 0, stamp


def test_a_void_holds_for_rows_that_another_reader_takes_from_the_journal(tmp_path):
    book = ledger(tmp_path)
    for number, key in enumerate(KEYS):
        book.note(*_args(answer(key, number, span=number)))
    book.flush()
    assert book.void("e", 2) == 2
    book.note(*_args(answer(KEYS[2], 50, era="f")))
    book.flush()
    again = ledger(tmp_path)
    again.load()
    assert set(again.answers) == set(KEYS[:3])
    assert again.answers[KEYS[2]].output_ids == (50, 7)


def test_the_attempt_that_a_row_is_at():
    book = ledger("/nowhere")
    assert book.next_attempt(KEYS[0]) == 0
    book.note(Failure(KEYS[0], "empty", "x"), 0)
    assert book.next_attempt(KEYS[0]) == 1
    book.note(Failure(KEYS[0], "timeout", "x"), 1)
    book.note(Failure(KEYS[0], "empty", "y"), 2)
    assert book.next_attempt(KEYS[0]) is None
    assert book.rejection(KEYS[0]).detail == "y"
    book.note(Failure(KEYS[1], "too_long", "x"), 0)
    assert book.next_attempt(KEYS[1]) is None
    with pytest.raises(RuntimeError, match="neither answered nor refused"):
        book.rejection(KEYS[2])


def test_what_could_not_be_written_is_taken_back_in_order(tmp_path):
    book = ledger(tmp_path)
    book.note(*_args(answer(KEYS[0], 1)))
    taken = book.take()
    book.note(*_args(answer(KEYS[1], 2)))
    book.give_back(taken)
    assert [record["key"][0] for record in book.take()] == ["p0", "p1"]


def test_rows_that_landed_meanwhile_move_to_a_new_ledger_with_their_voids(tmp_path):
    old, new = ledger(tmp_path), ledger(tmp_path)
    old.note(*_args(answer(KEYS[0], 1)))
    old.flush()
    new.load()
    old.note(*_args(answer(KEYS[1], 2, era="f")))
    old.void("e", 0)
    new.absorb(old.take())
    assert set(new.answers) == {KEYS[1]}
    new.flush()
    again = ledger(tmp_path)
    again.load()
    assert set(again.answers) == {KEYS[1]}
