"""Each fault of a row has its type, and a good row has none."""

import pytest

from draftmill.config import GenerateConfig
from draftmill.engines.base import Result
from draftmill.stages.generate import RowRules

RULES = RowRules(GenerateConfig(max_new_tokens=6, max_token_run=4), frozenset({9}), vocabulary=20)


def fault(ids, reason):
    return RULES.fault(Result(("p", 0), tuple(ids), reason))


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([9], "stop"),
        ([1, 2, 9], "stop"),
        ([1, 2, 3, 4, 5, 9], "stop"),
        ([1, 2, 3, 4, 5, 6], "length"),
        ([0, 19, 0, 19, 0, 19], "length"),
        ([1, 1, 1, 9], "stop"),
        # A run that ended inside an answer is no degenerate end.
        ([1, 1, 1, 1, 2, 3], "length"),
    ],
)
def test_a_good_row_has_no_fault(ids, reason):
    assert fault(ids, reason) is None


@pytest.mark.parametrize(
    ("ids", "reason", "found"),
    [
        ([1, 9], "abort", ("finish_reason", "the engine ended the row with 'abort'")),
        ([], "stop", ("empty", "no token was generated")),
        ([1, 2, 3], "length", ("length", "3 tokens with finish reason length, limit 6")),
        ([1, 2, 3, 4, 5, 6, 9], "stop", ("length", "7 tokens with finish reason stop, limit 6")),
        ([1, 20, 9], "stop", ("bad_ids", "an id lies outside the vocabulary of 20")),
        ([-1, 9], "stop", ("bad_ids", "an id lies outside the vocabulary of 20")),
        ([1, 2], "stop", ("finish_reason", "the row stopped at token 2, which ends no answer")),
        ([5, 7, 3, 3, 3, 3], "length", ("token_run", "the last 4 tokens are all 3")),
    ],
)
def test_each_fault_has_its_type_and_says_what_it_saw(ids, reason, found):
    assert fault(ids, reason) == found
