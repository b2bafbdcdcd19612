"""Tiny Llama and Qwen3 targets in memory, completions of theirs, and the stage in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from draftmill.config import Config, parse
from draftmill.schemas import COMPLETIONS, Row, write_rows
from draftmill.stages.extract import Canary, extract_shard
from draftmill.target.model import Tapped
from tests.tiny import config_values

VOCABULARY = 90
KINDS = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_model(kind: str = "llama", seed: int = 3, layers: int = 5, attention: str = "sdpa", **settings: Any) -> Any:
    """Random weights, wide enough that a wrong neighbour or position shows, and as sure of its tokens as a real one."""
    config = KINDS[kind](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.25,
        attn_implementation=attention,
        **settings,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(3)
    return model


@pytest.fixture(scope="session", params=sorted(KINDS))
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


def ids_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model: Any, row: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    """What transformers itself says: hidden_states[tap + 1] of an unpacked, unbatched forward, [tokens, taps, width]."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([list(row)]), output_hidden_states=True, use_cache=False)
    return torch.stack([output.hidden_states[tap + 1][0] for tap in taps], dim=1)


def answered(model: Any, prompt: Sequence[int], tokens: int, temperature: float, seed: int = 0) -> list[int]:
    """Tokens that the model itself chooses after a prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(tokens):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        p = torch.softmax(logits / max(temperature, 1e-6), -1)
        ids.append(int(logits.argmax() if temperature == 0 else torch.multinomial(p, 1, generator=generator)))
    return ids[len(prompt) :]


def completion(number: int, prompt: Sequence[int], output: Sequence[int], **over: Any) -> Row:
    return {
        "prompt_id": f"p{number}",
        "sample": 0,
        "source": "chat",
        "origin": "generated",
        "prompt_ids": list(prompt),
        "output_ids": list(output),
        "loss_mask": None,
        "finish_reason": "length",
        "text": "",
        **over,
    }


class Beat:
    """A heartbeat that only counts, and tells how it ended."""

    ended: str | None = None

    def __init__(self, total: int) -> None:
        self.total, self.rows, self.tokens = total, 0, 0

    def __enter__(self) -> Beat:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.ended = "done" if kind is None else "failed"

    def advance(self, units: int, tokens: int = 0, facts: Mapping[str, Any] | None = None) -> None:
        self.rows += units
        self.tokens += tokens


class Stage:
    """The extract stage over given rows."""

    def __init__(self, folder: Path) -> None:
        self.completions, self.hidden = folder / "completions.parquet", folder / "hidden.safetensors"
        self.beat = Beat(0)

    def run(self, config: Config, tapped: Tapped, rows: Sequence[Row]) -> list[Canary]:
        write_rows(self.completions, COMPLETIONS, rows, {})

        def heartbeat(total: int) -> Beat:
            self.beat = Beat(total)
            return self.beat

        return extract_shard(
            config,
            tapped,
            completions=self.completions,
            hidden=self.hidden,
            heartbeat=heartbeat,  # type: ignore[arg-type]
            provenance={"stage": "extract"},
        )


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def configure() -> Callable[..., Config]:
    def make(temperature: float = 1.0, **hidden: Any) -> Config:
        return parse(config_values(generate={"temperature": temperature}, hidden=hidden))

    return make
