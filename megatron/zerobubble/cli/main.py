"""The command `zerobubble plan|pareto|show|compare|export|import|verify|playground|train|run|bench|checkpoint|env`.

Only `train`, `run`, `bench` and `env` import torch. These, `verify`, `playground` and `checkpoint` have their own parsers; the
others share this one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from megatron.zerobubble.cli import plan
from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.errors import ConfigError, PlanError, UserError
from megatron.zerobubble.flags.require import installed
from megatron.zerobubble.messages import one_line
from megatron.zerobubble.version import __version__


def main(argv: Sequence[str] | None = None, *, prog: str = "zerobubble") -> int:
    """Run one command.

    Args:
        argv: the command's name and arguments; None takes those of the process.
        prog: the program's name in messages.

    Returns:
        The exit code: 2 after a user error, which is reported in one line on stderr (plan errors with their grid); 130 after
        Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _WITH_OWN_PARSER:
        try:
            installed(f"{prog} {words[0]}", *_NEEDS.get(words[0], ()), extra="train")
        except ConfigError as error:
            print(f"{prog}: error: {error}", file=sys.stderr)
            return 2
        code: int = importlib.import_module(_WITH_OWN_PARSER[words[0]][0]).main(words[1:])
        return code
    args = build_parser(prog).parse_args(words)
    try:
        plan.COMMANDS[args.command](args)
    except (UserError, OSError, UnicodeDecodeError) as error:
        is_drawn = isinstance(error, PlanError) and "\n" in str(error)  # with the grid of the plan
        text = str(error) if is_drawn else one_line(str(error), words)
        print(f"{prog}: error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    return 0


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The command line of all commands."""
    parser = Parser(
        prog=prog,
        description="Zero-bubble pipeline schedules: plan them, look at them, train with them.",
        epilog=plan.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-zerobubble {__version__}")
    names = ",".join([*plan.COMMANDS, *_WITH_OWN_PARSER])
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{names}}}")
    plan.add_commands(commands)
    for name, (_, meaning) in _WITH_OWN_PARSER.items():
        commands.add_parser(name, help=meaning, add_help=False)
    return parser


_WITH_OWN_PARSER = {
    "verify": ("megatron.zerobubble.verify", "check the certificate of a plan, without trusting the planner"),
    "playground": ("megatron.zerobubble.playground.__main__", "plan schedules in the browser, on this machine only"),
    "train": ("megatron.zerobubble.cli.train", "train a GPT: pretrain_gpt.py for an installation without a checkout"),
    "run": ("megatron.zerobubble.cli.run", "run any Megatron-based training script, unedited"),
    "bench": ("megatron.zerobubble.cli.bench", "compare schedules on one training job: time, memory, losses"),
    "checkpoint": ("megatron.zerobubble.cli.checkpoint", "verify the files of a checkpoint"),
    "env": ("megatron.zerobubble.cli.env", "print versions, devices and variables, for a report about a problem"),
}
"""Command -> the module whose `main` runs it, imported only then, and what it is for."""
_NEEDS = {
    "train": ("torch", "megatron.core", "numpy", "packaging"),
    "bench": ("torch", "megatron.core", "numpy", "packaging"),
    "checkpoint": ("xxhash",),
}
"""Command -> the modules that it imports, besides the standard library."""


if __name__ == "__main__":
    sys.exit(main())
