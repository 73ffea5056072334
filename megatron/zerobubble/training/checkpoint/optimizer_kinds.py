"""A checkpoint of one kind of megatron-core's optimizer, loaded into another: plain or distributed.

All kinds store Adam's moments under the same names, as tensors of the whole model. Three things differ, and are translated while
a checkpoint is loaded; what is saved stays megatron-core's:

======================  ====================  =======================  ==============================
.                       plain, fp32           plain, bf16 or fp16      distributed
======================  ====================  =======================  ==============================
master weights          none: the weights     ``fp32_param``           ``param``
parameter groups        at the top            under ``optimizer``      under ``optimizer``
steps                   ``common_step``       ``common_step``          ``step``, in each group
======================  ====================  =======================  ==============================

With expert parallelism there are two optimizers, one for dense weights and one for experts, stored by their numbers 0 and 1;
without it one, not numbered, has both. So the parts are asked for, and put together, one by one: where the checkpoint has one and
two are wanted, experts get groups like those of dense weights. What is common to all ranks is that of the first rank, whose part
for experts knows no step where it holds none; the step is that of dense weights.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from megatron.zerobubble.errors import CheckpointError

__all__ = ["OptimizerKind", "ask_for", "stored_kind", "translate"]


class OptimizerKind(enum.Enum):
    """What of megatron-core's optimizers it is."""

    PLAIN = "the plain fp32 optimizer"
    MIXED = "the plain optimizer with master weights"
    DISTRIBUTED = "the distributed optimizer"


_MASTER = {OptimizerKind.MIXED: "optimizer.state.fp32_param.", OptimizerKind.DISTRIBUTED: "optimizer.state.param."}
"""How the names of master weights begin."""
_OF_A_GROUP = ("params", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "pre_wd_mult", "pre_lr_mult")
"""What a group of parameters does not share with the others of its model."""


def stored_kind(common: dict[Any, Any]) -> OptimizerKind:
    """The kind that wrote a checkpoint, from what it has in common for all ranks under "optimizer"."""
    first = _by_part(common)[0]
    if "param_state_sharding_type" in first:
        return OptimizerKind.DISTRIBUTED
    return OptimizerKind.PLAIN if "param_groups" in first else OptimizerKind.MIXED


def ask_for(asked: dict[Any, Any], *, common: dict[Any, Any], optimizer: Any) -> dict[int, Any]:
    """What to ask a checkpoint for, part by part, so that it is what the checkpoint holds.

    Master weights that it does not hold are left out; they are the weights, and to be copied from them after loading.

    Args:
        asked: the optimizer's own `sharded_state_dict`. Changed.
        common: what the checkpoint has in common for all ranks under "optimizer".
        optimizer: what `get_megatron_optimizer` returned.

    Raises:
        CheckpointError: the kinds do not hold the same.
    """
    parts = _by_part(asked)
    for index, part in _parts_of(optimizer):
        _ask_part(parts[index], stored=stored_kind(common), own=_kind_of(part))
    return parts


def translate(loaded: dict[int, Any], *, asked: dict[int, Any], common: dict[Any, Any], optimizer: Any) -> Any:
    """What was loaded after `ask_for`, in the form that the optimizer loads.

    Args:
        loaded: tensors of each part that has some here.
        asked: the answer of `ask_for`, for the groups that a part has.
        common: what the checkpoint has in common for all ranks under "optimizer".
        optimizer: what `get_megatron_optimizer` returned.
    """
    parts, step = {}, _step(_by_part(common)[0], stored_kind(common))
    for index, part in _parts_of(optimizer):
        shared = copy.deepcopy(_by_part(common).get(index)) or _for_experts(_by_part(common)[0], _groups(asked[index]))
        state = merge(shared, loaded.get(index, {}))
        parts[index] = _translate_part(state, stored=stored_kind(common), own=_kind_of(part), step=step)
    return parts if len(parts) > 1 else parts[0]


def _parts_of(optimizer: Any) -> Iterator[tuple[int, Any]]:
    yield from enumerate(getattr(optimizer, "chained_optimizers", [optimizer]))


def _by_part(tree: dict[Any, Any]) -> dict[int, Any]:
    return tree if all(isinstance(key, int) for key in tree) else {0: tree}


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = (state if "param_groups" in state else state["optimizer"])["param_groups"]
    return groups


def _for_experts(dense: dict[str, Any], own_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What experts would have in common, where the first rank has none: as its dense weights, in groups of their own."""
    shared = copy.deepcopy(dense)
    groups = _groups(shared)
    written = {name: value for name, value in groups[0].items() if name not in _OF_A_GROUP}
    groups[:] = [written | {name: group[name] for name in _OF_A_GROUP[1:] if name in group} for group in own_groups]
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
            "optimizer, or give --no-load-optim to begin with a new one"
        )
    if own is not OptimizerKind.PLAIN:
        _rename(wanted, begins=_MASTER[own], instead=_MASTER.get(stored))


def _translate_part(state: dict[str, Any], *, stored: OptimizerKind, own: OptimizerKind, step: float | None) -> dict[str, Any]:
    """`state` is everything of one part: what the checkpoint has in common for all ranks, and what was asked for."""
    written = state if stored is OptimizerKind.PLAIN else state["optimizer"]
    if own is OptimizerKind.MIXED:  # lists of nothing are not loaded
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
        own_group.update(group)  # `params`, by which a rank knows its parameters, are its own
    read.setdefault("state", {})["common_step"] = torch.tensor(step)
    return state


def _step(dense: dict[str, Any], stored: OptimizerKind) -> float | None:
    """Adam's, from the part of dense weights, of which every rank has some; None for SGD."""
    written = dense if stored is OptimizerKind.PLAIN else dense["optimizer"]
    if "common_step" in written.get("state", {}):
        return float(written["state"]["common_step"])
    return next((group["step"] for group in written["param_groups"] if "step" in group), None)


def _rename(tree: Any, *, begins: str, instead: str | None) -> None:
    """Let what is asked for under names that begin so be asked for under other names, or not at all."""
    for name, leaf in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        if isinstance(leaf, dict | list):
            _rename(leaf, begins=begins, instead=instead)
        elif isinstance(leaf, ShardedBase) and leaf.key.startswith(begins):
            if instead is None:
                del tree[name]
            else:
                leaf.key = instead + leaf.key.removeprefix(begins)
