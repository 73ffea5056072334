"""What a checkpoint holds of one rank.

Weights are megatron-core's sharded tensors, under global names, so that a run in another layout of ranks can begin with them.
What is bound to the layout is stored by rank, as it is in memory: the optimizers' own state dicts and master weights, and the
generators of random numbers. A run in the same layout continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.utils import get_attr_wrapped_model

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.optimizer.parts import parts_of

__all__ = ["Trained", "load_rank_state", "load_weights", "rank_state", "weights"]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank trains."""

    chunks: list[Any]
    """Its model chunks, wrapped in DistributedDataParallel."""
    ddp_config: Any
    """DDP's configuration. It cuts the buckets by which a distributed optimizer shards."""
    optimizer: Any
    """megatron-core's."""
    scheduler: Any
    """Of learning rate and weight decay."""


def weights(chunks: list[Any]) -> dict[str, Any]:
    """Sharded tensors of this rank's chunks."""
    return {name: stage.sharded_state_dict(metadata={}) for name, stage in _stages(chunks)}


def load_weights(chunks: list[Any], state: dict[str, Any]) -> None:
    """Load what `weights` asked for."""
    for name, stage in _stages(chunks):
        stage.load_state_dict(state[name])


def rank_state(asked: dict[str, Any], trained: Trained) -> dict[str, Any]:
    """Optimizers and generators of this rank, and `place`: which part of the model they are for.

    Args:
        asked: `weights` of this rank.
        trained: what it trains.
    """
    parts = _parts(trained)
    return {
        "place": [
            _place(asked),
            [[tuple(weight.shape) for weight in _masters(part)] for part in parts],
            repr(trained.ddp_config),
        ],
        "optimizers": [
            {
                "state": part.optimizer.state_dict(),
                "masters": [] if isinstance(part, FP32Optimizer) else [weight.data for weight in _masters(part)],
                "scaler": part.grad_scaler.state_dict() if getattr(part, "grad_scaler", None) else None,
            }
            for part in parts
        ],
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


@torch.no_grad()
def load_rank_state(state: dict[str, Any], own: dict[str, Any], trained: Trained) -> None:
    """Load what `rank_state` returned on this rank of the run that saved it.

    Args:
        state: changed.
        own: `rank_state` of this run.
        trained: changed in place. Parameter groups keep the learning rates of this run's flags.

    Raises:
        CheckpointError: this rank had another part of the model.
    """
    if state["place"] != own["place"]:
        raise CheckpointError("its ranks had other parts of the model or of the optimizer: give --no-load-optim, or its layout")
    for part, saved in zip(_parts(trained), state["optimizers"], strict=True):
        rates = [(group.get("max_lr"), group.get("min_lr")) for group in part.optimizer.param_groups]
        part.optimizer.load_state_dict(saved["state"])
        for group, (max_lr, min_lr) in zip(part.optimizer.param_groups, rates, strict=True):
            group.update(max_lr=max_lr, min_lr=min_lr)
        for weight, value in zip(_masters(part), saved["masters"], strict=bool(saved["masters"])):
            weight.copy_(value)
        if saved["scaler"] is not None:
            part.grad_scaler.load_state_dict(saved["scaler"])
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _stages(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    """(key, stage) per chunk: `model`, or `model0`, `model1`, ... for several. Tensors have global names under any key."""
    for index, chunk in enumerate(chunks):
        stage = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        yield ("model" if len(chunks) == 1 else f"model{index}"), stage


def _parts(trained: Trained) -> list[Any]:
    """The optimizers of the chain that have parameters on this rank."""
    return [part for part in parts_of(trained.optimizer) if part.optimizer is not None]


def _place(asked: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Names and places of the weights of each chunk."""
    return [
        (chunk, name, (value.key, getattr(value, "global_offset", None)))
        for chunk, state in sorted(asked.items())
        for name, value in sorted(state.items())
        if hasattr(value, "key")
    ]


def _masters(part: Any) -> list[torch.Tensor]:
    """What the optimizer steps: master weights, or weights that need none."""
    return [weight for group in part.optimizer.param_groups for weight in group["params"]]
