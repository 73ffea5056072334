"""Loading the state of an optimizer in any layout of the ranks: the parts of megatron-core's optimizer, and Adam's step count.

With expert parallelism there are two optimizers, one for dense weights and one for experts, stored under the keys 0 and 1;
without it one optimizer, without a key, has both. So these parts are requested, and assembled, one by one. If the checkpoint has
one part and two are needed, experts get parameter groups like those of dense weights. The common state is that of the first rank,
whose part for experts has no step count if it has no experts; so the step count is taken from dense weights.

A checkpoint loads into the kind of optimizer that saved it: they store master weights, parameter groups and steps differently::

                         plain, fp32           plain, bf16 or fp16      distributed
    parameter groups     at the top            under ``optimizer``      under ``optimizer``
    steps                ``common_step``       ``common_step``          ``step``, in each group

The steps are those of torch's optimizers. Adam of Transformer Engine and apex (FusedAdam) has ``step``, a whole number, in each
group under all kinds, and accepts no other.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.optimizer.parts import parts_of
from megatron.zerobubble.training.checkpoint.torch_optimizer import is_torch_optimizer

__all__ = ["assembled", "by_part", "check_same_kind"]

_DISTRIBUTED, _PLAIN, _MIXED = "distributed optimizer", "plain fp32 optimizer", "plain optimizer with master weights"
_MASTER_WEIGHTS = "fp32_from_fp16_params"
_OWN_TO_A_GROUP = ("params", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "pre_wd_mult", "pre_lr_mult")
"""The entries in which the parameter groups of a model differ."""


def check_same_kind(common: dict[Any, Any], optimizer: Any) -> None:
    """Raise CheckpointError unless the optimizer is of the kind that wrote a checkpoint.

    Args:
        common: the checkpoint's common state (of all ranks) under "optimizer".
        optimizer: what `get_megatron_optimizer` returned.
    """
    first, part = by_part(common)[0], next(iter(parts_of(optimizer)))
    plain = _PLAIN if "param_groups" in first else _MIXED
    stored = _DISTRIBUTED if "param_state_sharding_type" in first else plain
    own = _PLAIN if isinstance(part, FP32Optimizer) else _MIXED
    own = _DISTRIBUTED if isinstance(part, DistributedOptimizer) else own
    if stored != own:
        raise CheckpointError(
            f"it was written by the {stored} and cannot be loaded into the {own}; train with the same precision and "
            "optimizer, or give --no-load-optim to start with new optimizer state"
        )


def by_part(tree: dict[Any, Any]) -> dict[int, Any]:
    """The state of each part of the optimizer, by its number."""
    return tree if all(isinstance(key, int) for key in tree) else {0: tree}


def assembled(loaded: dict[int, Any], *, asked: dict[int, Any], common: dict[Any, Any], optimizer: Any) -> Any:
    """What was loaded, as a state dict for the optimizer's `load_state_dict`.

    Args:
        loaded: the loaded tensors, by part; a part without tensors on this rank may be absent.
        asked: the optimizer's `sharded_state_dict`, by part, with the parameter groups of each.
        common: the checkpoint's common state (of all ranks) under "optimizer".
        optimizer: what `get_megatron_optimizer` returned.
    """
    stored = by_part(common)
    step, parts = _step(stored[0]), {}
    for index, part in enumerate(parts_of(optimizer)):
        shared = copy.deepcopy(stored.get(index)) or _for_experts(stored[0], _groups(asked[index]))
        shared.pop(_MASTER_WEIGHTS, None)  # empty lists, if the first rank has none of them
        parts[index] = state = merge(shared, loaded.get(index, {}))
        if not isinstance(part, DistributedOptimizer | FP32Optimizer):
            state.setdefault(_MASTER_WEIGHTS, [[] for _ in _groups(state)])
        if step is not None:
            _set_step(state, step, part)
    return parts if len(parts) > 1 else parts[0]


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """The part of the state that is the inner optimizer's."""
    inner: dict[str, Any] = state if "param_groups" in state else state["optimizer"]
    return inner


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = _inner(state)["param_groups"]
    return groups


def _for_experts(dense: dict[str, Any], own_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Common state for experts if the first rank has none: that of its dense weights, in parameter groups of their own."""
    shared = copy.deepcopy(dense)
    groups = _groups(shared)
    written = {name: value for name, value in groups[0].items() if name not in _OWN_TO_A_GROUP}
    groups[:] = [written | {name: group[name] for name in _OWN_TO_A_GROUP[1:] if name in group} for group in own_groups]
    return shared


def _step(dense: dict[str, Any]) -> float | None:
    """Adam's step count, from the part of dense weights, of which every rank has some; None for SGD."""
    inner = _inner(dense)
    if "common_step" in inner.get("state", {}):
        return float(inner["state"]["common_step"])
    return next((group["step"] for group in inner["param_groups"] if "step" in group), None)


def _set_step(state: dict[str, Any], step: float, part: Any) -> None:
    """Give Adam's step count where the part's optimizer reads it, and nowhere else."""
    inner, is_torch = _inner(state), is_torch_optimizer(part.optimizer)
    if is_torch and not isinstance(part, DistributedOptimizer):
        inner.setdefault("state", {}).setdefault("common_step", torch.tensor(step))
        return
    inner.get("state", {}).pop("common_step", None)
    for group in inner["param_groups"]:
        group["step"] = step if is_torch else int(step)
