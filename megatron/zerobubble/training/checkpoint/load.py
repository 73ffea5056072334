"""Contents of a checkpoint, and loading it with any parallel layout. `save` writes it.

Tensors are stored under global names (layers are numbered through the whole model), so a checkpoint can be loaded with another
pipeline size, schedule or data-parallel size. Random number generators belong to a rank's position in the layout and are restored
only if the layout is the same; the run then continues bit for bit.

Checkpoints of Megatron-LM's own loop are read, too, and it reads ours (see `megatron_lm`).

Before anything is loaded, all ranks compare the files with the checkpoint's manifest (see `verify`), and since a distributed
checkpoint contains pickles, rank 0 inspects it (see `inspect`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import get_attr_wrapped_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.mcore.compat import imported_version
from megatron.zerobubble.training.checkpoint import megatron_lm
from megatron.zerobubble.training.checkpoint.directory import existing_directory, tracked_iteration
from megatron.zerobubble.training.checkpoint.inspect import COMMON_FILE, inspect_checkpoint
from megatron.zerobubble.training.checkpoint.manifest import Manifest
from megatron.zerobubble.training.checkpoint.optimizer_kinds import OptimizerKind, ask_for, stored_kind, translate
from megatron.zerobubble.training.checkpoint.torch_optimizer import load_state, prepare_to_load, prepare_to_save
from megatron.zerobubble.training.checkpoint.verify import check_run, verify_checkpoint
from megatron.zerobubble.training.step import TrainingState

__all__ = ["RestoredProgress", "load_checkpoint", "run_on_rank_0", "state_to_save", "without_optimizer"]

_log = logging.getLogger(__name__)

_FORMAT = "megatron-zerobubble/1"
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""How the distributed optimizer stores its state: per parameter, so that any layout can load it."""
_SCHEDULER = "opt_param_scheduler"
_MODEL_FLAGS = (
    *("num_layers", "hybrid_layer_pattern", "hidden_size", "num_attention_heads"),
    *("swiglu", "normalization", "position_embedding_type", "multi_latent_attention"),
)
_OWN_OPTIMIZER = "optimizer of this rank"
"""Key of the optimizer's sharded tensors, apart from the common state, whose parts may be those of another rank."""


@dataclass(frozen=True)
class RestoredProgress:
    """Progress of the run that saved the loaded checkpoint."""

    iteration: int
    """Iterations done."""
    consumed_samples: int
    """Samples consumed."""


def state_to_save(
    training_state: TrainingState, *, iteration: int, consumed_samples: int, run: str | None = None
) -> dict[str, Any]:
    """The contents of a checkpoint, for megatron-core's `dist_checkpointing.save`: sharded tensors of this rank and common state.

    All ranks must call this, inside `training_state.on_host()` and `parameters_in_place`.

    Args:
        training_state: model chunks, optimizer and scheduler to save.
        iteration: iterations done.
        consumed_samples: samples consumed so far by all ranks together.
        run: id of the job, if the checkpoint will have a manifest, which names it, too.
    """
    flags = training_state.settings.checkpoint
    state = _model_state(training_state)
    if flags.save_optim:
        prepare_to_save(training_state.optimizer)
        state["optimizer"] = training_state.optimizer.sharded_state_dict(dict(state), metadata=dict(_SHARDING))
        state[_SCHEDULER] = training_state.scheduler.state_dict()
    if flags.save_rng:
        state["rng"] = _rng_state()
    state |= megatron_lm.entries_for(
        training_state, iteration=iteration, consumed_samples=consumed_samples, optimizer_format=_SHARDING
    )
    state["header"] = _header(training_state) | {
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        "has_rng": flags.save_rng,
    }
    if run is not None:
        state["header"]["run"] = run
    return state


