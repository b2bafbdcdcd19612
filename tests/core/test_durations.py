"""Spans of time on the command line: one form for all options."""

import pytest

from draftmill.durations import seconds
from draftmill.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("12h", 43200), ("7d", 604800), ("1.5w", 907200), ("0s", 0)],
)
def test_spans_of_time(text, expected):
    assert seconds("--for", text) == expected


@pytest.mark.parametrize("text", ["", "7", "90", "d", "-1d", "7 days", "1y", "nand", "soon"])
def test_no_span_of_time_is_one_sentence_that_names_the_option(text):
    with pytest.raises(UserError, match=r"^--grace: '.*' is no span of time: give"):
        seconds("--grace", text)
