"""What a run starts from: what the flags request, or after a restart the newest state that this job itself has left.

The first attempt does what the flags request. After a restart by torchrun, in this order:

1. the newest checkpoint in --save that this job wrote. What an earlier job left in --save does not count.
2. what the flags request, as at the first start: --load, or newly initialized weights.

One log line names what it is. A damaged checkpoint is refused in both cases. The optimizer continues in case 1 with any
--no-load-optim requested for the first start, so losses are those of a run that was not disturbed.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.job.meeting import Attempt
from megatron.zerobubble.training.checkpoint.directory import existing_directory, iterations_in
from megatron.zerobubble.training.checkpoint.load import RestoredProgress, load_checkpoint
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
        CheckpointError: it cannot be loaded.
    """
    settings = training_state.settings
    flags = settings.checkpoint
    if attempt.is_restart:
        own = None if flags.save is None else _newest_of_this_job(flags.save, attempt)
        if flags.save is not None and own is not None:
            _log.info("%s: resuming after iteration %d, from %s", attempt.text, own, existing_directory(flags.save, own))
            flags = replace(flags, load=flags.save, ckpt_step=own, load_optim=True)
            training_state = replace(training_state, settings=replace(settings, checkpoint=flags))
        else:
            given = f"--load {flags.load}, as at the first start"
            start = "newly initialized weights, at iteration 0" if flags.load is None else given
            _log.info("%s: nothing that this job has saved can be resumed from: starting from %s", attempt.text, start)
    return None if flags.load is None else load_checkpoint(training_state)


def _newest_of_this_job(folder: str, attempt: Attempt) -> int | None:
    """Iteration of the newest checkpoint that this job wrote to a directory; None if there is none, or its id is lost."""
    if not attempt.is_known:
        _log.warning("%s: the store that had the id of this job is gone, so its own checkpoints are not known", attempt.text)
        return None
    return run_on_rank_0(lambda: next((each for each in iterations_in(folder) if _run_of(folder, each) == attempt.job), None))


def _run_of(folder: str, iteration: int) -> str | None:
    """The job that wrote a checkpoint; None, after a log line, if its manifest does not say so."""
    directory = existing_directory(folder, iteration)
    try:
        manifest = Manifest.read(directory)
    except CheckpointError as error:
        _log.warning("%s is not resumed from: %s", directory, error)
        return None
    return None if manifest is None else manifest.run
