"""Loading a checkpoint with any parallel layout. See `contents` for what is in it.

Random number generators are restored only if the layout is the same; the run then continues bit for bit.

Before anything is loaded, all ranks compare the files with the checkpoint's manifest (see `verification`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.mcore.compat import imported_version
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.training.checkpoint.contents import (
    FORMAT,
    SCHEDULER,
    SHARDING,
    layout_of,
    model_of,
    model_state,
    named_stages,
    set_rng_states,
    sharded_rng_states,
)
from megatron.zerobubble.training.checkpoint.directory import existing_directory, tracked_iteration
from megatron.zerobubble.training.checkpoint.manifest import Manifest
from megatron.zerobubble.training.checkpoint.optimizer_parts import assembled, by_part, check_same_kind
from megatron.zerobubble.training.checkpoint.shared import check_all_hosts_see, run_on_rank_0
from megatron.zerobubble.training.checkpoint.torch_optimizer import load_state, prepare_to_load
from megatron.zerobubble.training.checkpoint.verification import check_run, verify_checkpoint
from megatron.zerobubble.training.step import TrainingState

__all__ = ["RestoredProgress", "load_checkpoint"]

_log = logging.getLogger(__name__)

_OF_ODD_CONTENT = (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError, AssertionError, OSError)
"""What torch, megatron-core and the code here raise on content that was not verified, and is not what was saved."""
_COMMON_FILE = "common.pt"
"""Where megatron-core before 0.19 saves the common state, what is not a sharded tensor. Later ones read it, too."""
_OWN_OPTIMIZER = "optimizer of this rank"
"""Key of the optimizer's sharded tensors, apart from the common state, whose parts may be those of another rank."""


@dataclass(frozen=True)
class RestoredProgress:
    """Progress of the run that saved the loaded checkpoint."""

    iteration: int
    """Iterations done."""
    consumed_samples: int
    """Samples consumed."""


def load_checkpoint(training_state: TrainingState) -> RestoredProgress | None:
    """Load the checkpoint of --load and --ckpt-step into the model, optimizer, scheduler and random number generators.

    All ranks must call this.

    Args:
        training_state: changed in place.

    Returns:
        Progress of the run that saved it; None if the --save directory has no checkpoint yet.

    Raises:
        CheckpointError: it is missing, damaged, not seen by a host, or belongs to another model.
    """
    flags = training_state.settings.checkpoint
    assert flags.load is not None
    folder, iteration = flags.load, flags.ckpt_step
    if iteration is None:
        iteration = run_on_rank_0(lambda: tracked_iteration(folder))
    if iteration is None:
        _log.info("no checkpoint in %s yet: starting from newly initialized weights", folder)
        return None
    directory = run_on_rank_0(lambda: existing_directory(folder, iteration))
    check_all_hosts_see(directory / "metadata.json", str(directory))
    manifest = verify_checkpoint(directory) if flags.verify_checkpoint else None
    try:
        restored = _load_from(training_state, directory, manifest)
    except (CheckpointingException, CheckpointException, *_OF_ODD_CONTENT) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{directory} cannot be loaded into this model: {_reason(error)}") from error
    _log.info("loaded %s", directory)
    return restored


