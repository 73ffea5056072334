"""What a command prints to: files, written whole or not at all, and a terminal of some width, in colors or without."""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import shutil
import sys
from pathlib import Path

from megatron.zerobubble.files import replace_text
from megatron.zerobubble.flags.targets import Target, check_targets

__all__ = ["check_outputs", "columns", "has_colors", "write_text", "write_whole"]

_OUTPUTS = ("json", "svg", "save_layers", "torch_csv")
"""Flags of the planning commands that name a file to write."""

_DESCRIPTORS = ("/dev/std", "/dev/fd/", "/proc/")
"""Begins the name of an open file, whose content can be replaced but not the file."""


def check_outputs(args: argparse.Namespace) -> None:
    """Raise ConfigError unless the files that a command line names can be written, before anything is searched for."""
    given = {name: getattr(args, name, None) for name in _OUTPUTS}
    for name, file in given.items():
        if file is not None and file != "-" and not file.startswith(_DESCRIPTORS):
            target = Target(f"--{name.replace('_', '-')}", file, is_file=True, is_replaced=not Path(file).exists())
            check_targets([target], tries=True)


def write_whole(target: str, text: str) -> None:
    """Write text to a file, and name it on stderr.

    Whoever reads the file meanwhile, or after the command was killed or the disk was full, finds what it had before or all of the
    text. An existing file keeps its permissions, and a link stays one. Where a file can be written but not replaced (pipes,
    devices, hard links, files of other users, folders that cannot be written) it is written directly.

    Raises:
        OSError: it cannot be written; the error names the target.
    """
    try:
        file = Path(target).resolve()
        if target.startswith(_DESCRIPTORS) or not _is_replaceable(file):
            Path(target).write_text(text, encoding="utf-8")
        else:
            replace_text(file, text, unfinished=f".zerobubble-{secrets.token_hex(8)}.new")
        print(f"written: {target}", file=sys.stderr)
    except RuntimeError:  # a loop of symbolic links, in Python 3.11 and 3.12
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), target) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, target) from None


def _is_replaceable(file: Path) -> bool:
    if not os.access(file.parent, os.R_OK | os.W_OK | os.X_OK):
        return False
    if not file.exists():
        return True
    status = file.stat()
    return file.is_file() and os.access(file, os.W_OK) and status.st_nlink == 1 and status.st_uid == os.geteuid()


def write_text(target: str, text: str) -> None:
    """Write a text and a line's end to a file, or print it for `-`."""
    if target == "-":
        print(text)
    else:
        write_whole(target, text + "\n")


def columns(given: int | None) -> int:
    """The given columns of a text, or the terminal's; 160 where the output is no terminal."""
    if given is not None:
        return given
    return shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 160


def has_colors() -> bool:
    """Whether standard output is a terminal that shows colors, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
