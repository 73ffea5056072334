"""Rolling back an optimizer step: to the bit from a snapshot, or approximately by inverting its arithmetic.

A step of a torch-like optimizer overwrites its parameters, the tensors of its state, and for some optimizers a step count in the
parameter group. `ExactRollback` keeps a snapshot of them: on the device, where the drained pipeline has just freed the
activations (Adam in fp32 overwrites 12 bytes per parameter), or in host memory. `InverseRollback` keeps none and computes
backwards.

State that the step created is deleted again, so that the next step creates it from the same zeros.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.zerobubble.errors import ConfigError

__all__ = ["ExactRollback", "InverseRollback", "Rollback"]

_log = logging.getLogger(__name__)


class Rollback(Protocol):
    """How one optimizer step is rolled back: call `snapshot`, step, then `rollback` or `drop_snapshot`."""

    def snapshot(self) -> bool:
        """Prepare for a step that may have to be rolled back; False if it could not be, so that it must not be optimistic."""

    def rollback(self) -> None:
        """Roll back the step. The gradients must still be those of the step."""

    def drop_snapshot(self) -> None:
        """Free the snapshot: the step is final."""


class ExactRollback:
    """Rolls back to the bit, from a snapshot of everything that a step overwrites.

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

    def snapshot(self) -> bool:
        """Copy parameters and optimizer state; always True."""
        self._snapshot = []
        for optimizer in self._optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            tensors = [
                (parameter, self._copy(parameter.detach(), (parameter, "")), self._state_of(optimizer, parameter))
                for parameter in parameters
            ]
            self._snapshot.append((optimizer, tensors, [group.get("step") for group in optimizer.param_groups]))
        return True

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
        """Free the snapshot."""
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


