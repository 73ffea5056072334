"""`zerobubble checkpoint verify DIR`: compares a checkpoint with its manifest, without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.directory import (
    MANIFEST,
    damage,
    existing_directory,
    first_damage,
    read_manifest,
    tracked_iteration,
)

_PROG = "zerobubble checkpoint"
_MAX_DIGITS = 18
_DAMAGED, _NOT_VERIFIED = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Verify a checkpoint, and print in one line what was found.

    Args:
        argv: `verify DIR` and options; None takes those of the process.

    Returns:
        The exit code: 0 if all files are as saved, 1 if the checkpoint is damaged, 2 if there is none or it has no manifest.
    """
    parser = Parser(prog=_PROG, description="Look after checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{verify}")
    verify = commands.add_parser("verify", help="compare a checkpoint's files with its manifest")
    verify.add_argument("directory", metavar="DIR", help="a --save directory, or one checkpoint in it (iter_0000100)")
    verify.add_argument(
        "--ckpt-step", type=_iteration, metavar="N", help="verify the checkpoint of this iteration instead of the latest"
    )
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        code, text = _verify(Path(args.directory), args.ckpt_step)
    except CheckpointError as error:  # a damaged tracker or manifest
        code, text = _DAMAGED, str(error)
    except OSError as error:
        code, text = _NOT_VERIFIED, f"{error.filename or args.directory}: {error.strerror}"
    print(text if code == 0 else f"{_PROG} verify: {text}", file=sys.stdout if code == 0 else sys.stderr)
    return code


def _iteration(text: str) -> int:
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an iteration")
    return int(text)


def _verify(folder: Path, iteration: int | None) -> tuple[int, str]:
    """(exit code, what was found)."""
    if not folder.is_dir():
        return _NOT_VERIFIED, f"{folder} is not a directory"
    directory = _checkpoint_in(folder, iteration)
    if directory is None or not directory.is_dir():
        which = "latest_checkpointed_iteration.txt is missing" if directory is None else f"{directory.name} is missing"
        return _NOT_VERIFIED, f"there is no checkpoint in {folder}: {which}; give the directory that --save named"
    if not (directory / MANIFEST).is_file():
        return _NOT_VERIFIED, f"{directory} has no {MANIFEST} (saved by Megatron-LM or an older version): it cannot be verified"
    manifest = read_manifest(directory)
    files = manifest["files"]
    found = damage(directory, files, track(list(files), "verifying"))
    if found:
        return _DAMAGED, f"{directory} is damaged: {first_damage(found)}"
    size = sum(each["bytes"] for each in files.values()) / 1e9
    return 0, f"{directory}: all {len(files)} files are as saved ({size:.2f} GB, run {manifest['run']})"


def _checkpoint_in(folder: Path, iteration: int | None) -> Path | None:
    """The checkpoint that is asked for: `folder` itself, or the latest or named one in it; None if it names none."""
    if iteration is None and any((folder / name).is_file() for name in (MANIFEST, "metadata.json")):
        return folder
    named = tracked_iteration(folder) if iteration is None else iteration
    return None if named is None else existing_directory(folder, named)
