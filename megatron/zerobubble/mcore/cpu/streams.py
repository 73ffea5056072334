"""CUDA streams and events that do nothing, for megatron-core's experts on a machine without CUDA.

The all-to-all dispatcher copies its split sizes to the host on a stream of its own, and waits for them there; on the CPU they are
already on the host. So `torch.cuda`, as the expert modules see it, has streams and events that do nothing. On a GPU none of this
is installed.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

__all__ = ["InertStream", "cuda_without_streams", "split_sizes_on_host"]


class InertStream:
    """A stream, and an event, on a device without concurrency: everything before is done already."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Do nothing: the other stream is idle."""

    def wait_event(self, event: object) -> None:
        """Do nothing: the event is complete."""

    def wait(self, stream: object = None) -> None:
        """Do nothing: the event is complete."""

    def record(self, stream: object = None) -> None:
        """Do nothing: everything before is done."""

    def query(self) -> bool:
        """Whether it is complete: always."""
        return True

    def record_event(self, event: object = None) -> InertStream:
        """An event that is complete."""
        return self

    def synchronize(self) -> None:
        """Do nothing: the stream is idle."""


class _CudaWithoutStreams(types.ModuleType):
    """`torch.cuda` with inert streams."""

    Stream = Event = InertStream

    def __init__(self) -> None:
        super().__init__("torch.cuda", "torch.cuda with streams that do nothing.")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_stream(device: object = None) -> InertStream:
        return InertStream()

    default_stream = current_stream

    @staticmethod
    def stream(stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def cuda_without_streams() -> types.ModuleType:
    """A module that replaces `torch.cuda` in modules that use streams; everything else is that of `torch.cuda`."""
    return _CudaWithoutStreams()


def split_sizes_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces `maybe_move_tensor_to_cpu`, which returns a CPU tensor even if `as_numpy` asks for an array.

    Collectives do not accept split sizes as tensors.

    Args:
        tensor: on the CPU, or not a tensor.
        as_numpy: whether to return an array.
        record_stream: ignored.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
