"""The --save directory, and how a new checkpoint becomes the latest one atomically.

::

    SAVE/iter_0000100/                       a complete checkpoint
    SAVE/iter_0000200.writing/               a checkpoint being written, or left behind by a job that died
    SAVE/iter_0000100.replaced/              an older checkpoint of the same iteration, while a new one replaces it
    SAVE/latest_checkpointed_iteration.txt   the iteration of the latest checkpoint, updated last

Every step of `publish` is a rename, of files that are synced to disk. So a job that dies at any moment leaves the checkpoint that
the text file names: as `iter_N`, or, between two renames, as `iter_N.replaced`.

Only rank 0 changes the directory; after a write that failed, every host removes what it has of the unfinished checkpoint. Only
one job at a time may save into it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.files import read_regular, replace_text, sync

__all__ = [
    "TRACKER",
    "existing_directory",
    "iteration_directory",
    "iterations_in",
    "prepare",
    "publish",
    "tracked_iteration",
    "writing_directory",
]

TRACKER = "latest_checkpointed_iteration.txt"
"""Name of the file that holds the iteration of the latest checkpoint."""

_MAX_DIGITS, _MAX_BYTES = 18, 2**20
_WRITING, _REPLACED = ".writing", ".replaced"
_COMPLETE = re.compile(rf"iter_(\d{{7,{_MAX_DIGITS}}})(?:{re.escape(_REPLACED)})?")
_LEFT_BEHIND = re.compile(rf"iter_\d{{7,}}{re.escape(_WRITING)}")


def iteration_directory(folder: str | Path, iteration: int) -> Path:
    """Path of the checkpoint of an iteration."""
    return Path(folder) / f"iter_{iteration:07d}"


def writing_directory(folder: str | Path, iteration: int) -> Path:
    """Path that the checkpoint of an iteration is written to before it is published."""
    return _beside(iteration_directory(folder, iteration), _WRITING)


def existing_directory(folder: str | Path, iteration: int) -> Path:
    """Path to read the checkpoint of an iteration from, even if a job died while replacing it."""
    final = iteration_directory(folder, iteration)
    replaced = _beside(final, _REPLACED)
    return replaced if replaced.is_dir() and not final.is_dir() else final


def tracked_iteration(folder: str | Path) -> int | None:
    """The iteration of the latest checkpoint; None if the directory has none.

    Raises:
        CheckpointError: latest_checkpointed_iteration.txt is damaged.
    """
    tracker = Path(folder) / TRACKER
    try:
        text = read_regular(tracker, most=_MAX_BYTES).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{tracker} cannot be read: {error.strerror}") from error
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        held = repr(text[:40]) + (f" and {len(text) - 40:,} characters more" if len(text) > 40 else "")
        raise CheckpointError(f"{tracker} is damaged: it holds {held}, not an iteration")
    return int(text)


def iterations_in(folder: str | Path) -> list[int]:
    """The iterations of all complete checkpoints, newest first, whether the text file names them or not."""
    folder = Path(folder)
    found = (_COMPLETE.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_dir())
    return sorted({int(name[1]) for name in found if name}, reverse=True)


def prepare(folder: str | Path, iteration: int) -> Path:
    """Make an empty directory to write the checkpoint of an iteration to, and remove what jobs that died left behind.

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


def publish(folder: str | Path, iteration: int) -> Path:
    """Make the checkpoint written to `prepare`'s directory the latest one; return its path.

    Args:
        folder: the --save directory.
        iteration: iteration of the checkpoint.

    Raises:
        OSError: a file cannot be written; the previous checkpoint remains the latest.
    """
    final = iteration_directory(folder, iteration)
    writing, replaced = writing_directory(folder, iteration), _beside(final, _REPLACED)
    for path in (*writing.iterdir(), writing):
        sync(path)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # left by a job that died after `final` was in place
        final.rename(replaced)
    writing.rename(final)
    sync(final.parent)
    replace_text(final.parent / TRACKER, f"{iteration}\n")
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
