"""Loading a checkpoint of one kind of megatron-core optimizer into another: plain or distributed.

All kinds store Adam's moments under the same names, as tensors of the full model. Three things differ, and are converted while a
checkpoint is loaded; the saved format is megatron-core's:

======================  ====================  =======================  ==============================
.                       plain, fp32           plain, bf16 or fp16      distributed
======================  ====================  =======================  ==============================
master weights          none: the weights     ``fp32_param``           ``param``
parameter groups        at the top            under ``optimizer``      under ``optimizer``
steps                   ``common_step``       ``common_step``          ``step``, in each group
======================  ====================  =======================  ==============================

The steps are those of torch's optimizers. Adam of Transformer Engine and apex (FusedAdam) has ``step``, a whole number, in each
group under all kinds, and accepts no other.

With expert parallelism there are two optimizers, one for dense weights and one for experts, stored under the keys 0 and 1;
without it one optimizer, without a key, has both. So these parts are requested, and assembled, one by one. If the checkpoint has
one part and two are needed, experts get parameter groups like those of dense weights. The common state is that of the first rank,
whose part for experts has no step count if it has no experts; so the step count is taken from dense weights.
"""

from __future__ import annotations

import copy
import enum
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.optimizer.parts import parts_of
from megatron.zerobubble.training.checkpoint.torch_optimizer import is_torch_optimizer

__all__ = ["OptimizerKind", "ask_for", "stored_kind", "translate"]


class OptimizerKind(enum.Enum):
    """The kinds of megatron-core's optimizers, by the format of their checkpoints."""

    PLAIN = "the plain fp32 optimizer"
    MIXED = "the plain optimizer with master weights"
    DISTRIBUTED = "the distributed optimizer"


_MASTER = {OptimizerKind.MIXED: "optimizer.state.fp32_param.", OptimizerKind.DISTRIBUTED: "optimizer.state.param."}
"""Prefixes of the names of master weights."""
_OWN_TO_A_GROUP = ("params", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "pre_wd_mult", "pre_lr_mult")
"""The entries in which the parameter groups of a model differ."""


def stored_kind(common: dict[Any, Any]) -> OptimizerKind:
    """The kind of optimizer that wrote a checkpoint, by `common`: its common state (of all ranks) under "optimizer"."""
    first = _by_part(common)[0]
    if "param_state_sharding_type" in first:
        return OptimizerKind.DISTRIBUTED
    return OptimizerKind.PLAIN if "param_groups" in first else OptimizerKind.MIXED


def ask_for(asked: dict[Any, Any], *, common: dict[Any, Any], optimizer: Any) -> dict[int, Any]:
    """The sharded state to request from a checkpoint, part by part, under the names that the checkpoint has.

    Master weights that the checkpoint does not have are left out; the caller copies them from the weights after loading.

    Args:
        asked: the optimizer's own `sharded_state_dict`. Mutated.
        common: the checkpoint's common state (of all ranks) under "optimizer".
        optimizer: what `get_megatron_optimizer` returned.

    Raises:
        CheckpointError: the state of one kind cannot be converted to that of the other.
    """
    parts = _by_part(asked)
    for index, part in enumerate(parts_of(optimizer)):
        _ask_part(parts[index], stored=stored_kind(common), own=_kind_of(part))
    return parts


def translate(loaded: dict[int, Any], *, asked: dict[int, Any], common: dict[Any, Any], optimizer: Any) -> Any:
    """Convert what was loaded after `ask_for` to a state dict for the optimizer's `load_state_dict`.

    Args:
        loaded: the loaded tensors, by part; a part without tensors on this rank may be absent.
        asked: the result of `ask_for`, with the parameter groups of each part.
        common: the checkpoint's common state (of all ranks) under "optimizer".
        optimizer: what `get_megatron_optimizer` returned.
    """
    parts, step = {}, _step(_by_part(common)[0], stored_kind(common))
    for index, part in enumerate(parts_of(optimizer)):
        shared = copy.deepcopy(_by_part(common).get(index)) or _for_experts(_by_part(common)[0], _groups(asked[index]))
        state = merge(shared, loaded.get(index, {}))
        parts[index] = _translate_part(state, stored=stored_kind(common), own=_kind_of(part), step=step)
        if step is not None and not is_torch_optimizer(part.optimizer):
            _count_in_groups(parts[index], own=_kind_of(part), step=int(step))
    return parts if len(parts) > 1 else parts[0]


