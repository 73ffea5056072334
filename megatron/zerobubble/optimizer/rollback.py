"""Taking a step back, to the bit.

What a step of a torch-like optimizer overwrites are its parameters, the tensors of its state, and for some optimizers a step
count in the parameter group. `ExactRollback` keeps copies of them: on the device, where the drained pipeline has just freed the
activations (Adam in fp32 overwrites 12 bytes a parameter), or in host memory.

State that the step made first is taken away again, so that the next step makes it anew from the same zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ExactRollback"]


class ExactRollback:
    """Copies of what a step overwrites.

    Args:
        optimizers: torch optimizers, or such that look like them (`param_groups`, `state`).
        on_host: keep the copies in host memory (pinned where the parameters are on a GPU) instead of beside the parameters.
    """

    def __init__(self, optimizers: Sequence[Any], *, on_host: bool = False) -> None:
        self._optimizers = list(optimizers)
        self._on_host = on_host
        self._kept: list[tuple[Any, list[tuple[Tensor, Tensor, dict[str, Any] | None]], list[Any]]] | None = None

    def keep(self) -> None:
        """Copy. Holds on to the gradients of nothing."""
        self._kept = []
        for optimizer in self._optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            tensors = [
                (parameter, self._copy(parameter.detach()), self._state_of(optimizer, parameter)) for parameter in parameters
            ]
            self._kept.append((optimizer, tensors, [group.get("step") for group in optimizer.param_groups]))

    @torch.no_grad()
    def undo(self) -> None:
        """Put everything back, in the tensors it was in."""
        assert self._kept is not None, "nothing was kept"
        for optimizer, tensors, steps in self._kept:
            for parameter, copy, state in tensors:
                parameter.detach().copy_(copy)
                self._restore_state(optimizer, parameter, state)
            for group, step in zip(optimizer.param_groups, steps, strict=True):
                if step is not None:
                    group["step"] = step
                else:
                    group.pop("step", None)
        self._kept = None

    def forget(self) -> None:
        """Free the copies."""
        self._kept = None

    def _state_of(self, optimizer: Any, parameter: Tensor) -> dict[str, Any] | None:
        if parameter not in optimizer.state:
            return None
        return {
            name: self._copy(value) if isinstance(value, Tensor) else value for name, value in optimizer.state[parameter].items()
        }

    @staticmethod
    def _restore_state(optimizer: Any, parameter: Tensor, kept: dict[str, Any] | None) -> None:
        if kept is None:
            optimizer.state.pop(parameter, None)
            return
        state = optimizer.state[parameter]
        for name in set(state) - set(kept):
            del state[name]
        for name, value in kept.items():
            if isinstance(value, Tensor) and isinstance(state.get(name), Tensor):
                state[name].copy_(value)
            else:
                state[name] = value

    def _copy(self, tensor: Tensor) -> Tensor:
        if not self._on_host or tensor.device.type == "cpu":
            return tensor.clone()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)
