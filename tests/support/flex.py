"""Doubles of the libraries behind megatron-core's flex dispatcher, DeepEP and HybridEP, over gloo, with their contract of memory.

Tokens travel through one staging buffer per process, which the next call overwrites; what dispatch and combine return are new
tensors (`torch::empty` in DeepEP's `csrc/legacy/buffer.hpp` and `csrc/hybrid_ep/executor/executor.cu`). A handle belongs to one
dispatch, and is all that its combine and both backward passes need. The autograd functions and managers are megatron-core's own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from torch import Tensor

__all__ = ["doubles"]


class _Handle(NamedTuple):
    """How the rows of one dispatch travel."""

    num_tokens: int
    """Of this rank."""
    num_experts: int
    """Of all ranks."""
    places: tuple[Tensor, ...]
    """Of each row that is sent: its token, and its expert where a row is for one expert."""
    sent: list[int]
    """Rows per receiving rank."""
    received: list[int]
    """Rows per sending rank."""
    order: Tensor
    """Of the received rows."""


class _Buffer:
    """The one buffer of a process, for both libraries."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **_: Any) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self._staging = torch.empty(0)

    @staticmethod
    def get_dispatch_config(_num_ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=int.__mul__, get_rdma_buffer_size_hint=lambda *_: 0)

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        """Of a GPU."""

    def get_dispatch_layout(self, indices: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Which rank gets which token, and a tensor with as many elements as there are experts."""
        ranks = torch.arange(self.group.size())
        in_rank = ((indices * self.group.size() // num_experts).unsqueeze(-1) == ranks).any(dim=1)
        return None, None, torch.empty(num_experts), in_rank, None

    def dispatch(self, x: Tensor, *, handle: _Handle | None = None, **given: Any) -> tuple[Any, ...]:
        """DeepEP: send each token once to every rank with one of its experts; with a handle, as in that dispatch."""
        if handle is not None:
            return self._send(x, handle), None, None, None, None, _Event()
        local = given["num_tokens_per_expert"].numel() // self.group.size()
        ranks, tokens = given["is_token_in_rank"].T.nonzero().unbind(1)
        handle = self._handle(x, local, ranks, tokens)
        indices = self._send(given["topk_idx"], handle) - self.group.rank() * local
        here = (indices >= 0) & (indices < local)
        weights = self._send(given["topk_weights"], handle).where(here, 0.0)
        counts = torch.bincount(indices[here], minlength=local).tolist()
        return self._send(x, handle), indices.where(here, -1), weights, counts, handle, _Event()

    def combine(self, x: Tensor, handle: _Handle, *, topk_weights: Tensor | None = None, **_: Any) -> tuple[Any, ...]:
        """DeepEP: send rows back, and sum those of a token."""
        sums = [None if each is None else self._sum(each, handle) for each in (x, topk_weights)]
        return *sums, _Event()

    def dispatch_with_permute(self, *, hidden: Tensor, handle: _Handle | None = None, **given: Any) -> tuple[Any, ...]:
        """HybridEP: send a row for each expert of a token, and sort them there by experts; with a handle, as in that dispatch."""
        if handle is not None:
            return self._send(hidden, handle), None, None, None, handle
        local = given["num_of_experts_per_rank"]
        experts, tokens = given["routing_map"].T.nonzero().unbind(1)
        handle = self._handle(hidden, local, experts // local, tokens, experts)
        arrived = self._send((experts % local).unsqueeze(-1), handle, is_by_row=True).squeeze(-1)
        handle = handle._replace(order=arrived.argsort(stable=True))
        probabilities = self._send(given["probs"][tokens, experts].unsqueeze(-1), handle, is_by_row=True).squeeze(-1)
        return self._send(hidden, handle), probabilities, None, torch.bincount(arrived, minlength=local), handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: _Handle, probs: Tensor | None = None, **_: Any
    ) -> tuple[Any, ...]:
        """HybridEP: send rows back, and sum those of a token."""
        sums = self._sum(hidden, handle)
        if probs is None:
            return sums, None
        by_expert = probs.new_zeros(handle.num_tokens, handle.num_experts)
        by_expert[handle.places] = self._return(probs.unsqueeze(-1), handle).squeeze(-1)
        return sums, by_expert

    def _handle(self, x: Tensor, local: int, ranks: Tensor, *places: Tensor) -> _Handle:
        sent = torch.bincount(ranks, minlength=self.group.size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        order = torch.arange(int(received.sum()))
        return _Handle(x.shape[0], local * self.group.size(), places, sent.tolist(), received.tolist(), order)

    def _send(self, x: Tensor, handle: _Handle, *, is_by_row: bool = False) -> Tensor:
        rows = x if is_by_row else x[handle.places[0]]
        return self._exchange(rows, handle.sent, handle.received)[handle.order]

    def _return(self, x: Tensor, handle: _Handle) -> Tensor:
        return self._exchange(torch.empty_like(x).index_copy_(0, handle.order, x), handle.received, handle.sent)

    def _sum(self, x: Tensor, handle: _Handle) -> Tensor:
        return x.new_zeros(handle.num_tokens, x.shape[1]).index_add_(0, handle.places[0], self._return(x, handle))

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self._staging.dtype.is_floating_point:
            self._staging.fill_(torch.nan)  # whoever still reads it computes nonsense
        self._staging = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(self._staging, x.contiguous(), received, sent, group=self.group)
        return self._staging.clone()


class _Event:
    """On a CPU everything has happened."""

    def __init__(self, _: object = None) -> None: ...

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""


@contextmanager
def doubles() -> Iterator[None]:
    """Inside, megatron-core finds both libraries."""
    library: Any = ModuleType("deep_ep")
    library.Buffer = library.HybridEPBuffer = _Buffer
    library.utils = SimpleNamespace(EventHandle=_Event, EventOverlap=_Event)
    functions = ModuleType("fused_a2a_with_doubles")
    with mock.patch.dict(sys.modules, {"deep_ep": library, "deep_ep.utils": library.utils}):
        exec(inspect.getsource(fused_a2a), vars(functions))  # what it defines follows from what it can import
    names = ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine")
    with mock.patch.multiple(token_dispatcher, **{name: getattr(functions, name) for name in names}):
        yield
