"""Contents of a checkpoint: what `save` writes and `load` asks for.

Tensors are stored under global names (layers are numbered through the whole model), so a checkpoint can be loaded with another
pipeline size, schedule or data-parallel size. Random number generators belong to a rank's position in the layout.

The common state has a header with the layout and the flags of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import get_attr_wrapped_model

from megatron.zerobubble.training.checkpoint.torch_optimizer import prepare_to_save
from megatron.zerobubble.training.step import TrainingState

__all__ = [
    "FORMAT",
    "SCHEDULER",
    "SHARDING",
    "layout_of",
    "model_of",
    "model_state",
    "named_stages",
    "set_rng_states",
    "sharded_rng_states",
    "state_to_save",
    "without_optimizer",
]

FORMAT = "megatron-zerobubble/1"
"""The header's `format`."""
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""How the distributed optimizer stores its state: per parameter, so that any layout can load it."""
SCHEDULER = "opt_param_scheduler"
"""Key of the learning-rate schedule in the common state."""
_MODEL_FLAGS = (
    *("num_layers", "hidden_size", "num_attention_heads", "swiglu", "normalization"),
    *("position_embedding_type", "multi_latent_attention"),
)
"""Flags of the model in the header, which must be those of the run that loads."""


def state_to_save(training_state: TrainingState, *, iteration: int, consumed_samples: int, run: str) -> dict[str, Any]:
    """The contents of a checkpoint, for megatron-core's `dist_checkpointing.save`: sharded tensors of this rank and common state.

    All ranks must call this, inside `training_state.on_host()` and `parameters_in_place`.

    Args:
        training_state: model chunks, optimizer and scheduler to save.
        iteration: iterations done.
        consumed_samples: samples consumed so far by all ranks together.
        run: id of the job, which the manifest names, too.
    """
    state = model_state(training_state)
    prepare_to_save(training_state.optimizer)
    state["optimizer"] = training_state.optimizer.sharded_state_dict(dict(state), metadata=dict(SHARDING))
    state[SCHEDULER] = training_state.scheduler.state_dict()
    state["rng"] = sharded_rng_states()
    state["header"] = {
        "format": FORMAT,
        "layout": layout_of(training_state),
        "model": model_of(training_state),
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        "run": run,
    }
    return state


def without_optimizer(common: dict[str, Any]) -> dict[str, Any]:
    """The common state without the optimizer, whose parameter numbers differ between ranks; megatron-core compares the rest."""
    return {name: value for name, value in common.items() if name != "optimizer"}


def named_stages(training_state: TrainingState) -> Iterator[tuple[str, Any]]:
    """(key, stage) per chunk: `model`, or `model0`, `model1`, ... for several. Tensors have global names under any key."""
    for index, chunk in enumerate(training_state.chunks):
        stage = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        yield ("model" if len(training_state.chunks) == 1 else f"model{index}"), stage


def model_state(training_state: TrainingState) -> dict[str, Any]:
    """Sharded tensors of this rank's chunks."""
    return {name: stage.sharded_state_dict(metadata={}) for name, stage in named_stages(training_state)}


def layout_of(training_state: TrainingState) -> dict[str, Any]:
    """How this run places layers on ranks: equal layouts have the same generators of random numbers."""
    settings = training_state.settings
    return {
        "pipeline": settings.pipeline_size,
        "tensor": settings.parallel.tensor_model_parallel_size,
        "context": settings.parallel.context_parallel_size,
        "data": settings.data_parallel_size,
        "chunks": settings.num_chunks,
        "stages": settings.stage_layers(training_state.schedule.spec.placement).text,
    }


def model_of(training_state: TrainingState) -> dict[str, Any]:
    """The `_MODEL_FLAGS` of this run."""
    settings = training_state.settings
    return {name: getattr(settings.mla if hasattr(settings.mla, name) else settings.model, name) for name in _MODEL_FLAGS}


def _rng_states() -> dict[str, torch.Tensor]:
    """The states of this rank by name, byte tensors (uint8) of shape [bytes]: torch's, and those of megatron-core's RNG tracker.

    Python's and numpy's generators are not among them: training does not use them.
    """
    tracker: dict[str, torch.Tensor] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state(), **tracker}


def set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to the states of `sharded_rng_states`, as they were loaded; the shape may be any."""
    flat = {name: state.reshape(-1).cpu() for name, state in states.items()}
    torch.set_rng_state(flat.pop("cpu"))
    torch.cuda.set_rng_state(flat.pop("device"))
    tensor_parallel.get_cuda_rng_tracker().set_states(flat)


def sharded_rng_states() -> dict[str, ShardedTensor]:
    """States of the generators, sharded by the rank's position in the layout; context-parallel ranks have the same."""
    return {name: _at_this_place(f"rng.{name}", state) for name, state in _rng_states().items()}


def _at_this_place(key: str, data: torch.Tensor) -> ShardedTensor:
    places = (
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()),
        (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
        (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()),
    )
    offsets = [(axis, rank, size) for axis, (rank, size) in enumerate(places)]
    replica = parallel_state.get_context_parallel_rank()
    return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica, prepend_axis_num=len(offsets))
