import pytest

from draftmill.audit.boundary import render, without_tail
from draftmill.audit.imported import imported_row
from draftmill.audit.tokens import TokenInfo, token_info
from draftmill.errors import UserError

PROMPT = {"prompt_id": "p1", "source": "chat"}
QUESTION = [{"role": "user", "content": "hi"}]


def answer(content, **over):
    return {"messages": QUESTION, "answer": {"role": "assistant", "content": content, **over}}


def test_a_rendered_answer_begins_behind_the_prompt_and_ends_with_its_end(tokenizer):
    made = imported_row(PROMPT, answer("yes", reasoning_content="hm"), tokenizer, {})
    assert tokenizer.decode(made["prompt_ids"]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert made["text"] == tokenizer.decode(made["output_ids"]) == "<think>\nhm\n</think>\n\nyes<|im_end|>"
    assert (made["origin"], made["finish_reason"], made["loss_mask"], made["sample"]) == ("imported", "stop", None, 0)


def test_a_mask_of_its_own_is_kept(tokenizer):
    record = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 0]}
    made = imported_row(PROMPT, record, tokenizer, {})
    assert (made["prompt_ids"], made["output_ids"]) == ([5], [6, 7, 8, 9])
    assert made["loss_mask"] == [True, False, True, False]
    assert made["finish_reason"] == "length"


def test_a_mask_of_ones_to_the_end_is_none(tokenizer):
    end = tokenizer.eos_token_id
    made = imported_row(PROMPT, {"input_ids": [5, 6, end], "loss_mask": [0, 1, 1]}, tokenizer, {})
    assert (made["loss_mask"], made["finish_reason"]) == (None, "stop")
    behind = imported_row(PROMPT, {"input_ids": [5, 6, end, 256], "loss_mask": [0, 1, 0, 0]}, tokenizer, {})
    assert behind["finish_reason"] == "stop"


def test_a_mask_without_loss_is_an_empty_answer(tokenizer):
    made = imported_row(PROMPT, {"input_ids": [5, 6], "loss_mask": [0, 0]}, tokenizer, {})
    assert (made["prompt_ids"], made["output_ids"], made["loss_mask"]) == ([5, 6], [], None)


def test_a_moved_boundary_is_the_common_prefix(tokenizer):
    made = render(tokenizer, answer("yes"), {"think_in_prompt": True})
    assert made.moved
    assert tokenizer.decode(made.ids[: made.start]).endswith("<|im_start|>assistant\n<think>")
    assert not render(tokenizer, answer("yes"), {}).moved


def test_a_tail_is_cut_only_if_it_says_nothing(tokenizer, tokens):
    end = tokenizer.eos_token_id
    assert without_tail([1, end, 256], tokens) == [1, end]
    assert without_tail([1, end, 2], tokens) == [1, end, 2]
    assert without_tail([1, 2], tokens) == [1, 2]


def test_a_template_that_refuses_is_told(tokenizer):
    with pytest.raises(UserError, match="chat template refused"):
        imported_row(PROMPT, {"messages": [{"role": "user", "content": None}], "answer": QUESTION[0]}, tokenizer, {})


def test_what_a_tokenizer_tells(tokenizer, tokens):
    assert tokens.eos_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert tokenizer.decode(list(tokens.empty_turn)) == "<|im_start|>assistant\n<think>\n\n</think>\n\n<|im_end|>\n"
    assert {tokenizer.decode([i]) for i in tokens.blank_ids} == {"\n\n", "\n", " ", "\t", "\r"}
    assert tokens.vocabulary == 262
    assert (tokens.think_open, tokens.think_close) == tuple(tokenizer.convert_tokens_to_ids(["<think>", "</think>"]))


def test_the_end_that_the_template_writes_counts_although_the_tokenizer_names_another(tokenizer):
    class Other:
        eos_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, *args, **kwargs):
            return tokenizer(*args, **kwargs)

        def __len__(self):
            return len(tokenizer)

    assert token_info(Other()).eos_ids == set(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))


def test_two_infos_of_one_tokenizer_are_equal(tokenizer, tokens):
    assert token_info(tokenizer) == tokens
    assert TokenInfo().silent_ids == frozenset()
