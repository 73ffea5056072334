"""Rotary position embeddings, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["fused_rope_backward", "fused_rope_forward"]


def fused_rope_forward(
    t: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotate pairs of the first channels by the angles of their positions.

    Args:
        t: [s, b, h, d], [b, s, h, d] or, packed, [t, h, d], by `qkv_format`.
        freqs: [positions, 1, 1, rotated channels] angles.
        start_positions: [b] of each sequence; None for 0.
        interleaved: whether pairs are neighbors, and not the two halves.
        cu_seqlens: of packed sequences, [n + 1], over all context-parallel ranks.
        cp_size, cp_rank: context parallelism; each rank has two chunks of every sequence.
    """
    angles = _angles(t, freqs, start_positions, qkv_format.name, cu_seqlens, cp_size, cp_rank)
    rotated, rest = t[..., : freqs.shape[-1]].float(), t[..., freqs.shape[-1] :]
    turned = rotated * angles.cos() + _quarter_turn(rotated, interleaved) * angles.sin()
    return torch.cat((turned.to(t.dtype), rest), dim=-1)


def fused_rope_backward(
    grad: Tensor, freqs: Tensor, starts: Tensor | None, qkv_format: Any, interleaved: bool, *where: Any
) -> Tensor:
    """The gradient of `fused_rope_forward`'s input. The other arguments are those of the forward."""
    angles = _angles(grad, freqs, starts, qkv_format.name, *where)
    rotated, rest = grad[..., : freqs.shape[-1]].float(), grad[..., freqs.shape[-1] :]
    turned = rotated * angles.cos() - _quarter_turn(rotated * angles.sin(), interleaved)
    return torch.cat((turned.to(grad.dtype), rest), dim=-1)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair (a, b) as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _angles(
    t: Tensor, freqs: Tensor, starts: Tensor | None, qkv_format: str, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int
) -> Tensor:
    """Angles in a shape that broadcasts with `t`."""
    if qkv_format == "NVTE_THD":
        assert cu_seqlens is not None
        lengths = (cu_seqlens.diff() // cp_size).tolist()
        positions = torch.cat([_positions(int(length), cp_size, cp_rank) for length in lengths])
        return freqs[positions, 0, 0][:, None]
    is_batch_first = qkv_format == "NVTE_BSHD"
    length, batch = (t.shape[1], t.shape[0]) if is_batch_first else t.shape[:2]
    starts = torch.zeros(batch, dtype=torch.long) if starts is None else starts.long()
    angles = freqs[starts[None, :] + _positions(length, cp_size, cp_rank)[:, None], 0, 0][:, :, None]  # [s, b, 1, rotated]
    return angles.transpose(0, 1) if is_batch_first else angles


def _positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Of a context-parallel rank's tokens in their sequence: a chunk from its front and one from its back."""
    if cp_size == 1:
        return torch.arange(length)
    half = length // 2
    front = torch.arange(half) + cp_rank * half
    return torch.cat((front, front + (2 * (cp_size - cp_rank) - 1) * half))