def load_checkpoint(training_state: TrainingState) -> RestoredProgress | None:
    """Load the checkpoint of --load and --ckpt-step into the model, optimizer, scheduler and random number generators.

    All ranks must call this.

    Args:
        training_state: changed in place.

    Returns:
        Progress of the run that saved it; None with --finetune, or if the --save directory has no checkpoint yet.

    Raises:
        CheckpointError: it is missing, damaged, contains more than data, or belongs to another model.
    """
    flags = training_state.settings.checkpoint
    assert flags.load is not None
    iteration = flags.ckpt_step if flags.ckpt_step is not None else tracked_iteration(flags.load)
    if iteration is None:
        _log.info("no checkpoint in %s yet: starting from newly initialized weights", flags.load)
        return None
    directory = existing_directory(flags.load, iteration)
    manifest = verify_checkpoint(directory) if flags.verify_checkpoint else None
    run_on_rank_0(lambda: inspect_checkpoint(directory))
    try:
        restored = _load_from(training_state, directory, manifest)
    except (CheckpointingException, CheckpointException, KeyError, ValueError, RuntimeError, AssertionError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{directory} cannot be loaded into this model: {_reason(error)}") from error
    _log.info("loaded %s", directory)
    return None if flags.finetune else restored


def _reason(error: BaseException) -> str:
    """The error as one line. torch's CheckpointException, a BaseException, contains the error of each rank."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_reason(each)}" for rank, (each, _) in sorted(error.failures.items()))
    return " ".join(f"{type(error).__name__} {error}".split())


def _load_from(training_state: TrainingState, directory: Path, manifest: Manifest | None) -> RestoredProgress:
    flags, optimizer = training_state.settings.checkpoint, training_state.optimizer
    common = _load_common(directory)
    is_foreign = megatron_lm.is_from(common)
    header = megatron_lm.header_of(common, names=_MODEL_FLAGS) if is_foreign else common.get("header", {})
    if not is_foreign and header.get("format") != _FORMAT:
        raise CheckpointError(f"{directory} has format {header.get('format')!r}; this version reads {_FORMAT!r}")
    if flags.verify_checkpoint:
        check_run(manifest, header.get("run"), directory)
    from_gpt = _layers_of_gpt(header, training_state, directory)
    _check_model(header, training_state, directory, skipped=() if from_gpt is None else ("num_layers", "hybrid_layer_pattern"))
    loads_optimizer = flags.load_optim and not flags.finetune
    if loads_optimizer:
        _check_optimizer(common, training_state, directory)
    layout = _layout(training_state)
    same_layout = all(layout[name] == size for name, size in ({"context": 1} | header["layout"]).items())
    loads_rng = flags.load_rng and not flags.finetune and same_layout and header["has_rng"]
    with training_state.on_host():
        wanted = _model_state(training_state)
        if loads_optimizer:
            prepare_to_load(optimizer)
            own = optimizer.sharded_state_dict(dict(wanted), is_loading=True, metadata=dict(_SHARDING))
            if from_gpt is not None:
                from_gpt(own)
            wanted[_OWN_OPTIMIZER] = ask_for(own, common=common["optimizer"], optimizer=optimizer)
        if from_gpt is not None:
            for name, _ in _named_stages(training_state):
                from_gpt(wanted[name])
        if loads_rng:
            wanted["rng"] = megatron_lm.rng_object() if is_foreign else _rng_state()
        with _quiet_torch():
            state = dist_checkpointing.load(wanted, str(directory), strict=StrictHandling.RAISE_UNEXPECTED)
        for name, stage in _named_stages(training_state):
            stage.load_state_dict(state[name])
        if loads_optimizer:
            _load_optimizer(training_state, state | {"optimizer": common["optimizer"]}, asked=wanted[_OWN_OPTIMIZER])
        else:
            optimizer.reload_model_params()
    if loads_rng:
        (megatron_lm.set_rng_state if is_foreign else _set_rng_state)(state["rng"])
    elif flags.load_rng and not flags.finetune:
        why = "the checkpoint has no random number generators" if same_layout else "the layout differs from the checkpoint's"
        _log.info("%s: dropout continues with newly seeded generators", why)
    return RestoredProgress(header["iteration"], header["consumed_samples"])


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Ignore torch's warnings about how megatron-core 0.19 calls it: positional arguments, and each rank reading by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The argument order of load has been changed", category=UserWarning)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)
        yield


def _load_common(directory: Path) -> dict[str, Any]:
    """The common state of a checkpoint that passed its inspection."""
    try:
        with _quiet_torch():
            common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(directory))
    except (CheckpointingException, AttributeError) as error:  # the latter while it composes the message of the former
        if (directory / COMMON_FILE).is_file():
            raise
        raise CheckpointError(
            f"{directory} was saved by megatron-core 0.19 or newer, whose checkpoints have no {COMMON_FILE}; this one, "
            f"{imported_version()}, cannot read it: load it with megatron-core 0.19 or newer, which reads older checkpoints, too"
        ) from error
    return common


# -- contents of a checkpoint -------------------------------------------------------------------------------------------


def _named_stages(training_state: TrainingState) -> Iterator[tuple[str, Any]]:
    """(key, stage) per chunk: `model`, or `model0`, `model1`, ... for several. Tensors have global names under any key."""
    for index, chunk in enumerate(training_state.chunks):
        stage = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        yield ("model" if len(training_state.chunks) == 1 else f"model{index}"), stage


def _model_state(training_state: TrainingState) -> dict[str, Any]:
    return {name: stage.sharded_state_dict(metadata={}) for name, stage in _named_stages(training_state)}


def _layout(training_state: TrainingState) -> dict[str, Any]:
    settings = training_state.settings
    return {
        "pipeline": settings.pipeline_size,
        "tensor": settings.parallel.tensor_model_parallel_size,
        "context": settings.parallel.context_parallel_size,
        "data": settings.data_parallel_size,
        "chunks": settings.num_chunks,
        "stages": settings.stage_layers(training_state.schedule.spec.placement).text,
    }


def _header(training_state: TrainingState) -> dict[str, Any]:
    settings = training_state.settings
    hybrid = settings.hybrid_pattern(training_state.schedule.spec.placement)
    own = {
        "num_layers": settings.num_layers,
        "hybrid_layer_pattern": None if hybrid is None else hybrid.layers,
        "multi_latent_attention": settings.mla.multi_latent_attention,
    }
    return {
        "format": _FORMAT,
        "layout": _layout(training_state),
        "model": own | {name: getattr(settings.model, name) for name in _MODEL_FLAGS if name not in own},
    }


def _check_model(
    header: dict[str, Any], training_state: TrainingState, directory: Path, *, skipped: tuple[str, ...] = ()
) -> None:
    own = _header(training_state)["model"]
    for name, saved in header["model"].items():
        if name not in skipped and saved != (value := own.get(name)):
            flag = "--" + name.replace("_", "-")
            raise CheckpointError(f"{directory} was saved with {flag} {saved}, this run has {value}")


def _layers_of_gpt(
    header: dict[str, Any], training_state: TrainingState, directory: Path
) -> Callable[[dict[str, Any]], None] | None:
    """How the sharded state of a `HybridModel` asks for the tensors of a `GPTModel`, if the checkpoint is of one.

    Layer i of the GPT is the i-th attention layer and the i-th MLP, or MLP with experts, of the pattern. megatron-core 0.19 has
    the translation; Mamba layers keep their initial weights.

    Returns:
        A function that changes a sharded state in place; None if the checkpoint is of the same kind of model.

    Raises:
        CheckpointError: the pattern is not that of a GPT with the checkpoint's number of layers.
    """
    pattern = _header(training_state)["model"]["hybrid_layer_pattern"]
    if pattern is None or header["model"].get("hybrid_layer_pattern") is not None:
        return None
    what = f"{directory} is of a GPTModel, this run trains a HybridModel of {pattern}"
    try:
        from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop
    except ImportError:
        raise CheckpointError(f"{what}: megatron-core can translate it from 0.19 on, this is {imported_version()}") from None
    try:
        maps = interop.gpt_compatible_layer_maps(pattern)
    except ValueError as error:
        raise CheckpointError(f"{what}: {error}") from error
    if maps.num_gpt_layers != header["model"]["num_layers"]:
        raise CheckpointError(f"{what}, whose {maps.num_gpt_layers} pairs are not its {header['model']['num_layers']} layers")
    return lambda state: interop.retarget_sharded_state_dict_to_gpt_checkpoint(state, maps)


def _check_optimizer(common: dict[str, Any], training_state: TrainingState, directory: Path) -> None:
    """Raise unless the checkpoint has an optimizer state with the schedule of the flags, or a flag chooses between the two."""
    if _SCHEDULER not in common:
        raise CheckpointError(f"{directory} has no optimizer state; give --no-load-optim, or --finetune to start at iteration 0")
    stored = megatron_lm.optimizer_format(common)
    if stored is not None and stored != _SHARDING["distrib_optim_sharding_type"]:
        raise CheckpointError(
            f"{directory} has the distributed optimizer's state in buckets of another loop ({stored}); save it there with "
            "--dist-ckpt-optim-fully-reshardable, or give --no-load-optim here"
        )
    optim = training_state.settings.optim
    if optim.override_opt_param_scheduler or optim.use_checkpoint_opt_param_scheduler:
        return
    for name, value in training_state.scheduler.state_dict().items():
        if name != "num_steps" and common[_SCHEDULER].get(name) != value:
            raise CheckpointError(
                f"{directory} was trained with {name} {common[_SCHEDULER].get(name)}, the flags request {value}; give "
                "--override-opt_param-scheduler to use the flags, or --use-checkpoint-opt_param-scheduler"
            )


def _load_optimizer(training_state: TrainingState, state: dict[str, Any], *, asked: dict[int, Any]) -> None:
    """Load optimizer and scheduler from the `asked` sharded tensors and the common state.

    The optimizer's parameter groups have learning rates of their own, to which --override-opt_param-scheduler applies, too.
    """
    optimizer, common = training_state.optimizer, state["optimizer"]
    groups = [(group["max_lr"], group["min_lr"]) for group in optimizer.param_groups]
    load_state(optimizer, translate(state[_OWN_OPTIMIZER], asked=asked, common=common, optimizer=optimizer))
    if stored_kind(common) is OptimizerKind.PLAIN:
        optimizer.reload_model_params()  # which are its master weights
    if training_state.settings.optim.override_opt_param_scheduler:
        for group, (max_lr, min_lr) in zip(optimizer.param_groups, groups, strict=True):
            group["max_lr"], group["min_lr"] = max_lr, min_lr
    training_state.scheduler.load_state_dict(state[_SCHEDULER])


def _rng_state() -> dict[str, ShardedTensor]:
    """States of the random number generators that training uses: torch's, and those of megatron-core's RNG tracker.

    Byte tensors (uint8), sharded by the rank's position in the layout; context-parallel ranks have the same. Python's and numpy's
    generators are not saved: training does not use them.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    states = {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state(), **tracker}
    return {name: _at_this_place(f"rng.{name}", state) for name, state in states.items()}


def _set_rng_state(states: dict[str, torch.Tensor]) -> None:
    states = {name: state.reshape(-1).cpu() for name, state in states.items()}
    torch.set_rng_state(states.pop("cpu"))
    torch.cuda.set_rng_state(states.pop("device"))
    tensor_parallel.get_cuda_rng_tracker().set_states(states)


def _at_this_place(key: str, data: torch.Tensor) -> ShardedTensor:
    places = (
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()),
        (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
        (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()),
    )
    offsets = [(axis, rank, size) for axis, (rank, size) in enumerate(places)]
    replica = parallel_state.get_context_parallel_rank()
    return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica, prepend_axis_num=len(offsets))


def without_optimizer(common: dict[str, Any]) -> dict[str, Any]:
    """The common state without the optimizer, whose parameter numbers differ between ranks; megatron-core compares the rest."""
    return {name: value for name, value in common.items() if name != "optimizer"}


def run_on_rank_0(action: Callable[[], None]) -> None:
    """Run `action` on rank 0; if it raises a CheckpointError there, every rank raises the same. All ranks must call this."""
    failure: list[str | None] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            action()
        except CheckpointError as error:
            failure = [str(error)]
    torch.distributed.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise CheckpointError(failure[0])
