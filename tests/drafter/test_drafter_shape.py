"""The shape: what follows the target, what is refused."""

import pytest

from draftmill.config import DrafterConfig, HiddenConfig
from draftmill.drafter.contract import checkpoint_config, tensor_shapes
from draftmill.drafter.spec import auto_taps, choose_mask_token, resolve_shape, resolve_taps, shape_of_checkpoint
from draftmill.errors import UserError

QWEN36 = {
    "model_type": "qwen3_5",
    "text_config": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 248044,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    },
}


def test_taps_are_those_of_published_drafters():
    assert auto_taps(64, 5) == (1, 16, 31, 46, 61)
    assert auto_taps(36, 5) == (1, 9, 17, 25, 33)
    assert auto_taps(30, 1) == (15,)


def test_taps_agree_with_the_reference_package():
    dflash = pytest.importorskip("dflash.model")
    for depth in range(8, 97):
        for count in range(1, 6):
            assert list(auto_taps(depth, count)) == dflash.build_target_layer_ids(depth, count)


@pytest.mark.parametrize("taps", [[], [3, 3], [5, 2], [-1, 4], [2, 7], [7], [8]])
def test_impossible_taps_are_refused(taps):
    with pytest.raises(UserError, match=r"^hidden\.taps: .* does not fit a target of 8 layers: .* within 0 to 6"):
        resolve_taps(HiddenConfig(taps=taps), 8)


@pytest.mark.parametrize(("depth", "count"), [(2, 1), (4, 2), (6, 5)])
def test_too_many_taps_for_a_shallow_target_are_refused(depth, count):
    with pytest.raises(UserError, match=rf"^hidden\.num_taps: {count} does not fit a target of {depth} layers"):
        resolve_taps(HiddenConfig(num_taps=count), depth)


def test_explicit_taps_up_to_the_last_but_one_layer_are_taken():
    assert resolve_taps(HiddenConfig(taps=[0, 3, 6]), 8) == (0, 3, 6)


def test_qwen36_gives_the_published_tensors():
    drafter = DrafterConfig(heads=32, kv_heads=8, head_dim=128, sliding_layers=4)
    shape = resolve_shape(drafter, HiddenConfig(), QWEN36, 248070)
    shapes = tensor_shapes(shape)
    assert len(shapes) == 58
    assert shapes["fc.weight"] == (5120, 25600)
    assert shapes["layers.4.self_attn.q_proj.weight"] == (4096, 5120)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (1024, 5120)
    assert shapes["layers.0.self_attn.q_norm.weight"] == (128,)
    assert shapes["layers.2.mlp.down_proj.weight"] == (5120, 17408)
    config = checkpoint_config(shape, QWEN36)
    assert config["layer_types"] == ["sliding_attention"] * 4 + ["full_attention"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000000
    assert "partial_rotary_factor" not in str(config)
    assert "mrope" not in str(config)
    assert config["eos_token_id"] == 248044
    assert shape_of_checkpoint(config) == shape


def test_a_mask_token_must_be_chosen_before_a_checkpoint_is_described(make_shape, target_config):
    shape = resolve_shape(DrafterConfig(), HiddenConfig(num_taps=2), target_config)
    assert shape.mask_token_id is None
    with pytest.raises(ValueError, match="mask token"):
        checkpoint_config(shape, target_config)
    assert shape.with_mask_token(9).mask_token_id == 9


def test_an_unused_window_changes_no_shape(make_shape):
    assert make_shape(sliding_window=99) == make_shape(sliding_window=5)
    assert make_shape(sliding_window=99, sliding_layers=1) != make_shape(sliding_window=5, sliding_layers=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, r"drafter\.heads: 3 query heads cannot share 2"),
        ({"head_dim": 9}, r"drafter\.head_dim: 9 is odd"),
        ({"block_size": 256}, r"drafter\.block_size: 256 does not fit"),
        ({"mask_token_id": 50}, r"drafter\.mask_token_id: 50 has no row .* which has 50"),
    ],
)
def test_impossible_settings_are_refused(settings, message, target_config):
    with pytest.raises(UserError, match=message):
        resolve_shape(DrafterConfig(**settings), HiddenConfig(num_taps=2), target_config, 7)


def test_a_target_that_does_not_say_its_width_is_refused(target_config):
    del target_config["intermediate_size"]
    with pytest.raises(UserError, match=r"does not say intermediate_size, so set drafter\.intermediate_size"):
        resolve_shape(DrafterConfig(), HiddenConfig(num_taps=2), target_config, 7)
    shape = resolve_shape(DrafterConfig(intermediate_size=48), HiddenConfig(num_taps=2), target_config, 7)
    assert shape.intermediate_size == 48


def test_the_mask_token_is_the_tokenizers_own_then_an_unused_special_then_a_spare_row():
    special = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<file_sep>": 3, "<|image_pad|>": 4}
    assert choose_mask_token({**special, "<|MASK|>": 9}, {0, 1, 2}, 100, 100) == 9
    assert choose_mask_token(special, {0, 1, 2}, 100, 128) == 3
    assert choose_mask_token(special, {0, 1, 2, 3}, 100, 128) == 100
    with pytest.raises(UserError, match=r"^drafter\.mask_token_id: .* no unused special id"):
        choose_mask_token(special, {0, 1, 2, 3}, 100, 100)