def _by_part(tree: dict[Any, Any]) -> dict[int, Any]:
    return tree if all(isinstance(key, int) for key in tree) else {0: tree}


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = (state if "param_groups" in state else state["optimizer"])["param_groups"]
    return groups


def _for_experts(dense: dict[str, Any], own_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Common state for experts if the first rank has none: that of its dense weights, in parameter groups of their own."""
    shared = copy.deepcopy(dense)
    groups = _groups(shared)
    written = {name: value for name, value in groups[0].items() if name not in _OWN_TO_A_GROUP}
    groups[:] = [written | {name: group[name] for name in _OWN_TO_A_GROUP[1:] if name in group} for group in own_groups]
    return shared


def _kind_of(part: Any) -> OptimizerKind:
    if isinstance(part, DistributedOptimizer):
        return OptimizerKind.DISTRIBUTED
    return OptimizerKind.PLAIN if isinstance(part, FP32Optimizer) else OptimizerKind.MIXED


def _ask_part(wanted: dict[str, Any], *, stored: OptimizerKind, own: OptimizerKind) -> None:
    if stored is own:
        return
    if {stored, own} == {OptimizerKind.PLAIN, OptimizerKind.MIXED}:
        raise CheckpointError(
            f"it was written by {stored.value} and cannot be loaded into {own.value}; train with the same precision and "
            "optimizer, or give --no-load-optim to start with new optimizer state"
        )
    if own is not OptimizerKind.PLAIN:
        _rename(wanted, prefix=_MASTER[own], replacement=_MASTER.get(stored))


def _translate_part(state: dict[str, Any], *, stored: OptimizerKind, own: OptimizerKind, step: float | None) -> dict[str, Any]:
    """Convert the state of one part: `state` has the common state and the loaded tensors."""
    written = state if stored is OptimizerKind.PLAIN else state["optimizer"]
    if own is OptimizerKind.MIXED:  # empty lists are not in a checkpoint
        state.setdefault("fp32_from_fp16_params", [[] for _ in written["param_groups"]])
    if step is None:  # SGD
        return state
    if stored is own:
        if own is OptimizerKind.DISTRIBUTED:
            for group in written["param_groups"]:
                group["step"] = step
        else:
            written.setdefault("state", {}).setdefault("common_step", torch.tensor(step))
        return state
    groups = [{name: value for name, value in group.items() if name != "step"} for group in written["param_groups"]]
    if own is OptimizerKind.DISTRIBUTED:
        inner = {"param_groups": [group | {"step": step} for group in groups]}
        return state | {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
    read = state if own is OptimizerKind.PLAIN else state["optimizer"]
    for group, own_group in zip(groups, read["param_groups"], strict=True):
        own_group.pop("step", None)
        own_group.update(group)  # except `params`, the indices of this rank's parameters
    read.setdefault("state", {})["common_step"] = torch.tensor(step)
    return state


def _count_in_groups(state: dict[str, Any], *, own: OptimizerKind, step: int) -> None:
    """Give Adam's step count as a fused optimizer has it: in each parameter group, and nowhere else."""
    inner = state if own is OptimizerKind.PLAIN else state["optimizer"]
    inner.get("state", {}).pop("common_step", None)
    for group in inner["param_groups"]:
        group["step"] = step


def _step(dense: dict[str, Any], stored: OptimizerKind) -> float | None:
    """Adam's step count, from the part of dense weights, of which every rank has some; None for SGD."""
    written = dense if stored is OptimizerKind.PLAIN else dense["optimizer"]
    if "common_step" in written.get("state", {}):
        return float(written["state"]["common_step"])
    return next((group["step"] for group in written["param_groups"] if "step" in group), None)


def _rename(tree: Any, *, prefix: str, replacement: str | None) -> None:
    """Replace the prefix of the keys of sharded tensors in `tree`; remove the tensors if `replacement` is None."""
    for name, leaf in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        if isinstance(leaf, dict | list):
            _rename(leaf, prefix=prefix, replacement=replacement)
        elif isinstance(leaf, ShardedBase) and leaf.key.startswith(prefix):
            if replacement is None:
                del tree[name]
            else:
                leaf.key = replacement + leaf.key.removeprefix(prefix)
