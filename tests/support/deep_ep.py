"""A double of DeepEP's `Buffer` over gloo, with the memory contract of the real one.

Tokens travel through one staging buffer per process, which the next call overwrites; what `dispatch` and `combine` return are new
tensors (`torch::empty` in DeepEP's `csrc/legacy/buffer.hpp`). A handle belongs to one dispatch, and is all that its combine and
both backward passes need. Every call waits for the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a, token_dispatcher


class Handle(NamedTuple):
    """How the tokens of one dispatch travel."""

    num_tokens: int
    """Tokens of this rank."""
    rows: torch.Tensor
    """The rows that are sent, in the order of the ranks that get them."""
    num_sent: list[int]
    """Rows per receiving rank."""
    num_received: list[int]
    """Rows per sending rank."""


class Event:
    """An event on a CPU, where everything has happened."""

    def __init__(self, _: object = None) -> None:
        pass

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """The calls that megatron-core makes."""

    num_calls = 0

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self._staging = torch.empty(0)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, indices: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Which rank gets which token."""
        local = num_experts // self.group.size()
        ranks = torch.arange(self.group.size())
        in_rank = ((indices // local).unsqueeze(-1) == ranks).logical_and((indices >= 0).unsqueeze(-1)).any(dim=1)
        per_expert = torch.bincount(indices[indices >= 0], minlength=num_experts)
        return in_rank.sum(0), None, per_expert, in_rank, Event()

    def dispatch(
        self,
        x: torch.Tensor,
        *,
        handle: Handle | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Send each token once to every rank with one of its experts; with a handle, as in that dispatch."""
        if handle is not None:
            return self._exchange(x[handle.rows], handle.num_sent, handle.num_received), None, None, None, None, Event()
        assert topk_idx is not None
        assert topk_weights is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        local = num_tokens_per_expert.numel() // self.group.size()
        places = is_token_in_rank.T.nonzero()
        sent = is_token_in_rank.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        handle = Handle(x.shape[0], places[:, 1], sent.tolist(), received.tolist())
        first = (places[:, 0] * local).unsqueeze(-1)
        indices, weights = topk_idx[handle.rows] - first, topk_weights[handle.rows]
        here = (indices >= 0) & (indices < local)
        indices, weights = torch.where(here, indices, -1), torch.where(here, weights, 0.0)
        got = [self._exchange(each, handle.num_sent, handle.num_received) for each in (x[handle.rows], indices, weights)]
        per_expert = torch.bincount(got[1][got[1] >= 0], minlength=local).tolist()
        return *got, per_expert, handle, Event()

    def combine(self, x: torch.Tensor, handle: Handle, *, topk_weights: torch.Tensor | None = None, **_: Any) -> tuple[Any, ...]:
        """Send tokens back, and sum those of one token."""
        back = self._summed(x, handle)
        return back, None if topk_weights is None else self._summed(topk_weights, handle), Event()

    def _summed(self, x: torch.Tensor, handle: Handle) -> torch.Tensor:
        returned = self._exchange(x, handle.num_received, handle.num_sent)
        return returned.new_zeros(handle.num_tokens, x.shape[1]).index_add_(0, handle.rows, returned)

    def _exchange(self, x: torch.Tensor, num_sent: list[int], num_received: list[int]) -> torch.Tensor:
        Buffer.num_calls += 1
        if self._staging.dtype.is_floating_point:
            self._staging.fill_(torch.nan)  # whoever still reads it computes nonsense
        self._staging = x.new_empty(sum(num_received), x.shape[1])
        dist.all_to_all_single(self._staging, x.contiguous(), num_received, num_sent, group=self.group)
        return self._staging.clone()


def _dispatch(x: Any, *args: Any, async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Any:
    return fused_a2a.FusedDispatch.apply(x.contiguous(), *args, async_finish, allocate_on_comm_stream)


def _combine(x: Any, *args: Any, async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Any:
    return fused_a2a.FusedCombine.apply(x, *args, async_finish, allocate_on_comm_stream)


@contextmanager
def deep_ep() -> Iterator[None]:
    """Inside, megatron-core finds DeepEP: its own autograd functions run, with this buffer."""
    own = {"Buffer": Buffer, "EventHandle": Event, "EventOverlap": Event, "_buffer": None}
    wrapped = {"fused_dispatch": _dispatch, "fused_combine": _combine, "set_deepep_num_sms": lambda _: None}
    with mock.patch.multiple(fused_a2a, create=True, **own), mock.patch.multiple(token_dispatcher, **wrapped):
        yield
