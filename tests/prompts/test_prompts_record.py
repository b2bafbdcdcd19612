"""Canonical records: every spelling of a conversation, and what an id depends on."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.canonical import canonical_json
from draftmill.prompts.bad import BadRecord, Kind
from draftmill.prompts.record import Rules, canonical_record, identify, parse, parse_answered, prompt_id

KEEP = Rules(answers="keep")
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def record_of(value, **rules):
    return canonical_record(value, Rules(**rules))


@pytest.mark.parametrize(
    "spelling",
    [
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": "Hello", "name": None, "weight": 1}], "id": 7, "tools": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]},
        {"messages": '[{"role": "user", "content": "Hello"}]'},
        {"conversations": [{"from": "human", "value": "Hello"}]},
        {"conversations": [{"role": "user", "content": "Hello"}], "tools": "[]"},
        {"prompt": "Hello"},
        {"prompt": [{"role": "User", "content": "Hello"}], "system": ""},
        {"instruction": "Hello", "input": "", "output": "Hi"},
        {"instruction": "Hello", "input": None},
    ],
)
def test_every_spelling_of_a_prompt_is_the_same_record(spelling):
    assert record_of(spelling) == HELLO


def test_sharegpt_with_all_its_roles():
    value = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "gpt", "value": "Where?"},
            {"from": "human", "value": "Oslo"},
            {"from": "observation", "value": "rain"},
        ],
        "tools": json.dumps([TOOL]),
    }
    assert record_of(value, system="unused, for there is one") == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "Where?"},
            {"role": "user", "content": "Oslo"},
            {"role": "tool", "content": "rain"},
        ],
        "tools": [TOOL],
    }


def test_alpaca_joins_instruction_and_input():
    assert record_of({"instruction": "Sum up.", "input": "A text."})["messages"] == [
        {"role": "user", "content": "Sum up.\n\nA text."}
    ]


def test_the_configured_system_turn_is_given_only_where_none_is():
    assert record_of({"prompt": "Hello"}, system="S")["messages"][0] == {"role": "system", "content": "S"}
    own = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]}
    assert record_of(own, system="S") == own


def test_calls_of_tools_stand_without_words():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    value = {"messages": [{"role": "user", "content": "x"}, call, {"role": "tool", "content": "", "tool_call_id": "1"}]}
    assert record_of(value)["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": call["tool_calls"]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]


def test_a_named_field_is_taken_whatever_it_holds():
    assert record_of({"question": "Hello", "prompt": "not this"}, field="question") == HELLO
    assert record_of({"turns": [{"from": "human", "value": "Hello"}]}, field="turns") == HELLO


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ({"prompt": "Hello", "completion": "Hi"}, "Hi"),
        ({"prompt": "Hello", "response": "Hi"}, "Hi"),
        ({"instruction": "Hello", "input": "", "output": "Hi"}, "Hi"),
        ({"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}, "Hi"),
        (
            {"prompt": [{"role": "user", "content": "Hello"}], "completion": [{"role": "assistant", "content": "Hi"}]},
            "Hi",
        ),
    ],
)
def test_answers_are_kept_where_asked_for(value, answer):
    kept = parse_answered(value)
    assert kept.record == {**HELLO, "answer": {"role": "assistant", "content": answer}}
    assert kept.prompt_id != prompt_id(HELLO)


def test_token_rows_are_kept_as_they_are():
    assert parse_answered({"input_ids": [1, 2, 3], "loss_mask": [0, True, 1.0]}).text == (
        '{"input_ids":[1,2,3],"loss_mask":[0,1,1]}'
    )


@pytest.mark.parametrize(
    ("value", "rules", "kind", "reason"),
    [
        ([1], Rules(), Kind.WRONG_TYPE, "the record is a list instead of an object"),
        ("x", Rules(), Kind.WRONG_TYPE, "the record is a string instead of an object"),
        ({}, Rules(), Kind.NO_PROMPT, "the record has none of messages, conversations, prompt, instruction"),
        ({"prompt": "x"}, Rules(field="q"), Kind.NO_PROMPT, "the record has no `q`"),
        ({"prompt": 3}, Rules(), Kind.WRONG_TYPE, "`prompt` is a number instead of a list of turns"),
        ({"messages": {}}, Rules(), Kind.WRONG_TYPE, "`messages` is an object instead of a list of turns"),
        ({"messages": "hi"}, Rules(), Kind.BROKEN_JSON, "`messages` is a text that is not JSON"),
        ({"messages": []}, Rules(), Kind.EMPTY_TURN, "`messages` holds no turn"),
        ({"messages": ["x"]}, Rules(), Kind.WRONG_TYPE, "turn 1 is a string instead of an object"),
        ({"messages": [{"content": "x"}]}, Rules(), Kind.WRONG_TYPE, "the role of turn 1 is null instead of a string"),
        (
            {"messages": [{"role": "user", "content": True}]},
            Rules(),
            Kind.WRONG_TYPE,
            "the content of turn 1 is a boolean instead of a string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            Rules(),
            Kind.WRONG_TYPE,
            "the content of turn 1 has a part that is not text",
        ),
        ({"messages": [{"role": "user", "content": " \n"}]}, Rules(), Kind.EMPTY_TURN, "turn 1 is empty"),
        ({"prompt": ""}, Rules(), Kind.EMPTY_TURN, "`prompt` is empty"),
        ({"instruction": "x", "input": 1}, Rules(), Kind.WRONG_TYPE, "`input` is a number instead of a string"),
        (
            {"messages": [{"role": "narrator", "content": "x"}]},
            Rules(),
            Kind.UNKNOWN_ROLE,
            "turn 1 has the unknown role 'narrator'",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            Rules(),
            Kind.ASSISTANT_LAST,
            "the last turn is the assistant's: set `answers: keep` for this source or drop the turn",
        ),
        (
            {"messages": [{"role": "system", "content": "x"}]},
            Rules(),
            Kind.SYSTEM_LAST,
            "no user turn stands at the end",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            KEEP,
            Kind.SYSTEM_LAST,
            "no user turn stands at the end",
        ),
        (
            {"prompt": "x"},
            KEEP,
            Kind.NO_ANSWER,
            "there is no answer: end with an assistant turn or set `answers: drop`",
        ),
        (
            {"prompt": "x", "tools": {"a": 1}},
            Rules(),
            Kind.WRONG_TYPE,
            "`tools` is an object that is not a list of objects",
        ),
        ({"prompt": "x", "tools": [{"a": float("nan")}]}, Rules(), Kind.WRONG_TYPE, None),
        ({"prompt": "a\0b"}, Rules(), Kind.NUL_BYTE, "a text holds a NUL byte"),
        (
            {"prompt": "a\ud800b"},
            Rules(),
            Kind.INVALID_UTF8,
            "a text holds a byte or half a character that is not valid UTF-8",
        ),
        (
            {"input_ids": [1], "loss_mask": [1]},
            Rules(),
            Kind.NO_PROMPT,
            "input_ids are taken only with `answers: keep` for this source",
        ),
        ({"input_ids": [-1], "loss_mask": [1]}, KEEP, Kind.WRONG_TYPE, "`input_ids` is not a list of token ids"),
        ({"input_ids": [True], "loss_mask": [1]}, KEEP, Kind.WRONG_TYPE, "`input_ids` is not a list of token ids"),
        ({"input_ids": [1]}, KEEP, Kind.WRONG_TYPE, "`loss_mask` is not a list of 0 and 1"),
        ({"input_ids": [1], "loss_mask": [2]}, KEEP, Kind.WRONG_TYPE, "`loss_mask` is not a list of 0 and 1"),
        (
            {"input_ids": [1, 2], "loss_mask": [1]},
            KEEP,
            Kind.WRONG_TYPE,
            "`input_ids` has 2 entries and `loss_mask` has 1",
        ),
        ({"input_ids": [], "loss_mask": []}, KEEP, Kind.EMPTY_TURN, "`input_ids` is empty"),
    ],
)
def test_a_bad_record_says_its_kind_and_reason(value, rules, kind, reason):
    with pytest.raises(BadRecord) as caught:
        parse(value, rules)
    assert caught.value.kind == kind
    assert reason is None or caught.value.reason == reason


def test_a_written_backslash_u0000_is_no_nul():
    assert parse({"prompt": "C:\\u0000 and \\\\u0000"}, Rules()).record["messages"][0]["content"].startswith("C:")


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1).filter(
    lambda text: not text.isspace()
)


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=5), st.none() | texts)
def test_the_id_is_the_digest_of_the_canonical_json(contents, system):
    roles = ["user", "assistant", "user", "tool", "user"][: len(contents)]
    value = {"messages": [{"content": c, "role": r} for c, r in zip(contents, roles, strict=True)]}
    if roles[-1] == "assistant":
        value["messages"].append({"role": "user", "content": "more"})
    prompt = parse(value, Rules(system=system))
    assert prompt.text == canonical_json(prompt.record)
    assert prompt.prompt_id == hashlib.sha256(canonical_json(prompt.record).encode()).hexdigest()[:32]
    assert parse(prompt.record, Rules()) == identify(json.loads(prompt.text)) == prompt


def test_tools_and_system_turn_are_part_of_the_id():
    plain = parse({"prompt": "x"}, Rules())
    assert (
        len(
            {
                plain.id,
                parse({"prompt": "x", "tools": [TOOL]}, Rules()).id,
                parse({"prompt": "x"}, Rules(system="s")).id,
            }
        )
        == 3
    )


def test_an_id_never_changes():
    """Ids name everything that was ever built; a change here needs a new INDEX_VERSION and loses every shard."""
    assert parse({"prompt": "Grüße"}, Rules()).prompt_id[:12] == "c36a03e7ed64"
