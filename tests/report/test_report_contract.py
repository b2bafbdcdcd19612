"""The report reads what the train and evaluate stages really write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftmill.config import DrafterConfig, EvaluateConfig, HiddenConfig, TrainConfig
from draftmill.drafter.checkpoint import TRAIN_FILE
from draftmill.drafter.model import Drafter
from draftmill.drafter.spec import resolve_shape
from draftmill.hidden_states import HiddenRow, RowKey, write_shard
from draftmill.stages.evaluate import HeldOutPrompt, evaluate_drafter
from draftmill.stages.train import train_window

from .conftest import Page, RunFiles, provenance

TARGET = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
}
SHAPE = resolve_shape(DrafterConfig(layers=1, block_size=4), HiddenConfig(taps=[0, 2]), TARGET, mask_token_id=7)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def shard(path: Path, rows: int) -> Path:
    made = []
    for number in range(rows):
        mask = (torch.arange(16) >= 4).to(torch.uint8)
        key = RowKey(f"{path.stem}-{number}", 0, "s")
        made.append(HiddenRow(key, torch.randint(10, 50, (16,)).int(), mask, torch.randn(16, 2, 32).bfloat16()))
    write_shard(path, made, {})
    return path


def train(store: Path, window: int, previous: Path | None) -> Path:
    output = store / f"drafter/real/window-{window}"
    matrix = torch.randn(50, 32)
    train_window(
        hidden=[shard(store / f"hidden/{window}.safetensors", 6)],
        held_out=[shard(store / "hidden/held-out/h.safetensors", 3)],
        previous=previous,
        output=output,
        journal=store / "journal",
        shape=SHAPE,
        target=TARGET,
        embed=matrix,
        head=matrix,
        config=TrainConfig(epochs=2, anchors=4, batch_rows=2, max_length=32),
        span=(window / 2, (window + 1) / 2),
        device=torch.device("cpu"),
        provenance=provenance("train", window=window),
    )
    return output


def test_windows_and_evaluation_as_the_stages_write_them(make_run: Callable[..., RunFiles]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    run = make_run()
    first = train(run.store, 0, None)
    run.train = [folder / TRAIN_FILE for folder in (first, train(run.store, 1, first))]
    written = evaluate_drafter(
        prompts=[HeldOutPrompt(f"p{n}", f"source-{n}", [10 + n, 12, 13]) for n in range(2)],
        drafter=Drafter(SHAPE).initialize(0).eval(),
        target=LlamaForCausalLM(LlamaConfig(**TARGET)).eval(),
        stop=[],
        config=EvaluateConfig(max_new_tokens=9, prompt_lookup_tokens=3, bootstrap=50),
        context_length=64,
        exact=True,
        output=run.evaluation_path,
        provenance=provenance("evaluate"),
    )
    run.evaluation = json.loads(run.evaluation_path.read_text())
    page = Page(run.build())
    assert "12 steps in 2 windows of hidden states, on 12 rows; 3 held-out rows" in page.text
    assert f"{written['drafter']['target_forwards']} forwards for {written['drafter']['tokens']} tokens" in page.text
    assert "2 of 2 answers equal the target's own" in page.text
    assert page.text.count("source-1") == 1
    assert page.data("figures")["plot-loss"]["data"][0]["x"] == list(range(1, 13))
