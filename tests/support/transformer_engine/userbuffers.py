"""Transformer Engine's Userbuffers as a double with their aliasing: one buffer per name, shared by all layers of that name.

A module copies its part of an operand into the buffer and hands the GEMM a view of the whole one; the collective fills in the
parts of the other ranks beside the GEMM, or before it. Here it runs before. The next module of that name overwrites the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

__all__ = ["Userbuffer", "initialized"]


class Userbuffer:
    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    @property
    def _group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    def with_cublasmp(self) -> bool:
        """The other backend, which has no buffer."""
        return False

    def is_fp8_ubuf(self) -> bool:
        """Whether the buffer has bytes of FP8."""
        return False

    def copy_into_buffer(self, part: Tensor, local_chunk: bool = True) -> None:
        """Copy this rank's part of an operand to its place."""
        assert local_chunk
        numel = part.numel() * self._group.size()
        self._buffer.fill_(torch.nan)  # what the last owner has kept of it is gone, whole
        if self._buffer.numel() < numel:
            self._buffer = part.new_empty(numel)
        self._parts(numel)[self._group.rank()].copy_(part.reshape(-1))
        self._numel = numel

    def get_buffer(self, local_chunk: bool = False, shape: Any = None) -> Tensor:
        """A view of the whole operand."""
        assert not local_chunk
        return self._buffer[: self._numel].view(*shape)

    def gather(self) -> None:
        """Fill in the parts of the other ranks."""
        parts = self._parts(self._numel)
        gathered = [torch.empty_like(part) for part in parts]
        dist.all_gather(gathered, parts[self._group.rank()].clone(), group=self._group)
        for part, full in zip(parts, gathered, strict=True):
            part.copy_(full)

    def scatter(self, result: Tensor, part: Tensor) -> None:
        """Sum `result` over the ranks, and write this rank's part of it."""
        total = result.clone()
        dist.all_reduce(total, group=self._group)
        part.copy_(total.reshape(self._group.size(), -1)[self._group.rank()].view_as(part))

    def _parts(self, numel: int) -> tuple[Tensor, ...]:
        return self._buffer[:numel].chunk(self._group.size())


class _Userbuffers(dict[Any, Userbuffer]):
    """Made when they are asked for."""

    def __contains__(self, _key: object) -> bool:
        return True

    def __missing__(self, key: Any) -> Userbuffer:
        return self.setdefault(key, Userbuffer())


@contextmanager
def initialized() -> Iterator[None]:
    """Userbuffers as after Transformer Engine's `initialize_ub`, for modules that are built meanwhile."""
    from transformer_engine.pytorch.module import base

    base._ub_communicators, base._ub_initialized = _Userbuffers(), True
    try:
        yield
    finally:
        base._ub_communicators, base._ub_initialized = None, False
