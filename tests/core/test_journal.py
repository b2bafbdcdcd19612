"""The journal: what was flushed comes back, what was torn is dropped alone, and the end leaves nothing."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore

PREFIX = "journal/generate/shard-fp"
VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers(), max_size=3)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=4)


@given(st.lists(ROWS, max_size=5), st.lists(ROWS, max_size=3))
@settings(max_examples=30, deadline=None)
def test_rows_come_back_in_order_also_after_a_restart(before, after):
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        first = Journal(store, PREFIX)
        for rows in before:
            first.append(rows)
        second = Journal(store, PREFIX)
        assert second.rows() == [row for rows in before for row in rows]
        for rows in after:
            second.append(rows)
        assert Journal(store, PREFIX).rows() == [row for rows in [*before, *after] for row in rows]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_torn_segment_is_dropped_and_removed_and_the_others_stay(data):
    segments = [[{"row": number, "text": "a\nb"}, {"row": -number}] for number in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        journal = Journal(store, PREFIX)
        for rows in segments:
            journal.append(rows)
        torn = data.draw(st.integers(0, 2))
        key = sorted(store.list())[torn]
        whole = store.get(key)
        position = data.draw(st.integers(0, len(whole) - 1))
        damage = data.draw(st.sampled_from([whole[:position], whole[:position] + b"\xff" + whole[position + 1 :]]))
        store.put(key, damage)
        left = [row for number, rows in enumerate(segments) if number != torn for row in rows]
        again = Journal(store, PREFIX)
        assert again.rows() == left
        assert key not in store.list()
        again.append([{"row": "new"}])
        assert Journal(store, PREFIX).rows() == [*left, {"row": "new"}]


def test_segments_that_another_build_clears_meanwhile_are_left_out(store):
    for number in range(3):
        Journal(store, PREFIX).append([{"row": number}])

    class Cleared(LocalStore):
        def get(self, key):
            data = super().get(key)
            Journal(store, PREFIX).clear()
            return data

    journal = Journal(Cleared(store.root), PREFIX)
    assert len(journal.rows()) == 1
    journal.append([{"row": "new"}])
    assert Journal(store, PREFIX).rows() == [{"row": "new"}]


def test_a_foreign_file_is_dropped(store):
    Journal(store, PREFIX).append([{"row": 1}])
    store.put(f"{PREFIX}/notes.txt", b"hello")
    assert Journal(store, PREFIX).rows() == [{"row": 1}]
    assert len(store.list()) == 1


def test_no_rows_are_no_segment(store):
    Journal(store, PREFIX).append([])
    assert store.list() == {}


def test_two_journals_do_not_see_each_other(store):
    Journal(store, "journal/generate/a").append([{"row": 1}])
    Journal(store, "journal/generate/ab").append([{"row": 2}])
    assert Journal(store, "journal/generate/a").rows() == [{"row": 1}]


def test_clearing_removes_segments_and_folders(store):
    journal = Journal(store, PREFIX)
    journal.append([{"row": 1}])
    journal.append([{"row": 2}])
    journal.clear()
    assert list(store.root.iterdir()) == []
    assert Journal(store, PREFIX).rows() == []
