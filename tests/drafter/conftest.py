"""Small drafters, targets and hidden-state shards, all from seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.config import DrafterConfig, HiddenConfig
from draftmill.drafter.model import Drafter
from draftmill.drafter.spec import DrafterShape, resolve_shape
from draftmill.hidden_states import HiddenRow, RowKey, write_shard

TARGET: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def target_config() -> dict[str, Any]:
    return dict(TARGET)


@pytest.fixture
def make_shape() -> Callable[..., DrafterShape]:
    def make(*, taps: int = 3, target: dict[str, Any] | None = None, **settings: Any) -> DrafterShape:
        drafter = DrafterConfig(**{"layers": 3, "block_size": 4, **settings})
        return resolve_shape(drafter, HiddenConfig(num_taps=taps), target or TARGET, mask_token_id=7)

    return make


@pytest.fixture
def make_drafter(make_shape: Callable[..., DrafterShape]) -> Callable[..., Drafter]:
    def make(seed: int = 0, **settings: Any) -> Drafter:
        drafter = Drafter(make_shape(**settings)).initialize(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            # Fresh norms are all ones, which would hide a norm that is left out or applied twice.
            for weight in drafter.parameters():
                if weight.dim() == 1:
                    weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
        return drafter.eval()

    return make


@pytest.fixture
def make_shard(tmp_path: Path) -> Callable[..., Path]:
    """Write a shard of random states; token t + 1 is a function of token t, so there is something to learn."""

    def make(name: str, rows: int, *, prompt: int = 3, answer: int = 14, taps: int = 3, width: int = 32, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(50, taps, width, generator=torch.Generator().manual_seed(99))
        made = []
        for number in range(rows):
            start = int(torch.randint(10, 50, (1,), generator=generator))
            length = prompt + answer - number % 3
            ids = (start - 10 + 3 * torch.arange(length)) % 40 + 10
            mask = (torch.arange(length) >= prompt).to(torch.uint8)
            made.append(HiddenRow(RowKey(f"{name}-{number}", 0, "source"), ids.int(), mask, table[ids].bfloat16()))
        path = tmp_path / f"{name}.safetensors"
        write_shard(path, made, {})
        return path

    return make
