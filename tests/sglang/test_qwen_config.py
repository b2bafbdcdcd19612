"""config/qwen3.6-27b.yaml: it is valid, its server has the flags that the model needs, its drafter has the right shape."""

from pathlib import Path
from typing import Any

from draftmill.config import load
from draftmill.drafter.spec import resolve_shape
from draftmill.engines.base import Sampling
from draftmill.engines.sampling import Mix
from draftmill.engines.server_command import wanted
from draftmill.preflight_servers import server_needs

CONFIG = Path(__file__).parents[2] / "config/qwen3.6-27b.yaml"
# What resolve_shape reads of the target's config.json.
TARGET: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.25},
        "eos_token_id": 248044,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
}


def test_the_server_has_the_flags_of_a_hybrid_model() -> None:
    config = load(CONFIG)
    command = wanted(config, "identity").command
    flags = dict(zip(command, [*command[1:], ""], strict=True))
    assert flags["--model-path"] == "Qwen/Qwen3.6-27B"
    assert flags["--revision"] == config.target.revision
    assert flags["--dtype"] == "bfloat16"
    assert flags["--context-length"] == "12288"
    assert flags["--tp-size"] == "1"
    assert "--disable-radix-cache" in command
    assert flags["--mamba-ssm-dtype"] == "float32"
    running = int(flags["--max-running-requests"])
    assert int(flags["--cuda-graph-max-bs-decode"]) == running
    assert running < config.generate.sglang.in_flight <= 2 * running
    assert "{port}" in command


def test_the_card_has_room_for_what_the_flags_ask() -> None:
    """The arithmetic in the file's comment, from the shapes: states of all running rows and the KV tokens it wants."""
    config, gib = load(CONFIG), 2**30
    flags = config.generate.sglang.server.flags
    state = 48 * (48 * 128 * 128 * 4 + (48 * 128 + 2 * 16 * 128) * 3 * 2)
    kv = 16 * 2 * 4 * 256 * 2
    assert kv == 64 * 1024
    assert 145 * 2**20 < state < 150 * 2**20
    weights = 27.8e9 * 2
    left = 95 * gib - weights - 10 * gib - (int(flags["max-running-requests"]) + 1) * state
    assert left / kv > 300_000
    assert config.generate.sglang.server.min_kv_tokens is not None
    assert config.generate.sglang.server.min_kv_tokens < left / kv


def test_sampling_is_the_model_cards() -> None:
    config = load(CONFIG)
    mix = Mix(config.generate)
    found = {mix.setting((f"p{n}", 0), "any").name: mix.setting((f"p{n}", 0), "any") for n in range(200)}
    assert found["thinking"].sampling == Sampling(8192, 1.0, 0.95, 20, 0.0)
    assert found["thinking_precise"].sampling == Sampling(8192, 0.6, 0.95, 20, 0.0)
    assert found["direct"].sampling == Sampling(2048, 0.7, 0.8, 20, 0.0)
    assert found["direct"].template_args == {"enable_thinking": False}
    assert found["thinking"].template_args == {}


def test_the_drafter_is_32_8_128_on_five_taps() -> None:
    config = load(CONFIG)
    shape = resolve_shape(config.drafter, config.hidden, TARGET)
    assert shape.taps == (1, 16, 31, 46, 61)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (32, 8, 128)
    assert shape.mask_token_id == 248070
    assert list(shape.layer_types) == ["sliding_attention"] * 4 + ["full_attention"]


def test_four_servers_are_reckoned_for() -> None:
    config = load(CONFIG)
    need = server_needs(config, gpus=4)
    assert need.servers == 4
    assert need.memory == 4 * server_needs(config, gpus=1).memory
