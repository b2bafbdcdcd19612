"""Rows as pieces: the loss mask, special tokens, what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.config import TargetConfig
from draftmill.dashboard.row_text import pieces
from draftmill.dashboard.target_tokens import Tokens, tokens_of
from tests.state.made_texts import decode, encode
from tests.tiny import make_tokenizer

END = 258


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("target")
    make_tokenizer(folder)
    found = tokens_of(TargetConfig(model=str(folder)))
    assert found is not None
    return found


def row(text: str, mask: list[bool] | None = None) -> dict:
    ids = [*encode(text), END]
    return {"prompt_ids": [257, *encode("hi"), END], "output_ids": ids, "loss_mask": mask, "text": decode(ids)}


def test_special_tokens_stand_apart_and_the_mask_parts_the_answer(tokens: Tokens) -> None:
    found = pieces(row("think answer", [False] * 5 + [True] * 8), None, tokens, 1000)
    assert [(one["kind"], one["text"], one["special"]) for one in found] == [
        ("prompt", "<|im_start|>", True),
        ("prompt", "hi", False),
        ("prompt", "<|im_end|>", True),
        ("masked", "think", False),
        ("trained", " answer", False),
        ("trained", "<|im_end|>", True),
    ]


@given(st.text(max_size=80), st.lists(st.booleans(), min_size=400, max_size=400))
def test_nothing_of_a_short_row_is_lost(tokens: Tokens, text: str, mask: list[bool]) -> None:
    ids = encode(text)
    whole = {**row(text), "loss_mask": None}
    assert "".join(one["text"] for one in pieces(whole, None, tokens, 1000) if one["kind"] == "trained") == decode(
        [*ids, END]
    )
    masked = {**whole, "loss_mask": mask[: len(ids) + 1]}
    kinds = {one["kind"] for one in pieces(masked, None, tokens, 1000)} - {"prompt"}
    assert kinds <= {"trained", "masked"}


def test_without_a_tokenizer_the_stored_text_and_the_record_are_shown() -> None:
    record = '{"messages":[{"role":"user","content":"How <b>deep</b>?"}]}'
    found = pieces(row("so deep"), record, None, 1000)
    assert ("prompt", "How <b>deep</b>?") in [(one["kind"], one["text"]) for one in found]
    assert found[-1] == {"kind": "trained", "text": "<|im_end|>", "special": True}


@pytest.mark.parametrize(
    "record", ["", "no json", "[]", '{"messages":3}', '{"messages":[{"content":null}]}', '{"input_ids":[1]}']
)
def test_a_record_of_any_kind_is_shown(record: str) -> None:
    assert pieces(row("x"), record, None, 1000)


def test_the_middle_of_a_long_row_is_left_out_and_counted(tokens: Tokens) -> None:
    for found in (pieces(row("a" * 10_000), None, tokens, 100), pieces(row("a" * 10_000), None, None, 100)):
        assert sum(len(one["text"]) for one in found) < 1000
        assert any(one["kind"] == "left_out" and "9," in one["text"] for one in found)


def test_a_mask_that_changes_at_every_token_gives_bounded_pieces(tokens: Tokens) -> None:
    assert len(pieces(row("ab" * 400, [place % 2 == 0 for place in range(801)]), None, tokens, 1000)) <= 401


@pytest.mark.parametrize("content", ["", "{", '{"model": 1}'])
def test_a_damaged_tokenizer_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    assert tokens_of(TargetConfig(model=str(tmp_path))) is None


@pytest.mark.parametrize("model", ["nothing/here", "../../etc", "/nowhere", "a b/c", "x"])
def test_a_target_that_is_not_here_is_none(model: str) -> None:
    assert tokens_of(TargetConfig(model=model, revision="0" * 40)) is None
