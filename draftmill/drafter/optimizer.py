"""AdamW on float32 master weights, and its state as named tensors.

On a CPU the drafter itself is float32 and is its own master. On a GPU the drafter is bfloat16, whose eight bits would
swallow most updates, so a float32 copy is updated and rounded back after each step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


class MasterAdamW:
    """The optimiser of a module's parameters."""

    def __init__(self, module: nn.Module, betas: tuple[float, float], weight_decay: float, dtype: torch.dtype) -> None:
        """Takes a float32 module, keeps its weights as masters and casts it to `dtype`.

        Weight decay is applied to matrices only.
        """
        self._masters = {name: self._master(value, dtype) for name, value in module.named_parameters()}
        module.to(dtype)
        self._live = dict(module.named_parameters())
        matrices = [value for value in self._masters.values() if value.dim() > 1]
        vectors = [value for value in self._masters.values() if value.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas)

    @staticmethod
    def _master(value: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        return value if dtype == torch.float32 else value.detach().clone()

    def gradients(self) -> list[torch.Tensor]:
        """The live gradients, one a parameter, zeros where no backward pass has reached."""
        for value in self._live.values():
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        return [value.grad for value in self._live.values() if value.grad is not None]

    def step(self, learning_rate: float, clip_norm: float) -> float:
        """Update all parameters once, clear the gradients, and return the gradient norm before clipping."""
        for name, value in self._live.items():
            if self._masters[name] is not value:
                self._masters[name].grad = None if value.grad is None else value.grad.float()
                value.grad = None
        norm = float(nn.utils.clip_grad_norm_(self._masters.values(), clip_norm))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._publish()
        return norm

    @torch.no_grad()
    def _publish(self) -> None:
        for name, value in self._live.items():
            master = self._masters[name]
            if master is not value:
                value.copy_(master)
            master.grad = value.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Masters, moments and step counts as named tensors: `master.<name>`, `exp_avg.<name>` and so on."""
        tensors = {f"master.{name}": value.detach() for name, value in self._masters.items()}
        for name, value in self._masters.items():
            moments = self._adamw.state.get(value)
            if moments:
                tensors |= {f"{kind}.{name}": moments[kind] for kind in (*_MOMENTS, _STEP)}
        return {name: value.contiguous() for name, value in tensors.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` gave. Raises KeyError if a parameter is missing from it."""
        for name, value in self._masters.items():
            value.copy_(state[f"master.{name}"])
            if f"{_STEP}.{name}" in state:
                moments = {kind: state[f"{kind}.{name}"].to(value.device).clone() for kind in _MOMENTS}
                self._adamw.state[value] = {_STEP: state[f"{_STEP}.{name}"].clone(), **moments}
        self._publish()
