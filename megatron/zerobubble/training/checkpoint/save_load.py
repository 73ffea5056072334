"""Saving and loading checkpoints, by megatron-core's `dist_checkpointing`, with a manifest (`directory`).

A damaged file is refused by its name before anything is loaded, and a job that was killed, at any moment, resumes bit for bit.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.files import disk_error
from megatron.zerobubble.messages import one_line
from megatron.zerobubble.training.checkpoint import directory as paths
from megatron.zerobubble.training.checkpoint.state import Trained, load_rank_state, load_weights, rank_state, weights

__all__ = ["load_checkpoint", "save_checkpoint", "starting_point"]

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
_ITERATION, _SCHEDULER, _WORLD_SIZE, _RANKS = "iteration", "opt_param_scheduler", "world_size", "ranks"


class _Strategy(TorchDistSaveShardedStrategy):
    """megatron-core's format `torch_dist`, written by torch in the thread that calls it.

    megatron-core's own writer starts a process that outlives a rank that is killed, and would write beside the restarted job.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's part of the state. All ranks must call it."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        writer = FileSystemWriter(checkpoint_dir, per_thread_copy_ahead=0)
        save(mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=planner)


def save_checkpoint(folder: str, trained: Trained, *, iteration: int, run: str) -> None:
    """Write a checkpoint, and make it the latest. All ranks must call this.

    Args:
        folder: the --save directory.
        trained: what this rank trains.
        iteration: iterations done.
        run: id of the job.

    Raises:
        CheckpointError: it cannot be written; the checkpoint before it remains the latest.
    """
    final, writing = paths.iteration_directory(folder, iteration), paths.writing_directory(folder, iteration)
    _on_first_rank(lambda: paths.prepare(folder, iteration), f"{final} cannot be written")
    state = weights(trained.chunks)  # read first: weights, and the rest, are then those of a step that is final
    own = rank_state(state, trained)
    state[_RANKS] = ShardedObject(_RANKS, own, (dist.get_world_size(),), (dist.get_rank(),))
    state |= {_ITERATION: iteration, _WORLD_SIZE: dist.get_world_size(), _SCHEDULER: trained.scheduler.state_dict()}
    with _gathered(trained), _named(final, "be written"):
        dist_checkpointing.save(state, str(writing), _Strategy())
        names = _on_first_rank(lambda: sorted(path.name for path in writing.iterdir()), f"{final} cannot be written")
        files = _merged({name: paths.record_of(writing / name) for name in _share(names)})
    _on_first_rank(lambda: paths.publish(folder, iteration, run=run, files=files), f"{final} cannot be written")
    _log.info("saved %s", final)


def starting_point(args: Any, attempt: Any) -> Path | None:
    """The checkpoint to begin with; None: newly initialized weights. All ranks must call this.

    After a restart it is the latest one of --save, if this job has written it; otherwise what --load and --ckpt-step name.

    Args:
        args: the flags.
        attempt: which attempt of the job this is.

    Raises:
        CheckpointError: there is none, or it is damaged; or --save cannot be written.
    """
    if args.save:
        _on_first_rank(lambda: _check_writable(Path(args.save)), f"--save {args.save} cannot be written")
    return _on_first_rank(lambda: _starting_point(args, attempt), "the checkpoint cannot be read")


