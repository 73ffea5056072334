"""Memory of a rank in bytes: what is usable, and what weights, gradients and optimizer state take.

The difference is the headroom for activations. It differs between ranks: under V, for example, the first rank has both the
embedding and the head. The planner gets each rank's headroom by way of its costs (`profiling.profile.costs_within`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.zerobubble.optimizer.parts import parts_of

USABLE = 0.92
"""Fraction of a device's memory that `auto` plans with; the rest is CUDA context, communication buffers and fragmentation."""


def state_bytes(chunks: Sequence[nn.Module], optimizer: Any) -> int:
    """Bytes of weights, buffers, gradients and optimizer state on this rank; each storage counts once.

    Args:
        chunks: the rank's model chunks, wrapped by DDP.
        optimizer: megatron-core's optimizer, after at least one step (before that it has no state).
    """
    storages = {}
    for tensor in _state_tensors(chunks, optimizer):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _state_tensors(chunks: Sequence[nn.Module], optimizer: Any) -> Iterator[Tensor]:
    for chunk in chunks:
        for parameter in chunk.parameters():
            yield parameter
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None:
                yield gradient
        for _, buffer in chunk.named_buffers():
            yield buffer
    for part in parts_of(optimizer):
        stepping = getattr(part, "optimizer", None)
        for group in getattr(stepping, "param_groups", ()):
            yield from group["params"]
        for state in getattr(stepping, "state", {}).values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def usable_bytes(device: torch.device, *, ranks_on_host: int) -> int:
    """Bytes that a rank can use: of its GPU's memory, or on the CPU its share of the machine's memory.

    Args:
        device: the rank's device.
        ranks_on_host: ranks that share the machine.
    """
    if device.type == "cuda":
        return int(USABLE * torch.cuda.get_device_properties(device).total_memory)
    return int(USABLE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_on_host)
