"""`zerobubble completion bash` (or fish, zsh, tcsh): a script for the shell, made by shtab from the parsers of all commands.

::

    zerobubble completion bash > ~/.local/share/bash-completion/completions/zerobubble
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from megatron.zerobubble.cli.main import build_parser
from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import installed

__all__ = ["main"]

_PARSERS = {
    "playground": "megatron.zerobubble.playground.__main__",
    "train": "megatron.zerobubble.training.arguments",
    "run": "megatron.zerobubble.cli.run",
    "bench": "megatron.zerobubble.bench.bench_options",
}
"""Command with a parser of its own -> the module whose `build_parser` makes it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script. 2 without shtab, which one line on stderr names."""
    parser = Parser(prog="zerobubble completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=("bash", "fish", "zsh", "tcsh"), metavar="{bash,fish,zsh,tcsh}")
    shell = parser.parse_args(argv).shell
    try:
        installed(parser.prog, "shtab", extra="completion")
    except ConfigError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    shtab: Any = importlib.import_module("shtab")
    print(shtab.complete(_whole(shtab), shell))
    return 0


def _whole(shtab: Any) -> argparse.ArgumentParser:
    """The parser of `zerobubble` with those of all commands that have flags, and files where a flag takes one."""
    whole = build_parser()
    (commands,) = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    commands.help = "command"  # shtab skips what --help does
    for name, module in _PARSERS.items():
        with contextlib.suppress(ImportError):  # of a command whose extra is not installed only the name is completed
            commands.choices[name] = importlib.import_module(module).build_parser()
    for action in (action for parser in commands.choices.values() for action in parser._actions):
        if action.metavar in ("FILE", "SCRIPT") or action.dest == "file":
            action.complete = shtab.FILE
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY
    return whole
