"""torch's own Adam and SGD in megatron-core's checkpoints.

If neither Transformer Engine nor Apex is installed, megatron-core uses torch's optimizers. In 0.16.1 five things prevent saving
and loading their state:

1. torch's optimizers allocate their state in the first step, but the distributed optimizer reads the step count from it;
2. megatron-core has no function that allocates the state of SGD;
3. the distributed optimizer stores one step count for all parameters, not one per parameter, but reads it per parameter when it
   loads;
4. after loading, all parameters share one step count tensor, which each of them then increments;
5. the distributed optimizer reads a step count on ranks without any of its parameters, too (experts, on stages without them).

`prepare_to_save`, `prepare_to_load` and `load_state` work around them, on the instances, without patching a class.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.zerobubble.optimizer.parts import parts_of

__all__ = ["is_torch_optimizer", "load_state", "prepare_to_load", "prepare_to_save"]


def is_torch_optimizer(inner: Any) -> bool:
    """Whether the optimizer inside of megatron-core's is torch's own Adam or SGD, not one of Transformer Engine or apex."""
    return isinstance(inner, torch.optim.Adam | torch.optim.SGD)


def prepare_to_save(optimizer: Any) -> None:
    """Make a megatron-core optimizer over torch's Adam or SGD ready for `sharded_state_dict`.

    Optimizers of Transformer Engine and Apex are not changed.

    Args:
        optimizer: what `get_megatron_optimizer` returned.
    """
    for part, inner in _torch_optimizers(optimizer):
        if isinstance(part, DistributedOptimizer) and not any(group["params"] for group in inner.param_groups):
            part.state_dict = partial(_state_without_parameters, part)


def prepare_to_load(optimizer: Any) -> None:
    """Make a megatron-core optimizer over torch's Adam or SGD ready for `sharded_state_dict(is_loading=True)`.

    Optimizers of Transformer Engine and Apex are not changed.

    Args:
        optimizer: what `get_megatron_optimizer` returned.
    """
    prepare_to_save(optimizer)
    for part, inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = _first_state(inner, parameter)
        part.init_state_fn = _already_allocated
        if hasattr(part, "_set_main_param_and_optimizer_states"):
            part._set_main_param_and_optimizer_states = partial(_copy_states, part)


def load_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Call `optimizer.load_state_dict(state)`, then give every parameter a step count tensor of its own."""
    optimizer.load_state_dict(state)
    for _, inner in _torch_optimizers(optimizer):
        for values in inner.state.values():
            if "step" in values:
                values["step"] = values["step"].clone()


def _torch_optimizers(optimizer: Any) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """(megatron-core's optimizer, torch's optimizer in it) for each part of the chain that uses torch's Adam or SGD."""
    for part in parts_of(optimizer):
        if is_torch_optimizer(part.optimizer):
            yield part, part.optimizer


def _first_state(inner: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(inner, torch.optim.SGD):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _state_without_parameters(part: Any) -> dict[str, Any]:
    """As `DistributedOptimizer.state_dict`, for an optimizer without parameters on this rank; its step count is 0."""
    own = [{name: value for name, value in group.items() if name != "params"} for group in part.optimizer.param_groups]
    state: dict[str, Any] = {"optimizer": {"param_groups": [group | {"step": 0.0} for group in own]}}
    if part.grad_scaler:
        state["grad_scaler"] = part.grad_scaler.state_dict()
    return state


def _already_allocated(*_: object) -> None:
    """Replaces the optimizer's `init_state_fn`: the state has been allocated already."""


def _copy_states(part: Any, model_parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """Copy a parameter's loaded master weight and moments into the distributed optimizer; the step count is loaded elsewhere."""
    group, place = part.model_param_group_index_map[model_parameter]
    master = part.optimizer.param_groups[group]["params"][place]
    for name, target in {"param": master, **part.optimizer.state[master]}.items():
        if name != "step" and name in tensors:  # an fp32 checkpoint may have no master weights
            target.detach().copy_(tensors[name])
