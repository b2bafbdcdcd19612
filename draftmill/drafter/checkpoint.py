"""Drafter checkpoints on disk: what engines load, and what training goes on from.

`model.safetensors` and `config.json` follow the contract. `resume/trainer.safetensors` holds the optimiser with its
float32 masters, and one metadata value with whatever the loop needs to go on; the same file serves as the journal inside
a window. Objects are functions of their inputs, so no time, host or rate is in any of them, and each safetensors file has
one metadata key, because several are written in no fixed order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from draftmill.canonical import canonical_json
from draftmill.drafter.contract import CONFIG_FILE, MODEL_FILE, checkpoint_config, tensor_shapes
from draftmill.drafter.model import Drafter
from draftmill.drafter.spec import shape_of_checkpoint
from draftmill.errors import UserError, reason
from draftmill.store.local import publish_text, publishing

# In a folder of its own: engines load every *.safetensors beside a model as its weights.
TRAINER_FILE, TRAIN_FILE = "resume/trainer.safetensors", "train.json"
_METADATA_KEY = "draftmill"


def save_drafter(folder: Path, drafter: Drafter, target: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Publish a drafter's weights in bfloat16 and its config.json; `target` is the target's config.json."""
    config = {**checkpoint_config(drafter.shape, target), _METADATA_KEY: dict(provenance)}
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in drafter.state_dict().items()
    }
    with publishing(folder / MODEL_FILE) as temporary:
        # Older transformers refuse a file without this key, and it must be the only one.
        save_file(weights, temporary, metadata={"format": "pt"})
    write_json(folder / CONFIG_FILE, config)


def load_drafter(folder: Path, dtype: torch.dtype, device: torch.device) -> Drafter:
    """A drafter from a checkpoint folder, in evaluation mode. Raises UserError if it is incomplete or does not fit."""
    shape = shape_of_checkpoint(read_json(folder / CONFIG_FILE))
    drafter = Drafter(shape)
    try:
        weights = load_file(folder / MODEL_FILE)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / MODEL_FILE} cannot be read: {reason(error)}.") from None
    if {name: tuple(value.shape) for name, value in weights.items()} != tensor_shapes(shape):
        raise UserError(f"{folder} does not hold the tensors its config.json asks for: run `draftmill check {folder}`.")
    drafter.load_state_dict(weights)
    return drafter.to(device, dtype).eval().requires_grad_(False)


def save_trainer(path: Path, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Publish the optimiser's tensors together with the loop's state (plain JSON values)."""
    with publishing(path) as temporary:
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in tensors.items()},
            temporary,
            metadata={_METADATA_KEY: canonical_json(state)},
        )


def load_trainer(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What `save_trainer` wrote. Raises UserError if the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads(file.metadata()[_METADATA_KEY])
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118 - safe_open is no mapping
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not a readable trainer state ({reason(error)}): delete it and build again."
        ) from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Publish a JSON file for people and programs: sorted keys, two blanks of indentation."""
    publish_text(path, json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object.")
    return value
