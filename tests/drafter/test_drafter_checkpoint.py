"""Checkpoints: same bytes every time, drop-in for the reference package, and faults are named."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftmill.cli import app
from draftmill.drafter.checkpoint import load_drafter, load_trainer, save_drafter, save_trainer
from draftmill.drafter.conformance import check
from draftmill.errors import UserError


@pytest.fixture
def folder(tmp_path, make_drafter, target_config):
    path = tmp_path / "drafter"
    save_drafter(path, make_drafter(sliding_layers=1, sliding_window=9), target_config, {"fingerprint": "abc"})
    return path


def test_a_checkpoint_comes_back_and_is_rounded_once(folder, make_drafter):
    made = make_drafter(sliding_layers=1, sliding_window=9)
    loaded = load_drafter(folder, torch.float32, torch.device("cpu"))
    assert loaded.shape == made.shape
    for name, value in made.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16().float())


def test_saving_twice_gives_equal_bytes(folder, tmp_path, make_drafter, target_config):
    again = tmp_path / "again"
    save_drafter(again, make_drafter(sliding_layers=1, sliding_window=9), target_config, {"fingerprint": "abc"})
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_the_files_have_one_metadata_key_and_bfloat16(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert json.loads((folder / "config.json").read_text())["draftmill"] == {"fingerprint": "abc"}


def test_the_reference_package_loads_it_strictly_and_agrees(folder):
    """from_pretrained of the package, its class and its config, on the files as they are."""
    dflash = pytest.importorskip("dflash.model")
    reference, info = dflash.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    drafter = load_drafter(folder, torch.float32, torch.device("cpu"))
    assert reference.block_size == 4
    assert reference.mask_token_id == 7
    assert tuple(reference.target_layer_ids) == drafter.shape.taps
    taps, block, head = torch.randn(1, 30, 3, 32), torch.randn(1, 1, 4, 32), torch.randn(50, 32)
    theirs = reference.eval()(
        position_ids=torch.arange(34)[None], noise_embedding=block[0], target_hidden=taps.flatten(-2)
    )
    ours = drafter(taps, block, torch.tensor([[30]]))[:, 0]
    torch.testing.assert_close(ours @ head.T, theirs @ head.T, atol=1e-4, rtol=0)


def test_a_good_checkpoint_has_no_problem(folder, target_config):
    assert check(folder, target_config) == []
    assert check(folder) == []


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({key: v for key, v in config.items() if v != "absent"}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_theta": "absent"}, "rope_theta is missing; engines that read only this form would use a base"),
        ({"rope_parameters": "absent"}, "rope_parameters.rope_theta is missing"),
        ({"rope_theta": 1e6}, "rope_theta is 1000000.0 but rope_parameters.rope_theta is 5000.0"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling asks for type yarn but rope_parameters for default"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is set"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, but num_hidden_layers is 3"),
        ({"layer_types": ["other"] * 3}, "layer_types holds other"),
        ({"use_sliding_window": False}, "use_sliding_window true"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "engines look for ['DFlashDraftModel']"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"dflash_config": {"mask_token_id": 50, "target_layer_ids": [1, 3, 5]}}, "mask_token_id 50 has no row"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3, 7]}}, "[1, 3, 7] must rise strictly"),
        ({"dflash_config": {"mask_token_id": 7}}, "config.json lacks target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3, 5], "block_size": 8}}, "4 at the top and 8"),
        ({"num_hidden_layers": 10**9}, "value of the wrong type: num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": float("inf")}, "value of the wrong type"),
        ({"rope_parameters": [1]}, "value of the wrong type"),
        ({"rope_scaling": "yarn"}, "value of the wrong type"),
        ({"dflash_config": "x"}, "value of the wrong type"),
        ({"rope_theta": "x"}, "value of the wrong type"),
        ({"layer_types": [["full_attention"]] * 3}, "value of the wrong type"),
        ({"num_hidden_layers": 4}, "model.safetensors lacks layers.3.input_layernorm.weight"),
        (
            {"intermediate_size": 96},
            "layers.0.mlp.down_proj.weight has shape [32, 64], but the config asks for [32, 96]",
        ),
        ({"vocab_size": 51}, "vocab_size is 51, but the target says 50"),
        ({"num_target_layers": 9}, "num_target_layers is 9, but the target says 8"),
    ],
)
def test_each_fault_of_the_config_is_named(folder, target_config, changes, problem):
    change_config(folder, **changes)
    found = check(folder, target_config)
    assert any(problem in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.pop("norm.weight"), "lacks norm.weight"),
        (lambda w: w.update({"lm_head.weight": torch.ones(2)}), "holds lm_head.weight, which no engine reads"),
        (lambda w: w["fc.weight"].view(-1)[3].fill_(float("nan")), "fc.weight holds values that are not finite"),
        (lambda w: w.update({"norm.weight": torch.ones(32, dtype=torch.int32)}), "no floating-point weight"),
    ],
)
def test_each_fault_of_the_tensors_is_named(folder, change, problem):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    found = check(folder)
    assert [problem in sentence for sentence in found] == [True], found


def test_missing_and_broken_files_are_one_sentence(tmp_path, folder):
    assert check(tmp_path / "nothing") == [f"{tmp_path}/nothing/config.json cannot be read: No such file or directory."]
    (folder / "model.safetensors").write_bytes(b"broken")
    (problem,) = check(folder)
    assert problem.startswith(f"{folder}/model.safetensors cannot be read")
    with pytest.raises(UserError, match="cannot be read"):
        load_drafter(folder, torch.float32, torch.device("cpu"))


def test_a_checkpoint_of_other_tensors_is_not_loaded(folder):
    change_config(folder, intermediate_size=96)
    with pytest.raises(UserError, match="run `draftmill check"):
        load_drafter(folder, torch.float32, torch.device("cpu"))


def test_the_command_says_what_is_wrong_and_fails(folder, tmp_path, target_config):
    (tmp_path / "config.json").write_text(json.dumps(target_config))
    good = CliRunner().invoke(app, ["check", str(folder), "--target", str(tmp_path)])
    assert good.exit_code == 0
    assert "keeps the contract and fits" in good.output
    change_config(folder, model_type="llama")
    bad = CliRunner().invoke(app, ["check", str(folder)])
    assert bad.exit_code == 1
    assert bad.output.startswith("model_type is 'llama'")


def test_a_trainer_state_comes_back_and_damage_is_refused(tmp_path):
    path = tmp_path / "trainer.safetensors"
    save_trainer(path, {"a": torch.arange(3.0)}, {"step": 4, "loss": 0.1 + 0.2})
    tensors, state = load_trainer(path)
    assert tensors["a"].tolist() == [0, 1, 2]
    assert state == {"step": 4, "loss": 0.1 + 0.2}
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="not a readable trainer state"):
        load_trainer(path)
