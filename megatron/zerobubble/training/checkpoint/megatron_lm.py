"""Checkpoints of Megatron-LM's own training loop: what ours have besides, so that it loads them, and how its own are read.

Both are megatron-core's format, with the same global names of tensors. What differs is the common state:

==========================  ==========================================  ===========================================
.                           Megatron-LM                                 this package
==========================  ==========================================  ===========================================
flags of the run            ``args``, a Namespace with all of them      ``header``, and ``args`` for Megatron-LM
format of the optimizer     ``content_metadata``                        always the one that any layout loads
learning-rate schedule      ``opt_param_scheduler``                     the same
random number generators    ``rng_state``, an object per pipeline       ``rng``, a tensor per rank, and ``rng_state``
                            and tensor rank                             for Megatron-LM
==========================  ==========================================  ===========================================

Megatron-LM's distributed optimizer saves its state by default in buckets (``dp_reshardable``), which only the same layout and
model can load; ``--dist-ckpt-optim-fully-reshardable`` saves it per parameter, as this package does.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.step import TrainingState

__all__ = ["entries_for", "header_of", "is_from", "optimizer_format", "rng_object", "set_rng_state"]

_VERSION = 3.0
"""Megatron-LM's `checkpoint_version`: the order of query, key and value in a weight."""
_PLAIN = (str, int, float, bool, type(None))


def entries_for(
    training_state: TrainingState, *, iteration: int, consumed_samples: int, optimizer_format: dict[str, Any]
) -> dict[str, Any]:
    """What Megatron-LM's loop reads from a checkpoint beside model, optimizer and learning-rate schedule.

    Args:
        training_state: of this rank.
        iteration: iterations done.
        consumed_samples: samples consumed so far by all ranks together.
        optimizer_format: the metadata with which the optimizer's sharded state was made.
    """
    settings = training_state.settings
    return {
        "args": argparse.Namespace(**_flags(settings), consumed_train_samples=consumed_samples),
        "checkpoint_version": _VERSION,
        "iteration": iteration,
        "content_metadata": dict(optimizer_format),
        "rng_state": rng_object(),
    }


def _flags(settings: Settings) -> dict[str, Any]:
    """The flags by the names that Megatron-LM's parser gives them; values that are not plain are left out."""
    groups = [getattr(settings, field.name) for field in dataclasses.fields(settings)]
    flags = {
        field.name: getattr(group, field.name)
        for group in groups
        if dataclasses.is_dataclass(group)
        for field in dataclasses.fields(group)
    }
    chunks = settings.num_chunks
    return {name: value for name, value in flags.items() if isinstance(value, _PLAIN)} | {
        "num_layers": settings.model.num_layers,
        "world_size": settings.world_size,
        "data_parallel_size": settings.data_parallel_size,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "no_save_optim": False,
        "no_save_rng": False,
        "ckpt_format": "torch_dist",
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
    }


def is_from(common: dict[str, Any]) -> bool:
    """Whether a checkpoint was written by Megatron-LM's loop, by its common state."""
    return "header" not in common and isinstance(common.get("args"), argparse.Namespace)


def header_of(common: dict[str, Any], *, names: tuple[str, ...]) -> dict[str, Any]:
    """The flags of a checkpoint of Megatron-LM's loop, as the `header` of ours.

    Args:
        common: its common state.
        names: flags of the model to compare; one that is missing there is left out.
    """
    flags = dict(vars(common["args"]))
    if flags.get("hybrid_layer_pattern") is not None:
        flags["hybrid_layer_pattern"] = flags["hybrid_layer_pattern"].replace("|", "")
    return {
        "layout": {
            "pipeline": flags.get("pipeline_model_parallel_size", 1),
            "tensor": flags.get("tensor_model_parallel_size", 1),
            "context": flags.get("context_parallel_size", 1),
        },
        "model": {name: flags[name] for name in names if flags.get(name) is not None},
        "iteration": common["iteration"],
        "consumed_samples": flags.get("consumed_train_samples", 0),
        "has_rng": not flags.get("no_save_rng"),
    }


def optimizer_format(common: dict[str, Any]) -> str | None:
    """How Megatron-LM's distributed optimizer stored its state, such as "dp_reshardable"; None for other optimizers."""
    return (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")


def rng_object() -> ShardedObject:
    """States of the random number generators, as Megatron-LM stores them: one object per pipeline and tensor rank."""
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(
        "rng_state",
        [states],
        (parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def set_rng_state(loaded: list[dict[str, Any]]) -> None:
    """Set the random number generators to the states that `rng_object` describes, as they were loaded."""
    (states,) = loaded
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