def _check_writable(folder: Path) -> None:
    """Make the --save directory, and a file in it. Raises OSError now, not when the first checkpoint is due."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def _starting_point(args: Any, attempt: Any) -> Path | None:
    latest = paths.tracked_iteration(args.save) if args.save and attempt.is_restart else None
    if latest is not None:
        own = paths.existing_directory(args.save, latest)
        if (own / paths.MANIFEST).is_file() and paths.read_manifest(own)["run"] == attempt.job:
            _log.info("%s: resuming after iteration %d, from %s", attempt.text, latest, own)
            return own
    if attempt.is_restart:
        _log.info("%s: nothing that this job has saved can be resumed from: starting as at the first start", attempt.text)
    if args.load is None:
        return None
    iteration = args.ckpt_step or paths.tracked_iteration(args.load)
    if iteration is not None:
        return paths.existing_directory(args.load, iteration)
    if args.save is None or Path(args.save) != Path(args.load):
        raise CheckpointError(
            f"--load {args.load}: there is no checkpoint ({paths.TRACKER} is missing); leave --load out to start from newly "
            "initialized weights"
        )
    _log.info("no checkpoint in %s yet: starting from newly initialized weights", args.load)
    return None


def load_checkpoint(directory: Path, trained: Trained, *, loads_optimizer: bool) -> int:
    """Load a checkpoint, after all ranks together have compared its files with its manifest. All ranks must call this.

    Args:
        directory: the checkpoint.
        trained: changed in place.
        loads_optimizer: whether to load more than weights.

    Returns:
        Iterations done by the run that saved it.

    Raises:
        CheckpointError: it is missing or damaged, or belongs to another model or another layout of ranks.
    """
    _verify(directory)
    asked = weights(trained.chunks)
    with _named(directory, "be loaded into this model"):
        common = dist_checkpointing.load_common_state_dict(str(directory))
        wanted = dict(asked)
        if loads_optimizer:
            if common[_WORLD_SIZE] != dist.get_world_size():
                raise CheckpointError(
                    f"{directory} was saved by {common[_WORLD_SIZE]} ranks, this job has {dist.get_world_size()}: give "
                    "--no-load-optim to begin with its weights alone"
                )
            own = rank_state(asked, trained)
            wanted[_RANKS] = ShardedObject(_RANKS, None, (dist.get_world_size(),), (dist.get_rank(),))
        state = dist_checkpointing.load(wanted, str(directory), strict=StrictHandling.RAISE_UNEXPECTED)
        load_weights(trained.chunks, state)
        if loads_optimizer:
            load_rank_state(state[_RANKS], own, trained)
            trained.scheduler.load_state_dict(common[_SCHEDULER])
        else:
            trained.optimizer.reload_model_params()
    _log.info("loaded %s", directory)
    return int(common[_ITERATION])


def _verify(directory: Path) -> None:
    remedy = "restore it from a copy, or load another checkpoint with --load and --ckpt-step"
    manifest = _on_first_rank(lambda: paths.read_manifest(directory), str(directory))
    largest_first = sorted(manifest["files"], key=lambda name: -manifest["files"][name]["bytes"])
    if found := _merged(paths.damage(directory, manifest["files"], _share(largest_first))):
        raise CheckpointError(f"{directory}: {paths.first_damage(found)}; {remedy}")
    _log.info("%s: all %d files are as saved", directory, len(manifest["files"]))


@contextmanager
def _gathered(trained: Trained) -> Iterator[None]:
    """Inside, all parameters are gathered. With --overlap-param-gather they would arrive only during the next forward pass."""
    overlapping = trained.chunks if trained.ddp_config.overlap_param_gather else []
    for chunk in overlapping:
        chunk.disable_forward_pre_hook(param_sync=True)
    yield
    for chunk in overlapping:
        chunk.enable_forward_pre_hook()


@contextmanager
def _named(path: Path, what: str) -> Iterator[None]:
    """Raise what torch and megatron-core raise about a checkpoint as a CheckpointError of one line that names it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about how megatron-core calls it
            yield
    except CheckpointError:
        raise
    except CheckpointException as error:  # a BaseException, with the error of each rank
        reasons = "; ".join(f"rank {rank}: {disk_error(each) or each!r}" for rank, (each, _) in sorted(error.failures.items()))
        raise CheckpointError(one_line(f"{path} cannot {what}: {reasons}")) from error
    except Exception as error:
        raise CheckpointError(one_line(f"{path} cannot {what}: {disk_error(error) or error!r}")) from error


def _on_first_rank(action: Callable[[], Result], what: str) -> Result:
    """The result of `action`, which runs on rank 0 for all. Raises its CheckpointError or OSError as CheckpointError on all."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except CheckpointError as error:
            outcome[1] = str(error)
        except OSError as error:
            outcome[1] = f"{what}: {error}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    result: Result = outcome[0]
    return result


def _share(names: list[str]) -> list[str]:
    """The files that this rank reads for all."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _merged(own: dict[str, Result]) -> dict[str, Result]:
    """What all ranks have. All ranks must call this."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return {name: each for found in everywhere for name, each in found.items()}
