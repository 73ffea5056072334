"""What a run starts from: what the flags request, or after a restart the newest state that this job itself has left.

The first attempt does what the flags request. After a restart by torchrun, in this order:

1. the newest checkpoint in --save that this job wrote, verified before anything is loaded. If it is damaged, the one before it.
   What an earlier job left in --save does not count.
2. what the flags request, as at the first start: --load, there too an older checkpoint if the latest is damaged since, or newly
   initialized weights.

One log line names what it is. The optimizer continues in case 1 with any --no-load-optim requested for the first start, so losses
are those of a run that was not disturbed.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.job.meeting import Attempt
from megatron.zerobubble.training.checkpoint.directory import existing_directory, iterations_in
from megatron.zerobubble.training.checkpoint.load import (
    RestoredProgress,
    latest_iteration,
    load_checkpoint,
    load_verified,
    verified,
)
from megatron.zerobubble.training.checkpoint.manifest import Manifest
from megatron.zerobubble.training.checkpoint.shared import run_on_rank_0
from megatron.zerobubble.training.step import TrainingState

__all__ = ["start_from"]

_log = logging.getLogger(__name__)


def start_from(training_state: TrainingState, attempt: Attempt) -> RestoredProgress | None:
    """Load what this attempt starts from. All ranks must call this.

    Args:
        training_state: changed in place.
        attempt: which attempt this is.

    Returns:
        Progress of what was loaded; None at iteration 0.

    Raises:
        CheckpointError: what the flags request cannot be loaded.
    """
    return _resume(training_state, attempt) if attempt.is_restart else _requested(training_state)


def _requested(training_state: TrainingState) -> RestoredProgress | None:
    return None if training_state.settings.checkpoint.load is None else load_checkpoint(training_state)


def _resume(training_state: TrainingState, attempt: Attempt) -> RestoredProgress | None:
    own = _with(training_state, load=training_state.settings.checkpoint.save)
    for iteration in _iterations_of(training_state, attempt):
        if (restored := _try(own, iteration, attempt)) is not None:
            return restored
    return _as_requested(training_state, attempt)


def _as_requested(training_state: TrainingState, attempt: Attempt) -> RestoredProgress | None:
    """As at the first start, with nothing of this job to resume from; an older checkpoint if --load's latest is damaged."""
    flags = training_state.settings.checkpoint
    nothing = f"{attempt.text}: nothing that this job has saved can be resumed from"
    if flags.load is None:
        _log.info("%s: starting from newly initialized weights, at iteration 0", nothing)
        return None
    _log.info("%s: starting from --load %s, as at the first start", nothing, flags.load)
    latest = latest_iteration(flags.load) if flags.ckpt_step is None else None
    if latest is not None:
        for iteration in run_on_rank_0(lambda: [each for each in iterations_in(str(flags.load)) if each <= latest]):
            if (restored := _try(training_state, iteration, attempt)) is not None:
                return restored
    return _requested(training_state)


def _try(training_state: TrainingState, iteration: int, attempt: Attempt) -> RestoredProgress | None:
    """Load the checkpoint of an iteration in the --load directory; None, after a log line, if it is damaged."""
    try:
        directory, manifest = verified(training_state, iteration)
    except CheckpointError as error:
        _log.warning("%s: %s", attempt.text, error)
        return None
    _log.info("%s: resuming after iteration %d, from %s", attempt.text, iteration, directory)
    return load_verified(training_state, directory, manifest)


def _iterations_of(training_state: TrainingState, attempt: Attempt) -> list[int]:
    """Iterations of the checkpoints in --save that this job wrote and that can be resumed from, newest first."""
    flags = training_state.settings.checkpoint
    if flags.save is None:
        return []
    if not attempt.is_known:
        _log.warning("%s: the store that had the id of this job is gone, so its own checkpoints are not known", attempt.text)
        return []
    return run_on_rank_0(lambda: _written_by(str(flags.save), attempt.job))


def _written_by(folder: str, job: str) -> list[int]:
    found = []
    for iteration in iterations_in(folder):
        directory = existing_directory(folder, iteration)
        try:
            manifest = Manifest.read(directory)
        except CheckpointError as error:
            _log.warning("%s is not resumed from: %s", directory, error)
            continue
        if manifest is not None and manifest.run == job:
            found.append(iteration)
    return found


def _with(training_state: TrainingState, *, load: str | None) -> TrainingState:
    """The same state, with flags that load all that this job saved."""
    settings = training_state.settings
    flags = replace(settings.checkpoint, load=load, ckpt_step=None, load_optim=True)
    return replace(training_state, settings=replace(settings, checkpoint=flags))
