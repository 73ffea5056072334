"""Rolling back an optimizer step to the bit, from a snapshot.

A step of a torch-like optimizer overwrites its parameters, the tensors of its state, and for some optimizers a step count in the
parameter group. The snapshot of them is on the device, where the drained pipeline has just freed the activations (Adam in fp32
overwrites 12 bytes per parameter), or in host memory. State that the step created is deleted again, so that the next step creates
it from the same zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Rollback"]


class Rollback:
    """Rolls back one optimizer step at a time: call `snapshot`, step, then `rollback` or `drop_snapshot`.

    Args:
        optimizers: torch optimizers, or any with their `param_groups` and `state`.
        on_host: keep the snapshot in host memory (pinned if the parameters are on a GPU) instead of on the parameters' device.
            Pinned memory is allocated with the first snapshots and kept for the later ones: allocating it waits for the device.
    """

    def __init__(self, optimizers: Sequence[Any], *, on_host: bool = False) -> None:
        self._optimizers = list(optimizers)
        self._on_host = on_host
        self._pinned: dict[tuple[Tensor, str], Tensor] = {}
        """Host memory by parameter and name of its state; the parameter itself has the empty name."""
        self._snapshot: list[tuple[Any, list[tuple[Tensor, Tensor, dict[str, Any] | None]], list[Any]]] | None = None

    def snapshot(self) -> None:
        """Copy parameters and optimizer state."""
        self._snapshot = []
        for optimizer in self._optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            tensors = [
                (parameter, self._copy(parameter.detach(), (parameter, "")), self._state_of(optimizer, parameter))
                for parameter in parameters
            ]
            self._snapshot.append((optimizer, tensors, [group.get("step") for group in optimizer.param_groups]))

    @torch.no_grad()
    def rollback(self) -> None:
        """Copy the snapshot back, in place, and free it."""
        assert self._snapshot is not None, "no snapshot was taken"
        for optimizer, tensors, steps in self._snapshot:
            for parameter, copy, state in tensors:
                parameter.detach().copy_(copy)
                self._restore_state(optimizer, parameter, state)
            for group, step in zip(optimizer.param_groups, steps, strict=True):
                if step is not None:
                    group["step"] = step
                else:
                    group.pop("step", None)
        self._snapshot = None

    def drop_snapshot(self) -> None:
        """Free the snapshot: the step is final."""
        self._snapshot = None

    def _state_of(self, optimizer: Any, parameter: Tensor) -> dict[str, Any] | None:
        if parameter not in optimizer.state:
            return None
        return {
            name: self._copy(value, (parameter, name)) if isinstance(value, Tensor) else value
            for name, value in optimizer.state[parameter].items()
        }

    @staticmethod
    def _restore_state(optimizer: Any, parameter: Tensor, copied: dict[str, Any] | None) -> None:
        if copied is None:
            optimizer.state.pop(parameter, None)
            return
        state = optimizer.state[parameter]
        for name in set(state) - set(copied):
            del state[name]
        for name, value in copied.items():
            if isinstance(value, Tensor) and isinstance(state.get(name), Tensor):
                state[name].copy_(value)
            else:
                state[name] = value

    def _copy(self, tensor: Tensor, key: tuple[Tensor, str]) -> Tensor:
        if not self._on_host or tensor.device.type == "cpu":
            return tensor.clone()
        copy = self._pinned.get(key)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):  # loaded state may be of another dtype
            copy = self._pinned[key] = _pinned_like(tensor)
        return copy.copy_(tensor, non_blocking=True)


def _pinned_like(tensor: Tensor) -> Tensor:
    """Uninitialized pinned host memory of the tensor's shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
