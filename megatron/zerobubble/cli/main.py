"""The command `zerobubble`, with the commands of `_GROUPS`.

Only `train`, `run`, `bench` and `env` import torch. These, `playground` and `checkpoint` have their own parsers; the others
share this one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from megatron.zerobubble.cli import plan
from megatron.zerobubble.cli.output_files import check_outputs
from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.errors import ConfigError, PlanError, UserError
from megatron.zerobubble.flags.require import installed
from megatron.zerobubble.messages import closest, one_line, quoted
from megatron.zerobubble.version import __version__

_BROKEN_PIPE = 141
"""Exit code of a program that SIGPIPE ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the command's name and arguments; None takes those of the process.

    Returns:
        The exit code: 2 after a user error, which is reported in one line on stderr (plan errors with their grid); 130 after
        Ctrl-C; 141, without a word, where what reads the output has ended, such as `head`.
    """
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return _BROKEN_PIPE
    return code


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        build_parser().print_help(sys.stderr)
    elif not words[0].startswith("-") and words[0] not in _NAMES:
        meant = closest(words[0], _NAMES)
        remedy = f"did you mean {meant}?" if meant else f"give one of {', '.join(_NAMES)}"
        build_parser().error(f"there is no command {quoted(words[0])}; {remedy}")
    if words and words[0] in _WITH_OWN_PARSER:
        try:
            installed(f"zerobubble {words[0]}", *_NEEDS.get(words[0], ()))
        except ConfigError as error:
            print(f"zerobubble: error: {error}", file=sys.stderr)
            return 2
        code: int = importlib.import_module(_WITH_OWN_PARSER[words[0]][0]).main(words[1:])
        return code
    args = build_parser().parse_args(words)
    try:
        check_outputs(args)
        plan.COMMANDS[args.command](args)
    except BrokenPipeError:
        raise
    except (UserError, OSError, UnicodeDecodeError) as error:
        is_drawn = isinstance(error, PlanError) and "\n" in str(error)  # with the grid of the plan
        said = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"
        text = said if is_drawn else one_line(said, words)
        print(f"zerobubble: error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("zerobubble: interrupted", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line of all commands."""
    groups = (f"{title}:\n" + "\n".join(f"    {name:12} {_MEANINGS[name]}" for name in names) for title, names in _GROUPS.items())
    parser = Parser(
        prog="zerobubble",
        usage="zerobubble [-h] [--version] COMMAND ...",
        description="Zero-bubble pipeline schedules: plan them, look at them, train with them.\n\n" + "\n\n".join(groups),
        epilog=f"examples:{_EXAMPLES}\n\nzerobubble COMMAND --help has those of each command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-zerobubble {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog="zerobubble", help=argparse.SUPPRESS)
    plan.add_commands(commands)
    for name in _WITH_OWN_PARSER:
        commands.add_parser(name, add_help=False, help=_MEANINGS[name])
    return parser


_WITH_OWN_PARSER = {
    "playground": ("megatron.zerobubble.playground.__main__", "plan schedules in the browser, on this machine only"),
    "train": ("megatron.zerobubble.cli.train", "train a GPT with the reference trainer"),
    "run": ("megatron.zerobubble.cli.run", "run any Megatron-based training script, unedited"),
    "bench": ("megatron.zerobubble.cli.bench", "compare schedules on a training script: time, memory, losses"),
    "checkpoint": ("megatron.zerobubble.cli.checkpoint", "verify the files of a checkpoint"),
    "env": ("megatron.zerobubble.cli.env", "print versions, devices and variables, for a report about a problem"),
}
"""Command -> the module whose `main` runs it, imported only then, and what it is for."""
_MEANINGS = plan.MEANINGS | {name: meaning for name, (_, meaning) in _WITH_OWN_PARSER.items()}
_GROUPS = {
    "Train": ("run", "train", "bench", "checkpoint", "env"),
    "Plan": ("plan", "layout", "compare", "show", "playground"),
    "Exchange": ("export", "import"),
}
"""Commands as --help lists them."""
_NAMES = [name for names in _GROUPS.values() for name in names]
_EXAMPLES = """
  zerobubble plan --schedule zbv -p 4 -m 8
  zerobubble run --help"""
_NEEDS = {
    "train": ("torch", "megatron.core", "numpy", "packaging"),
    "bench": ("torch", "megatron.core", "numpy", "packaging"),
    "checkpoint": ("xxhash",),
}
"""Command -> the modules that it imports, besides the standard library."""


if __name__ == "__main__":
    sys.exit(main())
