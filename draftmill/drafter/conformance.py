"""`draftmill check`: does a checkpoint keep the contract, and does it fit its target? No model is built, no GPU used.

Every difference it looks for is one that some engine accepts in silence and pays for with all acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from draftmill.drafter.checkpoint import read_json
from draftmill.drafter.contract import CONFIG_FILE, MODEL_FILE, tensor_shapes
from draftmill.drafter.spec import FULL, SLIDING, DrafterShape, rope_theta, shape_of_checkpoint, taps_fit
from draftmill.errors import UserError, reason
from draftmill.target.files import text_config

# Keys that engines would apply to the drafter's heads although it is trained without them.
_FOREIGN_ROPE = ("partial_rotary_factor", "mrope_section")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT_NAMES = ("BF16", "F16", "F32")  # as safetensors spells them


def check(folder: Path, target: Mapping[str, Any] | None = None, *, values: bool = True) -> list[str]:
    """All problems of a checkpoint folder, each a sentence; empty if it may be served.

    `target` is the target's config.json; without it only the checkpoint's own consistency is checked. Without `values`
    only names, shapes and types of the weights are read.
    """
    try:
        return problems_of(folder, target, values=values)
    except UserError as error:
        return [str(error)]


def problems_of(folder: Path, target: Mapping[str, Any] | None = None, *, values: bool = True) -> list[str]:
    """The same for files that can be read. Raises UserError for others, out of the OSError where there was one."""
    config = read_json(folder / CONFIG_FILE)
    try:
        shape = shape_of_checkpoint(config)
        problems = list(_config_problems(config, shape))
    except UserError as error:
        return [str(error)]
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        return [f"The checkpoint's {CONFIG_FILE} has a value of the wrong type: {reason(error)}."]
    problems += _tensor_problems(folder / MODEL_FILE, shape, values)
    return problems if target is None else problems + list(_target_problems(shape, text_config(target)))


def _config_problems(config: Mapping[str, Any], shape: DrafterShape) -> Iterator[str]:
    if config.get("architectures") != ["DFlashDraftModel"]:
        yield f"architectures is {config.get('architectures')}, but engines look for ['DFlashDraftModel']."
    if config.get("model_type") != "qwen3":
        yield f"model_type is {config.get('model_type')!r}, but the drafter's layers are of type 'qwen3'."
    yield from _rope_problems(config)
    yield from _layer_type_problems(config, shape)
    yield from _tap_problems(shape)
    if shape.mask_token_id is None or not 0 <= shape.mask_token_id < shape.vocab_size:
        yield f"mask_token_id {shape.mask_token_id} has no row in an embedding of {shape.vocab_size}."
    nested = (config.get("dflash_config") or {}).get("block_size")
    if nested is not None and config.get("block_size") not in (None, nested):
        yield f"block_size is {config['block_size']} at the top and {nested} in dflash_config."
    if shape.block_size < 2:
        yield f"block_size {shape.block_size} leaves no slot to propose a token in."


def _rope_problems(config: Mapping[str, Any]) -> Iterator[str]:
    parameters = config.get("rope_parameters") or {}
    old, new = config.get("rope_theta"), parameters.get("rope_theta")
    if old is None or new is None:
        missing = "rope_theta" if old is None else "rope_parameters.rope_theta"
        yield f"{missing} is missing; engines that read only this form would use a base of their own."
    elif float(old) != float(new):
        yield f"rope_theta is {old} but rope_parameters.rope_theta is {new}."
    scaling = (config.get("rope_scaling") or {}).get("rope_type", "default")
    if scaling != parameters.get("rope_type", "default"):
        yield f"rope_scaling asks for type {scaling} but rope_parameters for {parameters.get('rope_type', 'default')}."
    for key in _FOREIGN_ROPE:
        if any(key in (part or {}) for part in (config, parameters, config.get("rope_scaling"))):
            yield f"{key} is set; some engines would apply it to the drafter, which rotates whole heads."


def _layer_type_problems(config: Mapping[str, Any], shape: DrafterShape) -> Iterator[str]:
    if len(shape.layer_types) != shape.num_layers:
        yield f"layer_types names {len(shape.layer_types)} layers, but num_hidden_layers is {shape.num_layers}."
    unknown = sorted(set(shape.layer_types) - {FULL, SLIDING})
    if unknown:
        yield f"layer_types holds {', '.join(unknown)}; only {FULL} and {SLIDING} are known."
    if SLIDING in shape.layer_types and not (shape.sliding_window > 0 and config.get("use_sliding_window")):
        yield "layer_types has sliding layers, so sliding_window must be positive and use_sliding_window true."


def _tap_problems(shape: DrafterShape) -> Iterator[str]:
    if not taps_fit(shape.taps, shape.num_target_layers):
        yield (
            f"target_layer_ids {list(shape.taps)} must rise strictly within 0 to {shape.num_target_layers - 2} for a "
            f"target of {shape.num_target_layers} layers."
        )


def _tensor_problems(path: Path, shape: DrafterShape, values: bool) -> Iterator[str]:
    expected = tensor_shapes(shape)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            yield from (f"{path.name} lacks {name}." for name in sorted(set(expected) - names))
            yield from (f"{path.name} holds {name}, which no engine reads." for name in sorted(names - set(expected)))
            for name in sorted(names & set(expected)):
                if values:
                    yield from _value_problems(name, file.get_tensor(name), expected[name])
                else:
                    yield from _header_problems(name, file.get_slice(name), expected[name])
    except SafetensorError as error:
        yield f"{path} cannot be read: {reason(error)}."
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}.") from None


def _header_problems(name: str, part: Any, expected: tuple[int, ...]) -> Iterator[str]:
    if tuple(part.get_shape()) != expected:
        yield f"{name} has shape {list(part.get_shape())}, but the config asks for {list(expected)}."
    if part.get_dtype() not in _FLOAT_NAMES:
        yield f"{name} has type {part.get_dtype()}, which is no floating-point weight."


def _value_problems(name: str, value: torch.Tensor, expected: tuple[int, ...]) -> Iterator[str]:
    if tuple(value.shape) != expected:
        yield f"{name} has shape {list(value.shape)}, but the config asks for {list(expected)}."
    if value.dtype not in _FLOATS:
        yield f"{name} has type {value.dtype}, which is no floating-point weight."
    elif not bool(torch.isfinite(value).all()):
        yield f"{name} holds values that are not finite."


def _target_problems(shape: DrafterShape, text: Mapping[str, Any]) -> Iterator[str]:
    pairs = {
        "hidden_size": (shape.hidden_size, text.get("hidden_size")),
        "vocab_size": (shape.vocab_size, text.get("vocab_size")),
        "num_target_layers": (shape.num_target_layers, text.get("num_hidden_layers")),
        "rope_theta": (shape.rope_theta, rope_theta(text)),
    }
    for name, (own, wanted) in pairs.items():
        if own != wanted:
            yield f"{name} is {own}, but the target says {wanted}."
