"""The folder that checkpoints lie in, and how one of them becomes the latest without a moment in which there is none.

::

    SAVE/iter_0000100/                       a complete checkpoint
    SAVE/iter_0000200.writing/               one that is being written, or was when the job died
    SAVE/iter_0000100.replaced/              what another of the same iteration takes the place of
    SAVE/latest_checkpointed_iteration.txt   the number of the latest one, replaced last

Every step of `publish` is a rename, after everything renamed is on disk. So a job that dies at any moment leaves the checkpoint
that the text file names: under its own name, or, between two renames, under that of what is replaced.

Only rank 0 changes anything here. Only one job at a time may save into a folder.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.atomic_files import replace_text, sync

__all__ = ["TRACKER", "existing_directory", "iteration_directory", "prepare", "publish", "tracked_iteration", "writing_directory"]

TRACKER = "latest_checkpointed_iteration.txt"
"""The file that names the latest checkpoint."""

_WRITING, _REPLACED = ".writing", ".replaced"
_LEFT_BEHIND = re.compile(rf"iter_\d{{7,}}{re.escape(_WRITING)}")


def iteration_directory(folder: str | Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return Path(folder) / f"iter_{iteration:07d}"


def writing_directory(folder: str | Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is written."""
    return _beside(iteration_directory(folder, iteration), _WRITING)


def existing_directory(folder: str | Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is to be read, also after a job that died while it was replaced."""
    final = iteration_directory(folder, iteration)
    replaced = _beside(final, _REPLACED)
    return replaced if replaced.is_dir() and not final.is_dir() else final


def tracked_iteration(folder: str | Path) -> int | None:
    """The iteration of the latest checkpoint; None where there is none.

    Raises:
        CheckpointError: the file that names it holds something else.
    """
    tracker = Path(folder) / TRACKER
    try:
        text = tracker.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    if not text.isdecimal():
        raise CheckpointError(f"{tracker} is damaged: it holds {text[:40]!r}, not an iteration")
    return int(text)


def prepare(folder: str | Path, iteration: int) -> Path:
    """A new empty directory to write the checkpoint of an iteration into. What jobs that died were writing is removed.

    Raises:
        OSError: it cannot be made.
    """
    folder = Path(folder)
    if folder.is_dir():
        for path in folder.iterdir():
            if _LEFT_BEHIND.fullmatch(path.name):
                shutil.rmtree(path)
    writing = writing_directory(folder, iteration)
    writing.mkdir(parents=True)
    return writing


def publish(folder: str | Path, iteration: int, *, retain_interval: int | None = None) -> Path:
    """Make what was written into `prepare`'s directory the latest checkpoint; returns where it lies.

    Args:
        folder: of the checkpoints.
        iteration: of the checkpoint.
        retain_interval: remove the one that was the latest until now, unless its iteration is a multiple of this. Those of jobs
            that died or were told otherwise stay.

    Raises:
        OSError: a file cannot be written; the checkpoint before stays the latest.
    """
    final = iteration_directory(folder, iteration)
    writing, replaced = writing_directory(folder, iteration), _beside(final, _REPLACED)
    before = tracked_iteration(folder)
    for path in (*writing.iterdir(), writing):
        sync(path)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # of a job that died here, after `final` had come into its place
        final.rename(replaced)
    writing.rename(final)
    sync(final.parent)
    replace_text(final.parent / TRACKER, f"{iteration}\n")
    shutil.rmtree(replaced, ignore_errors=True)
    if retain_interval is not None and before is not None and before != iteration and before % retain_interval:
        shutil.rmtree(iteration_directory(folder, before), ignore_errors=True)
    return final


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
