"""A ChatML tokenizer whose template treats thinking as Qwen3's does, and rows made for the audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from draftmill.audit.tokens import TokenInfo, token_info
from draftmill.schemas import COMPLETIONS, REJECTED

# The last assistant turn always gets a think block, empty when there is no reasoning; earlier turns lose theirs.
TEMPLATE = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last -%}
{{ '<think>\\n' + (m.reasoning_content or '') | trim + '\\n</think>\\n\\n' + m.content | trim + '<|im_end|>\\n' }}
{%- else -%}
{{ m.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if think_in_prompt is defined and think_in_prompt %}{{ '<think>\\n' }}{% endif -%}
{%- endif -%}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK = ["<think>", "</think>"]


def make_tokenizer(folder: Path) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: i for i, letter in enumerate(sorted(letters))}
    vocabulary["ĊĊ"] = len(vocabulary)  # a blank line is one token, as in Qwen's vocabulary
    core = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n+|[^\n]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in THINK])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def tokens(tokenizer: Any) -> TokenInfo:
    return token_info(tokenizer)


def row(number: int, output_ids: list[int], **over: Any) -> dict[str, Any]:
    return {
        "prompt_id": f"p{number:05}",
        "sample": 0,
        "source": "chat",
        "origin": "generated",
        "prompt_ids": [1000 + number, 7],
        "output_ids": output_ids,
        "loss_mask": None,
        "finish_reason": "stop",
        "text": "some text",
        **over,
    }


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=COMPLETIONS)


def rejections(count: int = 0, source: str = "chat", reason: str = "length") -> pa.Table:
    rows = [{"prompt_id": f"r{i}", "sample": 0, "source": source, "reason": reason, "detail": ""} for i in range(count)]
    return pa.Table.from_pylist(rows, schema=REJECTED)


NO_REJECTIONS = rejections()
