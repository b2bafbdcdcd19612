"""The target's weights: loading, its frozen embedding and head, and a forward that stops at the last tap.

Tap i is the output of decoder layer i (0-based) before the final norm, which transformers calls hidden_states[i + 1];
forward hooks on the layers read just that, and an exception after the last tapped layer ends the pass there, which
holds for every architecture whose decoder is one list of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from draftmill.config import Config, TargetConfig
from draftmill.errors import UserError, reason
from draftmill.target import files

_EMBEDDING = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
_HEAD = ("lm_head.weight", "language_model.lm_head.weight")


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a config's dtype."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def device_of(config: Config) -> torch.device:
    """Where models run. Raises UserError if cuda is asked for and torch sees none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda is configured but torch sees no GPU; run `draftmill gate` to see why.")
    return torch.device(config.device)


def load_model(config: Config) -> Any:
    """The target as a causal language model in evaluation mode on its device. Raises UserError if it cannot be had."""
    from transformers import AutoModelForCausalLM

    target = config.target
    files.check(target)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target.model,
            revision=None if files.is_folder(target) else target.revision,
            dtype=torch_dtype(config.dtype),
            attn_implementation=target.attention,
            trust_remote_code=target.trust_remote_code,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"target.model: {target.model} cannot be loaded: {reason(error)}.") from None
    return model.eval().requires_grad_(False).to(device_of(config))


def load_head(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """The frozen embedding and head, both [vocabulary, width] on the CPU in the target's dtype, without the rest.

    They are one tensor if the target ties them.
    Raises UserError if the weights are not safetensors or hold no embedding.
    """
    embedding = _tensor(config.target, _EMBEDDING)
    if embedding is None:
        raise UserError(f"target.model: no embedding was found in the safetensors of {config.target.model}.")
    head = _tensor(config.target, _HEAD)
    embedding = embedding.to(torch_dtype(config.dtype))
    # Tied models store one matrix; the config alone cannot be trusted to say so, the weights can.
    return embedding, embedding if head is None else head.to(embedding.dtype)


def _tensor(target: TargetConfig, names: Sequence[str]) -> torch.Tensor | None:
    import json

    from safetensors import safe_open

    index = files.file(target, "model.safetensors.index.json")
    where = json.loads(index.read_text())["weight_map"] if index else {}
    for name in names:
        path = files.file(target, where.get(name, "model.safetensors")) if name in where or not where else None
        if path is None:
            continue
        with safe_open(path, framework="pt") as weights:
            if name in weights.keys():  # noqa: SIM118 - safe_open is no mapping
                return torch.as_tensor(weights.get_tensor(name))
    return None


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's list of layers. Raises UserError for an architecture without one."""
    depth = int(model.config.get_text_config().num_hidden_layers)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(lists) != 1:
        raise UserError(f"target.model: {type(model).__name__} does not hold its {depth} decoder layers in one list.")
    return lists[0]


class _LastTapReached(Exception):
    pass


class Tapped:
    """A target whose chosen layers are read while it runs.

    Attributes: `taps`, the layer numbers; `isolates_rows`, whether rows packed in one sequence stay apart when their
    positions restart (false for layers that carry a recurrent state across the boundary).
    """

    def __init__(self, model: Any, taps: Sequence[int]) -> None:
        self.model, self.taps = model, tuple(taps)
        self._layers = decoder_layers(model)
        self._seen: dict[int, torch.Tensor] = {}
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
        self.isolates_rows = all(kind in ("full_attention", "sliding_attention") for kind in kinds)

    @torch.inference_mode()
    def states(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Taps of each row, [tokens, taps, width], from one packed forward that ends after the last tap.

        Rows are concatenated without padding and positions restart at each, by which transformers keeps them apart.
        Raises ValueError if more than one row is given to a model that cannot.
        """
        if len(rows) > 1 and not self.isolates_rows:
            raise ValueError("this target carries state across rows, so rows must be given one at a time")
        device = self.model.device
        ids = torch.tensor([[i for row in rows for i in row]], device=device)
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None].to(device)
        self._run(
            lambda: self.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1), stop=True
        )
        return list(torch.split(self._stacked(), [len(row) for row in rows]))

    @torch.inference_mode()
    def states_and_logits(self, row: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """One row alone through the whole target: its taps [tokens, taps, width] and float32 logits [tokens, vocabulary]."""
        ids = torch.tensor([list(row)], device=self.model.device)
        output = self._run(lambda: self.model(input_ids=ids, use_cache=False), stop=False)
        return self._stacked(), output.logits[0].float()

    def _stacked(self) -> torch.Tensor:
        return torch.stack([self._seen[tap][0] for tap in self.taps], dim=1)

    def _run(self, forward: Callable[[], Any], *, stop: bool) -> Any:
        self._seen.clear()
        handles = [self._layers[tap].register_forward_hook(self._reader(tap, stop)) for tap in self.taps]
        try:
            return forward()
        except _LastTapReached:
            return None
        finally:
            for handle in handles:
                handle.remove()

    def _reader(self, tap: int, stop: bool) -> Callable[..., None]:
        def read(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._seen[tap] = output[0] if isinstance(output, tuple) else output
            if stop and tap == self.taps[-1]:
                raise _LastTapReached

        return read
