"""Boundaries: what an edit may change, and that the quick algorithm is the definition."""

import random
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.prompts.shard import boundary_hash, cut, is_held_out, reach_of

# Few different hashes on purpose: ties must be harmless.
hash_lists = st.lists(st.integers(0, 40), max_size=90)
reaches = st.integers(1, 6)


def defined_ends(hashes, reach):
    """The definition, word for word and slowly."""
    ends = []
    for i in range(reach, len(hashes) - 1 - reach):
        around = hashes[i - reach : i] + hashes[i + 1 : i + reach + 1]
        if all(hashes[i] < other for other in around):
            ends.append(i + 1)
    return ends


@settings(deadline=None)
@given(hash_lists, reaches)
def test_the_cuts_are_the_strict_local_minima(hashes, reach):
    shards = cut(hashes, reach)
    assert [stop for _, stop in shards[:-1]] == defined_ends(hashes, reach)
    assert [i for start, stop in shards for i in range(start, stop)] == list(range(len(hashes)))
    assert all(stop - start > reach for start, stop in shards) or len(hashes) <= reach


def distinct(hashes, reach):
    """The shards as they would be named: by content."""
    return [tuple(hashes[start:stop]) for start, stop in cut(hashes, reach)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 10**9), max_size=90, unique=True),
    reaches,
    st.sampled_from(["insert", "edit", "delete", "append"]),
    st.data(),
)
def test_an_edit_changes_the_touched_shard_and_at_most_one_neighbour_on_each_side(hashes, reach, edit, data):
    place = len(hashes) if edit == "append" else data.draw(st.integers(0, max(0, len(hashes) - 1)))
    fresh = data.draw(st.integers(0, 10**9).filter(lambda value: value not in hashes))
    edited = list(hashes)
    if edit in ("insert", "append"):
        edited.insert(place, fresh)
    elif hashes:
        edited[place : place + 1] = [fresh] if edit == "edit" else []
    before, after = distinct(hashes, reach), distinct(edited, reach)
    assert_local(before, set(after), place, gap=edit in ("insert", "append"))
    assert_local(after, set(before), place, gap=edit == "delete")


def assert_local(shards, others, place, gap):
    """Whatever is gone lies in the shard of the place or next to it; a gap belongs to either shard beside it."""
    ends = list(accumulate(map(len, shards)))
    touched = [n for n, end in enumerate(ends) if end - len(shards[n]) <= place < end + gap]
    gone = {number for number, shard in enumerate(shards) if shard not in others}
    assert not gone or any(gone <= {number - 1, number, number + 1} for number in touched)


def test_an_edit_that_moves_no_boundary_changes_exactly_one_shard():
    generator = random.Random(5)
    hashes = [generator.getrandbits(64) for _ in range(2000)]
    before = distinct(hashes, 20)
    assert len(before) > 30
    ends = {stop for _, stop in cut(hashes, 20)}
    unmoved = 0
    for _ in range(150):
        place = generator.randrange(len(hashes))
        edited = [*hashes[:place], generator.getrandbits(64), *hashes[place + 1 :]]
        if {stop for _, stop in cut(edited, 20)} == ends:
            unmoved += 1
            assert len(set(before) - set(distinct(edited, 20))) == 1
    assert unmoved > 100


def test_average_size_is_as_configured_and_no_shard_is_extreme():
    generator = random.Random(1)
    for rows in (9, 50, 51, 456):
        sizes = [
            stop - start for start, stop in cut([generator.getrandbits(64) for _ in range(60_000)], reach_of(rows))
        ]
        assert abs(sum(sizes) / len(sizes) - rows) < 0.08 * rows
        assert max(sizes) < 6 * rows


def test_few_records_are_one_shard_and_none_are_none():
    assert cut([], 4) == []
    assert cut([7], 4) == [(0, 1)]
    assert cut([5, 4, 3, 2, 1, 2, 3, 4, 5], 4) == [(0, 9)]


@settings(deadline=None)
@given(st.binary(min_size=16, max_size=16))
def test_split_and_boundaries_read_different_halves_of_the_id(prompt):
    other = bytes(byte ^ 255 for byte in prompt)
    assert is_held_out(prompt, 0.3) == is_held_out(prompt[:8] + other[8:], 0.3)
    assert boundary_hash(prompt) == boundary_hash(other[:8] + prompt[8:])


def test_the_share_that_is_held_out_is_the_share_asked_for():
    generator = random.Random(2)
    held_out = sum(is_held_out(generator.randbytes(16), 0.02) for _ in range(100_000))
    assert 1800 < held_out < 2200
