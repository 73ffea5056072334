"""What megatron-core's experts ask of CUDA streams, answered where there are none.

The all-to-all dispatcher copies its split sizes to the host on a stream of its own, and waits for them there; on the CPU they are
where they are wanted already. So `torch.cuda`, as the expert modules see it, has streams and events that do nothing. Where a GPU
is, none of this is installed and the real ones do the work.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

__all__ = ["InertStream", "cuda_without_streams", "split_sizes_on_host"]


class InertStream:
    """A stream, and an event, on a device that does one thing after the other."""

    def wait_stream(self, stream: object) -> None:
        """What the other stream was given is done."""

    def record_event(self, event: object = None) -> InertStream:
        """An event that has happened."""
        return self

    def synchronize(self) -> None:
        """It has happened."""


class _CudaWithoutStreams(types.ModuleType):
    """`torch.cuda`, but streams are inert."""

    Stream = Event = InertStream

    def __init__(self) -> None:
        super().__init__("torch.cuda", "torch.cuda with streams that do nothing.")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_stream(device: object = None) -> InertStream:
        return InertStream()

    @staticmethod
    def stream(stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def cuda_without_streams() -> types.ModuleType:
    """`torch.cuda` for modules that use streams."""
    return _CudaWithoutStreams()


def split_sizes_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """For `maybe_move_tensor_to_cpu`: that one leaves a tensor that is on the CPU a tensor, even where an array is asked for, and
    collectives do not take split sizes as tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
