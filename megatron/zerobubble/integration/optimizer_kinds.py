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
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from megatron.zerobubble.errors import CheckpointError

__all__ = ["OptimizerKind", "ask_for", "kind_of", "stored_kind", "translate"]


class OptimizerKind(enum.Enum):
    """What of megatron-core's optimizers it is."""

    PLAIN = "the plain fp32 optimizer"
    MIXED = "the plain optimizer with master weights"
    DISTRIBUTED = "the distributed optimizer"
    CHAIN = "a chain of optimizers"


_MASTER = {OptimizerKind.MIXED: "optimizer.state.fp32_param.", OptimizerKind.DISTRIBUTED: "optimizer.state.param."}
"""How the names of master weights begin."""


def kind_of(optimizer: Any) -> OptimizerKind:
    """The kind of what `get_megatron_optimizer` returned."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(parts) > 1:
        return OptimizerKind.CHAIN
    if isinstance(parts[0], DistributedOptimizer):
        return OptimizerKind.DISTRIBUTED
    return OptimizerKind.PLAIN if isinstance(parts[0], FP32Optimizer) else OptimizerKind.MIXED


def stored_kind(common: dict[str, Any]) -> OptimizerKind:
    """The kind that wrote a checkpoint, from what it has in common for all ranks under "optimizer"."""
    if "param_state_sharding_type" in common:
        return OptimizerKind.DISTRIBUTED
    if "param_groups" in common:
        return OptimizerKind.PLAIN
    return OptimizerKind.MIXED if "optimizer" in common else OptimizerKind.CHAIN


def ask_for(wanted: dict[str, Any], *, stored: OptimizerKind, own: OptimizerKind) -> None:
    """Change an optimizer's `sharded_state_dict`, in place, so that it asks for what a checkpoint of the `stored` kind holds.

    Master weights that it does not hold are left out; they are the weights, and to be copied from them after loading.

    Raises:
        CheckpointError: the kinds do not hold the same.
    """
    if stored is own:
        return
    if OptimizerKind.CHAIN in (stored, own) or {stored, own} == {OptimizerKind.PLAIN, OptimizerKind.MIXED}:
        raise CheckpointError(
            f"it was written by {stored.value} and cannot be loaded into {own.value}; train with the same precision and "
            "optimizer, or give --no-load-optim to begin with a new one"
        )
    if own is OptimizerKind.PLAIN:
        return
    _rename(wanted, begins=_MASTER[own], instead=_MASTER.get(stored))


def translate(state: dict[str, Any], *, stored: OptimizerKind, own: OptimizerKind) -> dict[str, Any]:
    """What was loaded after `ask_for`, in the form that an optimizer of its `own` kind loads.

    Args:
        state: everything loaded under "optimizer": what the checkpoint has in common for all ranks, and what was asked for.
        stored: the kind that wrote the checkpoint.
        own: the kind that loads it.
    """
    if stored is own:
        return state
    written = state if stored is OptimizerKind.PLAIN else state["optimizer"]
    step = _step(written)
    groups = [{name: value for name, value in group.items() if name != "step"} for group in written["param_groups"]]
    if own is OptimizerKind.DISTRIBUTED:
        inner = {"param_groups": [group | {"step": step} for group in groups]}
        return state | {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
    read = state if own is OptimizerKind.PLAIN else state["optimizer"]
    for group, own_group in zip(groups, read["param_groups"], strict=True):
        own_group.pop("step", None)
        own_group.update(group)  # `params`, by which a rank knows its parameters, are its own
    read["state"]["common_step"] = torch.tensor(step)
    return state


def _step(written: dict[str, Any]) -> float:
    if "common_step" in written.get("state", {}):
        return float(written["state"]["common_step"])
    return float(next(group["step"] for group in written["param_groups"] if "step" in group))


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
