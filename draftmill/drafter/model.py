"""The DFlash drafter: a few decoder layers that fill a block of masked slots in one forward.

A block is [anchor, mask, mask, ...] at the positions of the anchor and its successors. Every layer attends to the
context, which is the target's tapped states of all tokens before the anchor, and to the block itself. Embedding and
head are the target's own and stay outside. Parameter names are those of the checkpoint contract (drafter/contract.py).

There are two forwards over the same layers: `forward` trains many blocks of many rows at once behind an explicit mask,
`propose` decodes one block behind a cache of context keys and values. They must agree, which a test holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from draftmill.drafter.masks import block_mask, row_mask
from draftmill.drafter.spec import DrafterShape

Rotation = tuple[torch.Tensor, torch.Tensor]
MaskBuilder = Callable[[int | None], torch.Tensor | None]


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension, in float32 whatever the input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., width]."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Rotary:
    """Rotary position angles over the full width of a head, halves rotated against each other.

    No module and no buffer: a cast to bfloat16 would round the frequencies, which ruins far positions.
    """

    def __init__(self, shape: DrafterShape) -> None:
        exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        self._frequencies = 1.0 / shape.rope_theta**exponent

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Cosine and sine [..., 1, head_dim] of positions [...], to be broadcast over heads."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions.float()[..., None] * self._frequencies
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn [..., heads, head_dim] by a rotation."""
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention of block queries over context and block keys, which share their projections."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim, self.groups = shape.head_dim, shape.num_heads // shape.num_kv_heads
        width, queries, keys = shape.hidden_size, shape.num_heads * self.head_dim, shape.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, tokens, kv_heads, head_dim] of x [batch, tokens, width]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        values = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(keys), rotation), values

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from x [batch, queries, width]; `context` holds keys and values of `keys_values`.

        `mask` is boolean, [batch or 1, 1, queries, context + queries], true where visible; None: everything is.
        """
        queries = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rotation)
        own = self.keys_values(x, rotation)
        keys, values = (torch.cat(pair, dim=1) for pair in zip(context, own, strict=True))
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2), self._share(keys), self._share(values), attn_mask=mask
        )
        return torch.as_tensor(self.o_proj(mixed.transpose(1, 2).flatten(-2)))

    def _share(self, x: torch.Tensor) -> torch.Tensor:
        # Masked kernels take no grouped heads on every device, so key heads are repeated for their query heads.
        return x.transpose(1, 2).repeat_interleave(self.groups, dim=1)


class MLP(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., width] to the same shape."""
        return torch.as_tensor(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One pre-norm decoder layer. The context enters attention as it is, past this layer's input norm."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Map block states [batch, queries, width] to the same shape; see Attention.forward."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, context, mask)
        return torch.as_tensor(x + self.mlp(self.post_attention_layernorm(x)))


class ContextCache:
    """Keys and values of the verified context, layer by layer. It only grows: drafts never enter it."""

    def __init__(self, layers: int) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layers
        self.length = 0

    def extend(self, layer: int, new: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Append keys and values [1, tokens, kv_heads, head_dim] of one layer."""
        old = self._parts[layer]
        self._parts[layer] = new if old is None else (torch.cat([old[0], new[0]], 1), torch.cat([old[1], new[1]], 1))

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of one layer. Raises ValueError if no context was given yet."""
        part = self._parts[layer]
        if part is None:
            raise ValueError("a block needs at least one token of context")
        return part


class Drafter(nn.Module):
    """The drafter without embedding and head. `shape` is what it was built from."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.num_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = Rotary(shape)

    @torch.no_grad()
    def initialize(self, seed: int, head: torch.Tensor | None = None) -> Drafter:
        """Draw fresh weights: normal with the shape's deviation, narrower where a residual is written.

        With the target's `head` [vocabulary, width] the final norm is set so that fresh logits have unit deviation;
        a head of large rows would start far worse than an even guess, and norms move little in a short run.
        """
        generator = torch.Generator().manual_seed(seed)
        residual = 1 / math.sqrt(2 * self.shape.num_layers)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                weight.fill_(1.0)
                continue
            scale = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            drawn = torch.randn(weight.shape, generator=generator) * (self.shape.initializer_range * scale)
            weight.copy_(drawn)
        if head is not None:
            self.norm.weight.fill_(1 / float(torch.linalg.vector_norm(head, dim=1, dtype=torch.float32).mean()))
        return self

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """Context features [..., width] of tapped states [..., taps, width], the same for all layers."""
        return torch.as_tensor(self.hidden_norm(self.fc(taps.flatten(-2).to(self.fc.weight.dtype))))

    def forward(self, taps: torch.Tensor, blocks: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Fill many blocks of many rows.

        `taps` [rows, tokens, taps, width]: the target's states of whole rows, padded at the end; `blocks`
        [rows, blocks, block_size, width]: embeddings of the slots; `anchors` [rows, blocks]: position of each anchor.
        A block sees its row's tokens before its anchor and itself, nothing else. Returns states like `blocks`.
        """
        rows, tokens = taps.shape[:2]
        count, size = blocks.shape[1:3]
        context = self.context(taps)
        positions = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
        block_rotation = self.rotary(positions, context.dtype)
        context_rotation = self.rotary(torch.arange(tokens, device=taps.device)[None], context.dtype)
        masks = self._masks(lambda window: row_mask(anchors, tokens, size, window))
        x = blocks.to(context.dtype).flatten(1, 2)
        for index, layer in enumerate(self._stack()):
            keys_values = layer.self_attn.keys_values(context, context_rotation)
            x = layer(x, block_rotation, keys_values, masks[self.shape.window_of(index)])
        return torch.as_tensor(self.norm(x)).view(rows, count, size, -1)

    def extend(self, cache: ContextCache, taps: torch.Tensor) -> None:
        """Add the tapped states [tokens, taps, width] of the next verified tokens to the context."""
        context = self.context(taps[None])
        positions = torch.arange(cache.length, cache.length + len(taps), device=taps.device)[None]
        rotation = self.rotary(positions, context.dtype)
        for index, layer in enumerate(self._stack()):
            cache.extend(index, layer.self_attn.keys_values(context, rotation))
        cache.length += len(taps)

    def propose(self, cache: ContextCache, block: torch.Tensor) -> torch.Tensor:
        """Fill one block [block_size, width] whose anchor follows the cached context; returns states like `block`."""
        size, start = len(block), cache.length
        positions = torch.arange(start, start + size, device=block.device)[None]
        rotation = self.rotary(positions, self.norm.weight.dtype)
        masks = self._masks(lambda window: None if window is None else block_mask(start, size, window, block.device))
        x = block[None].to(self.norm.weight.dtype)
        for index, layer in enumerate(self._stack()):
            x = layer(x, rotation, cache.layer(index), masks[self.shape.window_of(index)])
        return torch.as_tensor(self.norm(x))[0]

    def _stack(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _masks(self, build: MaskBuilder) -> dict[int | None, torch.Tensor | None]:
        windows = {self.shape.window_of(index) for index in range(self.shape.num_layers)}
        return {window: build(window) for window in windows}


def block_ids(anchor_tokens: torch.Tensor, shape: DrafterShape) -> torch.Tensor:
    """Token ids [..., block_size] of blocks with the given anchor tokens [...]: the anchor, then masks."""
    if shape.mask_token_id is None:
        raise ValueError("the mask token is not chosen yet")
    ids = anchor_tokens.new_full((*anchor_tokens.shape, shape.block_size), shape.mask_token_id)
    ids[..., 0] = anchor_tokens
    return ids