def _reason(error: BaseException) -> str:
    """The error as one line. torch's CheckpointException, a BaseException, contains the error of each rank."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_reason(each)}" for rank, (each, _) in sorted(error.failures.items()))
    return " ".join(f"{type(error).__name__} {error}".split())


def _load_from(training_state: TrainingState, directory: Path, manifest: Manifest | None) -> RestoredProgress:
    flags, optimizer = training_state.settings.checkpoint, training_state.optimizer
    common = _load_common(directory)
    header = _header_of(common, directory)
    if manifest is not None:
        check_run(manifest, header["run"], directory)
    _check_model(header, training_state, directory)
    if flags.load_optim:
        _check_optimizer(common, training_state, directory)
    loads_rng = header["layout"] == layout_of(training_state)
    with training_state.on_host():
        wanted = model_state(training_state)
        if flags.load_optim:
            prepare_to_load(optimizer)
            own = optimizer.sharded_state_dict(dict(wanted), is_loading=True, metadata=dict(SHARDING))
            wanted[_OWN_OPTIMIZER] = by_part(own)
        if loads_rng:
            wanted["rng"] = sharded_rng_states()
        with _quiet_torch():
            state = dist_checkpointing.load(wanted, str(directory), strict=StrictHandling.RAISE_UNEXPECTED)
        for name, stage in named_stages(training_state):
            stage.load_state_dict(state[name])
        if flags.load_optim:
            _load_optimizer(training_state, state | {"optimizer": common["optimizer"]}, asked=wanted[_OWN_OPTIMIZER])
        else:
            optimizer.reload_model_params()
    if loads_rng:
        set_rng_states(state["rng"])
    else:
        _log.info("the layout differs from the checkpoint's: dropout continues with newly seeded generators")
    return RestoredProgress(header["iteration"], header["consumed_samples"])


def _header_of(common: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The header of a checkpoint of this format."""
    header: dict[str, Any] = common.get("header", {})
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory} has format {quoted(header.get('format'))}; this version reads {FORMAT!r} (those of Megatron-LM's loop "
            "load there, under zerobubble run)"
        )
    return header


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Ignore torch's warnings about how megatron-core 0.19 calls it: positional arguments, and each rank reading by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The argument order of load has been changed", category=UserWarning)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)
        yield


def _load_common(directory: Path) -> dict[str, Any]:
    """The common state of a checkpoint."""
    try:
        with _quiet_torch():
            common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(directory))
    except (CheckpointingException, AttributeError) as error:  # the latter while it composes the message of the former
        if (directory / _COMMON_FILE).is_file():
            raise
        raise CheckpointError(
            f"{directory} was saved by megatron-core 0.19 or newer, whose checkpoints have no {_COMMON_FILE}; this one, "
            f"{imported_version()}, cannot read it: load it with megatron-core 0.19 or newer, which reads older checkpoints, too"
        ) from error
    return common


def _check_model(header: dict[str, Any], training_state: TrainingState, directory: Path) -> None:
    own = model_of(training_state)
    for name, saved in header["model"].items():
        if saved != (value := own.get(name)):
            flag = "--" + name.replace("_", "-")
            raise CheckpointError(f"{directory} was saved with {flag} {saved}, this run has {value}")


def _check_optimizer(common: dict[str, Any], training_state: TrainingState, directory: Path) -> None:
    """Raise unless the checkpoint has an optimizer state with the schedule of the flags, or the flags override it."""
    if SCHEDULER not in common:
        raise CheckpointError(f"{directory} has no optimizer state; give --no-load-optim")
    check_same_kind(common["optimizer"], training_state.optimizer)
    if training_state.settings.optim.override_opt_param_scheduler:
        return
    for name, value in training_state.scheduler.state_dict().items():
        if name != "num_steps" and common[SCHEDULER].get(name) != value:
            raise CheckpointError(
                f"{directory} was trained with {name} {common[SCHEDULER].get(name)}, the flags request {value}; give "
                "--override-opt_param-scheduler to use the flags"
            )


def _load_optimizer(training_state: TrainingState, state: dict[str, Any], *, asked: dict[int, Any]) -> None:
    """Load optimizer and scheduler from the `asked` sharded tensors and the common state.

    The optimizer's parameter groups have learning rates of their own, to which --override-opt_param-scheduler applies, too.
    """
    optimizer, common = training_state.optimizer, state["optimizer"]
    groups = [(group["max_lr"], group["min_lr"]) for group in optimizer.param_groups]
    load_state(optimizer, assembled(state[_OWN_OPTIMIZER], asked=asked, common=common, optimizer=optimizer))
    if training_state.settings.optim.override_opt_param_scheduler:
        for group, (max_lr, min_lr) in zip(optimizer.param_groups, groups, strict=True):
            group["max_lr"], group["min_lr"] = max_lr, min_lr
    training_state.scheduler.load_state_dict(state[SCHEDULER])
