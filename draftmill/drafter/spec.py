"""The drafter's shape: every number that decides its tensors and masks, resolved from the config and the target.

No torch here, because the shape is part of the train stage's spec and is needed whenever the Snakefile is parsed. All
impossible settings are refused here, before a GPU starts, so that the modules behind can trust the shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftmill.config import DrafterConfig, HiddenConfig
from draftmill.errors import UserError
from draftmill.target.files import text_config

FULL, SLIDING = "full_attention", "sliding_attention"

# A tokenizer's own mask token; serving engines look the first name up and hold it against the checkpoint's mask id.
_MASK_NAMES = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]")
# Engines replace the embeddings of these tokens by those of images or sound.
_MEDIA = ("image", "video", "audio", "vision")
_DEFAULT_ROPE_THETA = 10000.0
# Of a drafter; a few are usual.
_MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """A DFlash drafter in numbers. Sizes are in elements, `max_positions` and `sliding_window` in tokens.

    Attributes: `taps`, the target layers read (0-based, output of the layer, increasing); `mask_token_id`, None only
    until a tokenizer was read (see choose_mask_token); `sliding_window`, 0 if `layer_types` has no sliding layer.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int
    rope_theta: float
    rms_norm_eps: float
    initializer_range: float
    vocab_size: int
    max_positions: int
    taps: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int | None

    def window_of(self, layer: int) -> int | None:
        """The attention window of a layer in tokens; None if it sees everything. Windowed layers are causal."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def with_mask_token(self, token_id: int) -> DrafterShape:
        """The same shape with its mask token. Raises UserError if the embedding has no such row."""
        _check_mask_token(token_id, self.vocab_size)
        return replace(self, mask_token_id=token_id)

    def describe(self) -> dict[str, Any]:
        """The shape as plain JSON values, for stage specs."""
        values = asdict(self)
        return {**values, "layer_types": list(self.layer_types), "taps": list(self.taps)}


def resolve_shape(
    drafter: DrafterConfig, hidden: HiddenConfig, target: Mapping[str, Any], mask_token_id: int | None = None
) -> DrafterShape:
    """The shape for a target, given its config.json.

    A configured mask token wins over `mask_token_id`. The target's rotary scaling and partial rotation are left behind
    on purpose: engines apply them to the drafter or refuse it. Raises UserError for settings that cannot work.
    """
    text = text_config(target)
    width, depth = _need(text, "hidden_size"), _need(text, "num_hidden_layers")
    heads = drafter.heads or _need(text, "num_attention_heads")
    shape = DrafterShape(
        hidden_size=width,
        intermediate_size=drafter.intermediate_size or _need(text, "intermediate_size"),
        num_layers=drafter.layers,
        num_heads=heads,
        num_kv_heads=drafter.kv_heads or int(text.get("num_key_value_heads") or heads),
        head_dim=drafter.head_dim or int(text.get("head_dim") or width // _need(text, "num_attention_heads")),
        layer_types=(SLIDING,) * drafter.sliding_layers + (FULL,) * (drafter.layers - drafter.sliding_layers),
        # Zero where no layer has a window, so that an unused setting changes no fingerprint.
        sliding_window=drafter.sliding_window if drafter.sliding_layers else 0,
        rope_theta=rope_theta(text),
        rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
        initializer_range=float(text.get("initializer_range") or 0.02),
        vocab_size=_need(text, "vocab_size"),
        max_positions=_need(text, "max_position_embeddings"),
        taps=resolve_taps(hidden, depth),
        num_target_layers=depth,
        block_size=drafter.block_size,
        mask_token_id=mask_token_id if drafter.mask_token_id is None else drafter.mask_token_id,
    )
    _check(shape)
    return shape


def _need(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int):
        settable = {"intermediate_size": "drafter.intermediate_size", "num_attention_heads": "drafter.heads"}
        hint = f"set {settable[key]}" if key in settable else "draftmill cannot build a drafter for it"
        raise UserError(f"target.model: its config.json does not say {key}, so {hint}.")
    return value


def rope_theta(text: Mapping[str, Any]) -> float:
    """The rotary base of a text config, in the old form, the new one, or the new one by layer type."""
    parameters = text.get("rope_parameters") or {}
    candidates = (text, parameters, parameters.get(FULL) or {})
    found = [part["rope_theta"] for part in candidates if part.get("rope_theta") is not None]
    return float(found[0]) if found else _DEFAULT_ROPE_THETA


def resolve_taps(hidden: HiddenConfig, depth: int) -> tuple[int, ...]:
    """The tapped layers of a target with `depth` layers. Raises UserError if they cannot all be tapped.

    The last layer is no tap: engines and transformers disagree on whether its output has passed the final norm.
    """
    taps = auto_taps(depth, hidden.num_taps) if hidden.taps == "auto" else tuple(hidden.taps)
    if taps_fit(taps, depth):
        return taps
    cause = f"hidden.num_taps: {hidden.num_taps}" if hidden.taps == "auto" else f"hidden.taps: {list(taps)}"
    raise UserError(
        f"{cause} does not fit a target of {depth} layers: taps must rise strictly within 0 to {depth - 2} "
        "(the last layer cannot be tapped)."
    )


def taps_fit(taps: Sequence[int], depth: int) -> bool:
    """Whether taps rise strictly and stay below the last layer of a target with `depth` layers."""
    rising = all(a < b for a, b in itertools.pairwise(taps))
    return bool(taps) and rising and taps[0] >= 0 and taps[-1] < depth - 1


def auto_taps(depth: int, count: int) -> tuple[int, ...]:
    """`count` layers spread evenly from 1 to depth - 3, the rule that DFlash checkpoints are trained with.

    One tap is the middle layer. For 64 layers and 5 taps: 1, 16, 31, 46, 61.
    """
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + k * (depth - 4) / (count - 1)) for k in range(count))


def _check(shape: DrafterShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise UserError(
            f"drafter.heads: {shape.num_heads} query heads cannot share {shape.num_kv_heads} key heads evenly; "
            "make drafter.heads a multiple of drafter.kv_heads."
        )
    if shape.head_dim % 2:
        raise UserError(f"drafter.head_dim: {shape.head_dim} is odd, but rotary positions need an even width.")
    if shape.block_size >= shape.max_positions:
        raise UserError(
            f"drafter.block_size: {shape.block_size} does not fit the target's {shape.max_positions} positions."
        )
    if shape.mask_token_id is not None:
        _check_mask_token(shape.mask_token_id, shape.vocab_size)


def _check_mask_token(token_id: int, rows: int) -> None:
    if not 0 <= token_id < rows:
        raise UserError(
            f"drafter.mask_token_id: {token_id} has no row in the target's embedding, which has {rows}; "
            "choose an unused special id below that."
        )


def choose_mask_token(
    special: Mapping[str, int], used: Collection[int], tokenizer_size: int, embedding_rows: int
) -> int:
    """The mask token of a target: an id that no prompt and no answer contains.

    In order: the tokenizer's own mask token; the highest unused special id; the first embedding row past the tokenizer.
    `special` maps the text of every special or added token to its id, `used` holds the ids that the chat template
    writes or that end an answer. Raises UserError if the vocabulary has none of the three.
    """
    for name in _MASK_NAMES:
        if name in special and special[name] < embedding_rows:
            return special[name]
    free = [i for text, i in special.items() if i not in used and not _is_media(text)]
    candidates = [max(free, default=-1), tokenizer_size]
    for token_id in candidates:
        if 0 <= token_id < embedding_rows:
            return token_id
    raise UserError(
        "drafter.mask_token_id: the target's vocabulary has no unused special id, so set one that its prompts and "
        "answers never contain."
    )


def _is_media(text: str) -> bool:
    return any(word in text.lower() for word in _MEDIA)


def shape_of_checkpoint(config: Mapping[str, Any]) -> DrafterShape:
    """The shape that a checkpoint's config.json describes. Raises UserError naming what it lacks."""
    dflash = config.get("dflash_config") or {}
    try:
        layers = int(config["num_hidden_layers"])
        if layers > _MOST_LAYERS:  # all their tensors would be named one by one
            raise ValueError(f"num_hidden_layers is {layers}")
        return DrafterShape(
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=layers,
            num_heads=int(config["num_attention_heads"]),
            num_kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config["head_dim"]),
            layer_types=tuple(config.get("layer_types") or (FULL,) * layers),
            sliding_window=int(config.get("sliding_window") or 0),
            rope_theta=rope_theta(config),
            rms_norm_eps=float(config["rms_norm_eps"]),
            initializer_range=float(config.get("initializer_range") or 0.02),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config["max_position_embeddings"]),
            taps=_integers(dflash["target_layer_ids"]),
            num_target_layers=int(config["num_target_layers"]),
            block_size=int(dflash.get("block_size") or config["block_size"]),
            mask_token_id=int(dflash["mask_token_id"]),
        )
    except KeyError as error:
        raise UserError(f"The checkpoint's config.json lacks {error.args[0]}, so it is no DFlash drafter.") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"The checkpoint's config.json has a value of the wrong type: {error}.") from None


def _integers(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