class InverseRollback:
    """Rolls back a step of Adam by inverting its arithmetic with the same gradients: no snapshot, and almost the same numbers.

    With decay rates b1, b2, gradient g and step count t, Adam and AdamW compute (arXiv 1412.6980, 1711.05101)

        m' = b1 m + (1 - b1) g
        v' = b2 v + (1 - b2) g^2
        w' = (1 - lr decay) w - lr / (1 - b1^t) m' / (sqrt(v' / (1 - b2^t)) + eps)

    which is solved for w, m and v in turn. The result has an error: what of v and m lay below the rounding error of the sum
    with the step's own contribution is lost.

    - Elementwise, with u = 2^-24: v comes back to 16 u (b2 v + (1 - b2) g^2), m to 8 u (b1 |m| + (1 - b1) |g|) and w to
      4 u |w| + 8 u lr, where g stands for |gradient| + decay (|w| + 2 lr) if weights decay through the gradient. An element whose
      v is about as small as that error comes back as one that never had a gradient, with v = m = 0. That is exact if it never had
      one; v is never negative.
    - A step whose gradients are far above all earlier ones, (1 - b2) |g|^2 > SPREAD b2 sum(v) for a whole parameter, would
      wipe its state out. `snapshot` returns False for it, and the step waits for the global gradient statistics, as a step does
      whose prefix of the statistics already shows clipping.

    Tested in `tests/optimizer/test_rollback.py`.

    Args:
        optimizers: torch's Adam and AdamW, or any with their state (apex's and Transformer Engine's FusedAdam), in float32.
        agree: called once per `snapshot` with a number on the device that is True if this rank's step is unsafe, or None if it
            is safe; returns whether it is safe on all ranks with shards of the same weights. By default this rank alone counts.

    Raises:
        ConfigError: another optimizer, or an option of Adam that cannot be inverted.
    """

    SPREAD = 1024.0
    """Largest ratio of a step's own contribution to v, over what was there before, that can be rolled back."""

    def __init__(self, optimizers: Sequence[Any], *, agree: Callable[[Tensor | None], bool] | None = None) -> None:
        self._optimizers = list(optimizers)
        self._agree = agree or _is_safe
        self._new: set[Tensor] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                _check_invertible(optimizer, group)

    @torch.no_grad()
    def snapshot(self) -> bool:
        """Whether the next step can be rolled back. The host waits for the device once, to learn it."""
        self._new = set()
        unsafe = []
        for optimizer, group, parameter in self._parameters():
            state = optimizer.state.get(parameter)
            if not state:
                self._new.add(parameter)
                continue
            beta2 = group["betas"][1]
            norm = torch.linalg.vector_norm(_gradient(group, parameter, _decoupled(optimizer, group)))
            added, known = (1 - beta2) * norm**2, beta2 * state["exp_avg_sq"].sum()
            unsafe.append((added > self.SPREAD * known) & (known > 0))
        is_safe = self._agree(torch.stack(unsafe).any() if unsafe else None)
        if not is_safe:
            _log.info("a step waits for all ranks: its gradients are too large for the state of Adam to be inverted")
        return is_safe

    @torch.no_grad()
    def rollback(self) -> None:
        """Compute the parameters and the state before the step, in place. The gradients must still be those of the step."""
        for optimizer, group, parameter in self._parameters():
            state = optimizer.state[parameter]
            step = float(state["step"] if "step" in state else group["step"])
            self._roll_back_parameter(group, parameter, state, step, decoupled=_decoupled(optimizer, group))
            if parameter in self._new:
                del optimizer.state[parameter]
            elif "step" in state:
                state["step"] = state["step"] - 1  # a tensor of its own: loaded states may share one
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if "step" in group:
                    group["step"] = group["step"] - 1
        self._new = set()

    def drop_snapshot(self) -> None:
        """The step is final."""
        self._new = set()

    def _parameters(self) -> Iterator[tuple[Any, dict[str, Any], Tensor]]:
        """(optimizer, its group, parameter) of every parameter with a gradient: the others are not stepped."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        yield optimizer, group, parameter

    def _roll_back_parameter(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], step: float, *, decoupled: bool
    ) -> None:
        first, second = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        corrects = group.get("bias_correction", True)
        correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
        denominator = second.sqrt().div_(math.sqrt(correction2)).add_(group["eps"])
        parameter.addcdiv_(first, denominator, value=group["lr"] / correction1)
        if decoupled:
            parameter.div_(1 - group["lr"] * group["weight_decay"])
        gradient = _gradient(group, parameter, decoupled)
        first.sub_(gradient, alpha=1 - beta1).div_(beta1)
        added = gradient.square().mul_(1 - beta2)
        second.sub_(added).div_(beta2)
        hidden = second <= added.mul_(4 * torch.finfo(second.dtype).eps)
        first.masked_fill_(hidden, 0.0)
        second.masked_fill_(hidden, 0.0)


def _is_safe(is_unsafe: Tensor | None) -> bool:
    return is_unsafe is None or not bool(is_unsafe)


def _gradient(group: dict[str, Any], parameter: Tensor, decoupled: bool) -> Tensor:
    """The gradient that enters Adam's moments: with weight decay added, unless it is decoupled."""
    assert parameter.grad is not None
    return parameter.grad if decoupled else parameter.grad.add(parameter, alpha=group["weight_decay"])


def _decoupled(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether weight decay is decoupled from the gradient (AdamW), not added to it (Adam)."""
    if hasattr(optimizer, "adam_w_mode"):
        return bool(optimizer.adam_w_mode)
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def _check_invertible(optimizer: Any, group: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    if not ({"betas", "eps", "lr", "weight_decay"} <= set(group)):
        raise ConfigError(f"{name} cannot be inverted, only Adam and AdamW can: use --post-validation-rollback exact")
    if group.get("amsgrad") or group.get("maximize"):
        raise ConfigError(f"{name} with amsgrad or maximize cannot be inverted: use --post-validation-rollback exact")
    others = {str(p.dtype) for p in group["params"] if p.dtype is not torch.float32}
    if others:
        raise ConfigError(
            f"{name} on {sorted(others)[0]} cannot be inverted, only on torch.float32: use --post-validation-rollback exact"
        )
    if group["betas"][0] <= 0 or group["betas"][1] <= 0:
        given = tuple(group["betas"])
        raise ConfigError(
            f"{name} with betas {given} cannot be inverted: both must be above 0, or use --post-validation-rollback exact"
        )
