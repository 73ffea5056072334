"""Verifies a checkpoint against its manifest on all ranks, before anything of it is loaded.

Rank 0 reads the manifest and compares names and sizes. Then each rank reads a share of the files, for any layout of the
ranks that saved them, and all ranks raise the same error.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    damaged_content,
    damaged_names,
    first_damage,
    share_of_rank,
)
from megatron.zerobubble.training.checkpoint.shared import gathered, run_on_rank_0

__all__ = ["check_run", "verify_checkpoint"]

_log = logging.getLogger(__name__)

_REMEDY = (
    "restore it from a copy, load another checkpoint with --ckpt-step, or give --no-verify-checkpoint to load this one as it is"
)


def verify_checkpoint(directory: Path) -> Manifest:
    """Compare all files of a checkpoint with its manifest. All ranks must call this.

    Args:
        directory: the checkpoint.

    Raises:
        CheckpointError: the manifest or a file is missing, damaged, or not of this checkpoint; the same on all ranks.
    """
    begin = time.monotonic()
    manifest = run_on_rank_0(lambda: _read(directory))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = share_of_rank(manifest.files, rank=rank, world_size=world_size)
    everywhere = gathered(damaged_content(directory, own))
    _refuse(directory, {name: reason for damage in reversed(everywhere) for name, reason in damage.items()})
    took, size = time.monotonic() - begin, manifest.num_bytes / 1e9
    _log.info("%s: all %d files are as saved (%.2f GB, verified in %.2f s)", directory, len(manifest.files), size, took)
    return manifest


def check_run(manifest: Manifest, run: str, directory: Path) -> None:
    """Raise CheckpointError unless the run that a checkpoint's common state names is that of its manifest."""
    if manifest.run != run:
        raise CheckpointError(
            f"{directory / MANIFEST} is of run {str(manifest.run)[:40]}, the checkpoint of run {str(run)[:40]}; {_REMEDY}"
        )


def _read(directory: Path) -> Manifest:
    """The manifest; names and sizes are those of the files."""
    try:
        manifest = Manifest.read(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_REMEDY}") from error
    if manifest is None:
        raise CheckpointError(f"{directory / MANIFEST} is missing; {_REMEDY}")
    _refuse(directory, damaged_names(directory, manifest))
    return manifest


def _refuse(directory: Path, damage: dict[str, str]) -> None:
    if damage:
        raise CheckpointError(f"{directory}: {first_damage(damage)}; {_REMEDY}")
