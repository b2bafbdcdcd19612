import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.audit.counts import Counts
from draftmill.audit.limits import CHANCE, binomial_tail, broken, check, fails_from, is_over
from draftmill.config import AuditConfig


def codes(counts, **limits):
    return [one.code for one in broken(check(counts, AuditConfig(**limits)))]


def spread(rows, **over):
    """Healthy counts: every row another length of at least 40 tokens."""
    return Counts(rows=rows, histogram={40 + i: 1 for i in range(rows)}, **over)


def test_healthy_rows_break_nothing():
    assert codes(spread(400)) == []


@pytest.mark.parametrize("rows", [1, 2, 3, 20, 50])
@pytest.mark.parametrize("field", ["empty", "repetitive", "duplicates"])
def test_one_bad_row_of_a_small_shard_is_chance(rows, field):
    assert codes(spread(rows, **{field: 1})) == []


def test_one_rejected_row_of_a_small_shard_is_chance():
    assert codes(spread(3, rejected={"length": 1})) == []


def test_a_limit_of_zero_tolerates_no_row_and_of_one_every_row():
    assert codes(spread(20, empty=1), max_empty=0) == ["empty"]
    assert codes(spread(20, empty=20), max_empty=1) == []


@pytest.mark.parametrize(("bad", "over"), [(8, False), (9, False), (17, False), (18, True), (40, True)])
def test_an_average_shard_stands_slightly_above_the_limit(bad, over):
    """456 rows at 2%: 9 bad rows are the plain share; chance makes 17 in 1.2 cases of a hundred and 18 in 0.6."""
    assert is_over(bad, 456, 0.02) is over


def test_a_whole_set_is_held_to_nearly_the_plain_limit():
    assert fails_from(1_000_000, 0.02) <= 20_330


def test_a_spike_breaks_its_limit_and_cut_rows_are_none():
    assert codes(Counts(rows=400, histogram={6: 348, **{40 + i: 1 for i in range(52)}}))[0] == "spike"
    demo = Counts(rows=50, histogram={20 + i: 1 for i in range(12)}, histogram_cut={48: 38})
    assert codes(demo) == []


def test_a_few_equal_rows_are_no_spike():
    assert "spike" not in codes(Counts(rows=4, histogram={40: 4}))
    assert "spike" in codes(Counts(rows=5, histogram={40: 5}))


def test_short_answers_leave_cut_ones_out():
    assert "short" in codes(Counts(rows=50, histogram={1 + i % 7: 7 for i in range(7)} | {60: 1}))
    assert codes(Counts(rows=50, histogram_cut={4: 50}), min_mean_loss_tokens=0) == []


def test_a_low_mean_counts_from_five_rows_on():
    assert "mean_loss_tokens" not in codes(Counts(rows=4, histogram={9: 2, 10: 2}))
    assert "mean_loss_tokens" in codes(Counts(rows=30, histogram={9: 10, 10: 10, 11: 10}), max_spike=1)
    # One long row among short ones leaves the mean in doubt.
    assert codes(Counts(rows=5, histogram={10: 1, 11: 1, 12: 1, 13: 1, 30: 1})) == []


def test_unclosed_thinking_and_moved_boundaries_have_their_limits():
    assert codes(spread(100, thinking={"unclosed_cut": 40, "unclosed_ended": 30, "closed": 30})) == [
        "unclosed_thinking"
    ]
    assert codes(spread(100, boundary_moved=100)) == ["boundary_moved"]


@given(st.integers(1, 60), st.floats(0.01, 0.99), st.data())
def test_the_tail_is_the_binomial_sum(rows, p, data):
    count = data.draw(st.integers(math.floor(rows * p) + 1, rows))
    exact = sum(math.comb(rows, k) * p**k * (1 - p) ** (rows - k) for k in range(count, rows + 1))
    assert binomial_tail(count, rows, p) == pytest.approx(exact, rel=1e-6)


@given(st.integers(1, 5000), st.floats(0, 1))
def test_fails_from_is_the_first_count_that_is_over(rows, limit):
    first = fails_from(rows, limit)
    if first is None:
        assert not is_over(rows, rows, limit)
        return
    assert is_over(first, rows, limit)
    assert not is_over(first - 1, rows, limit)
    assert first > limit * rows


@given(st.integers(1, 2000), st.floats(0.001, 0.999))
def test_a_shard_just_at_the_limit_fails_in_less_than_one_case_of_a_hundred(rows, limit):
    first = fails_from(rows, limit)
    assert first is None or binomial_tail(first, rows, limit) < CHANCE


def test_no_rows_break_no_share():
    assert codes(Counts()) == []
