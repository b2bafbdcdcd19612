"""The checkpoint contract: the files SGLang, vLLM and the dflash package read, as names, shapes and a config.

Engines ignore unexpected tensors without a word and fill a missing rotary base with one of their own, either of which
costs all acceptance; so the contract is written down once, and both the writer and `check` use it. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftmill.drafter.spec import SLIDING, DrafterShape
from draftmill.target.files import text_config

MODEL_FILE, CONFIG_FILE = "model.safetensors", "config.json"

_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint: 3 + 11 a layer. There is no embedding and no head."""
    width = shape.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(shape.taps) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for layer in range(shape.num_layers):
        shapes |= {f"layers.{layer}.{name}.weight": size for name, size in _layer_shapes(shape).items()}
    return shapes


def _layer_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }


def checkpoint_config(shape: DrafterShape, target: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a checkpoint; `target` is the target's own, for its special ids.

    Both rotary forms are written, because each consumer reads only one of them. Raises ValueError without a mask token.
    """
    if shape.mask_token_id is None:
        raise ValueError("the mask token is not chosen yet")
    text = text_config(target)
    sliding = SLIDING in shape.layer_types
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": shape.block_size,
        "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.taps)},
        "num_target_layers": shape.num_target_layers,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "initializer_range": shape.initializer_range,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "max_window_layers": shape.num_layers,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "use_cache": True,
        **{key: text.get(key, target.get(key)) for key in _TOKEN_KEYS},
    }
