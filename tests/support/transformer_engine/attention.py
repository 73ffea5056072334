"""Fused attention of the extension, forward and backward, for tensors [s, b, h, d] with a causal mask or none.

Transformer Engine's context parallelism needs it: it calls the kernels for parts of the keys and combines outputs and gradients
by the statistics. Everywhere else its attention of torch operations runs, because `enabled` is not entered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.zerobubble.mcore.cpu.streams import InertStream

__all__ = ["convert_bshd_to_thd", "convert_thd_to_bshd", "enabled", "fused_attn_bwd", "fused_attn_fwd"]


def fused_attn_fwd(
    _max_q: int,
    _max_kv: int,
    _is_training: bool,
    scale: float,
    dropout: float,
    _fast_zero_fill: bool,
    layout: Any,
    _o_format: Any,
    _scale_inv_format: Any,
    bias_type: Any,
    mask: Any,
    _softmax_type: Any,
    _window: tuple[int, int],
    _bottom_right: bool,
    _cu_q: Tensor,
    _cu_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: Any,
) -> list[Tensor]:
    """[the output, logarithm of the sum of exponentials as [b, h, s, 1] in float32, state of the generator]."""
    _check(dropout, layout, bias_type)
    scores = _scores(q, _for_queries(k, q), scale, mask)
    statistics = scores.logsumexp(dim=-1, keepdim=True)
    output = torch.einsum("bhqk,kbhd->qbhd", torch.exp(scores - statistics), _for_queries(v, q))
    return [output.to(q.dtype).contiguous(), statistics, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    _max_q: int,
    _max_kv: int,
    scale: float,
    dropout: float,
    _fast_zero_fill: bool,
    layout: Any,
    _o_format: Any,
    _do_format: Any,
    _gradients_layout: Any,
    _scale_inv_format: Any,
    _do_scale_inv_format: Any,
    bias_type: Any,
    mask: Any,
    _softmax_type: Any,
    _window: tuple[int, int],
    _bottom_right: bool,
    _deterministic: bool,
    _cu_q: Tensor,
    _cu_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    grad: Tensor,
    _fake_dtype: Any,
    saved: list[Tensor],
    *_: Any,
) -> list[Tensor | None]:
    """[gradient of q, of k, of v, of the bias, of the softmax offset].

    Args:
        output: and the statistics in `saved`: over all keys, of which `k` may be a part.
        grad: of `output`.
        saved: what the forward returned behind its output.
    """
    _check(dropout, layout, bias_type)
    keys, values, gradient = _for_queries(k, q), _for_queries(v, q), grad.float()
    probabilities = torch.exp(_scores(q, keys, scale, mask) - saved[0])
    of_probabilities = torch.einsum("qbhd,kbhd->bhqk", gradient, values)
    of_outputs = (gradient * output.float()).sum(dim=-1).permute(1, 2, 0).unsqueeze(-1)
    of_scores = probabilities * (of_probabilities - of_outputs) * scale
    dq = torch.einsum("bhqk,kbhd->qbhd", of_scores, keys)
    dk = torch.einsum("bhqk,qbhd->kbhd", of_scores, q.float())
    dv = torch.einsum("bhqk,qbhd->kbhd", probabilities, gradient)
    summed = (each.unflatten(2, (k.shape[2], -1)).sum(dim=3) for each in (dk, dv))
    return [*(each.to(q.dtype).contiguous() for each in (dq, *summed)), None, None]


def _check(dropout: float, layout: Any, bias_type: Any) -> None:
    if dropout or not layout.name.startswith("NVTE_SBHD") or bias_type.name != "NVTE_NO_BIAS":
        raise AssertionError(f"this double has no dropout, no bias, and [s, b, h, d] alone: {dropout}, {bias_type}, {layout}")


def _for_queries(keys: Tensor, q: Tensor) -> Tensor:
    """Keys or values in float32, one head for each of the queries'."""
    return keys.float().repeat_interleave(q.shape[2] // keys.shape[2], dim=2)


def _scores(q: Tensor, keys: Tensor, scale: float, mask: Any) -> Tensor:
    """[b, h, queries, keys]."""
    scores = torch.einsum("qbhd,kbhd->bhqk", q.float(), keys) * scale
    if mask.name == "NVTE_NO_MASK":
        return scores
    if mask.name != "NVTE_CAUSAL_MASK":
        raise AssertionError(f"this double computes causal masks and none, not {mask.name}")
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


def convert_thd_to_bshd(tokens: Tensor, bounds: Tensor, num_sequences: int, longest: int) -> Tensor:
    """Packed sequences [t, h, d], sequence i from `bounds[i]` on, as [sequences, longest, h, d], filled up with 0."""
    rows = tokens.new_zeros(num_sequences, longest, *tokens.shape[1:])
    rows[_inside(bounds, longest)] = tokens[: int(bounds[-1])]
    return rows


def convert_bshd_to_thd(rows: Tensor, bounds: Tensor, num_tokens: int) -> Tensor:
    """The inverse: `num_tokens` tokens, 0 behind the last sequence."""
    tokens = rows.new_zeros(num_tokens, *rows.shape[2:])
    tokens[: int(bounds[-1])] = rows[_inside(bounds, rows.shape[1])]
    return tokens


def _inside(bounds: Tensor, longest: int) -> Tensor:
    """[sequences, longest]: whether a token is there."""
    return torch.arange(longest) < bounds.diff()[:, None]


class _WaitedOnce:
    """A transfer that may be waited for twice, as the ring does in backward: gloo would wait for another message."""

    def __init__(self, work: Any) -> None:
        self._work: Any = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


@contextmanager
def enabled() -> Iterator[None]:
    """Transformer Engine's attention finds it, and megatron-core's a stream for the ring of context parallelism."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel, dot_product_attention

    extension: Any = sys.modules["transformer_engine_torch"]
    found = extension.NVTE_Fused_Attn_Backend["NVTE_F16_arbitrary_seqlen"]
    answer = mock.patch.object(extension, "get_fused_attn_backend", return_value=(found, ""))
    stream = mock.patch.object(TEDotProductAttention, "cp_stream", InertStream())
    communicate: Any = context_parallel.flash_attn_p2p_communicate
    once = mock.patch.object(
        context_parallel, "flash_attn_p2p_communicate", lambda *args: [_WaitedOnce(work) for work in communicate(*args)]
    )
    chosen: Any = dot_product_attention._attention_backends
    with answer, stream, once, mock.patch.dict(chosen, attention_params=None):
        yield
