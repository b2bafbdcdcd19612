"""The quick parser is the standard parser: the same prompt or the same refusal, whatever the line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.prompts import quick as quick_module
from draftmill.prompts.bad import BadRecord
from draftmill.prompts.quick import parse_raw
from draftmill.prompts.read import Raw
from draftmill.prompts.record import COLUMNS, Rules, parse

RULES = [Rules(), Rules(answers="keep"), Rules(field="q"), Rules(system="Be brief.")]
TEXTS = st.text() | st.sampled_from(["", " ", "\0", "\\u0000", "\ud800", "\udc00x", "\x7f\x80\u2028", "🙂", '"\\/\b\f'])
NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, -0.0, 2**63, 2**64, -(2**63) - 1, 10**25, 1e300, 5e-324, 1e16, 123456789.125])
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
NAMES = st.sampled_from(
    sorted({*COLUMNS, "conversations", "q", "id", "role", "from", "content", "value", "name", "tool_calls", "thinking"})
)
TURNS = st.dictionaries(NAMES, LEAVES, max_size=2).flatmap(
    lambda more: st.builds(
        lambda role, content: {**more, "role": role, "content": content},
        st.sampled_from(["user", "assistant", "system", "tool", "User"]),
        LEAVES | TEXTS,
    )
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
RECORDS = st.dictionaries(NAMES, VALUES | TURNS | st.lists(TURNS, max_size=3), max_size=4) | st.builds(
    lambda turns, more: {**more, "messages": turns}, st.lists(TURNS, min_size=1), st.dictionaries(NAMES, VALUES)
)


def outcome(parser):
    try:
        return parser()
    except BadRecord as bad:
        return bad.kind, bad.reason


def standard_and_quick(line, rules):
    raw = Raw(1, 0, line)
    return outcome(lambda: parse(raw.decode(), rules)), outcome(lambda: parse_raw(raw, rules))


@settings(max_examples=250, deadline=None)
@given(
    RECORDS, st.sampled_from(RULES), st.booleans(), st.sampled_from([b"", b"\n", b"\r\n", b" \n", b"\xc2\x85", b"x"])
)
def test_any_record_is_the_same_prompt_or_the_same_refusal(record, rules, escaped, end):
    line = json.dumps(record, ensure_ascii=escaped).encode("utf-8", "surrogatepass") + end
    standard, quick = standard_and_quick(line, rules)
    assert quick == standard


@settings(max_examples=250, deadline=None)
@given(RECORDS, st.data())
def test_damaged_lines_too(record, data):
    line = bytearray(json.dumps(record).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(line)))
        piece = st.binary(max_size=3) | st.sampled_from([b'"', b"\\", b"\\u", b"9" * 30, b"-0", b"1e999", b",", b"}"])
        line[place : place + data.draw(st.integers(0, 3))] = data.draw(piece)
    standard, quick = standard_and_quick(bytes(line), Rules())
    assert quick == standard


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "x", "prompt": "y"}',
        b'{"messages": [{"role": "user", "role": "tool", "content": "x"}]}',
        b'{"prompt": "x", "extra": %s1%s}' % (b"[" * 2000, b"]" * 2000),
        b'{"prompt": "x", "extra": %s1%s}' % (b"[" * 990, b"]" * 990),
        b'{"prompt": "x", "tools": [{"a": 18446744073709551616, "b": -0, "c": 1E2}]}',
        b'{"prompt": "x", "extra": %s}' % (b"9" * 5000),
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\tb"}',
        b'{"prompt": "\\ud83d\\ude42 \\ud83d"}',
        b'{"prompt": "C:\\\\u0000"}',
        b'{"prompt": "\\u0000"}',
        b'{"prompt": NaN}',
        b'\xef\xbb\xbf{"prompt": "x"}',
        b'{"prompt": "x"} {"prompt": "y"}',
    ],
)
def test_where_parsers_are_known_to_differ(line):
    standard, quick = standard_and_quick(line, Rules())
    assert quick == standard


def test_ordinary_lines_go_the_quick_way(monkeypatch):
    monkeypatch.setattr(Raw, "decode", None)
    line = json.dumps({"messages": [{"role": "user", "content": "Grüße"}], "id": 2**70}).encode()
    assert parse_raw(Raw(1, 0, line), Rules()).record == {"messages": [{"role": "user", "content": "Grüße"}]}


def test_a_host_without_orjson_reads_the_same(monkeypatch):
    raw = Raw(1, 0, b'{"prompt": "x"}')
    there = parse_raw(raw, Rules())
    monkeypatch.setattr(quick_module, "orjson", None)
    assert parse_raw(raw, Rules()) == there
