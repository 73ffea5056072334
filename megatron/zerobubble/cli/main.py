"""The command `zerobubble plan|pareto|show|compare|export|import|verify|playground|train|run|bench|checkpoint`.

Only `train`, `run` and `bench` import torch. These, `verify`, `playground` and `checkpoint` have their own parsers; the others
share this one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from megatron.zerobubble.cli import plan
from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.errors import PlanError, UserError
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
        return _WITH_OWN_PARSER[words[0]](words[1:])
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
    commands.add_parser("verify", help="check the certificate of a plan, without trusting the planner", add_help=False)
    commands.add_parser("playground", help="plan schedules in the browser, on this machine only", add_help=False)
    commands.add_parser("train", help="train a GPT: pretrain_gpt.py for an installation without a checkout", add_help=False)
    commands.add_parser("run", help="run a training script of others, such as Megatron-LM's, unedited", add_help=False)
    commands.add_parser("bench", help="compare schedules on one training job: time, memory, losses", add_help=False)
    commands.add_parser("checkpoint", help="verify the files of a checkpoint", add_help=False)
    return parser


def _playground(argv: list[str]) -> int:
    from megatron.zerobubble.playground.__main__ import main as run

    return run(argv)


def _train(argv: list[str]) -> int:
    from megatron.zerobubble.cli.train import main as run

    return run(argv)


def _run(argv: list[str]) -> int:
    from megatron.zerobubble.cli.run import main as run

    return run(argv)


def _bench(argv: list[str]) -> int:
    from megatron.zerobubble.cli.bench import main as run

    return run(argv)


def _verify(argv: list[str]) -> int:
    from megatron.zerobubble.verify import main as run

    return run(argv)


def _checkpoint(argv: list[str]) -> int:
    from megatron.zerobubble.cli.checkpoint import main as run

    return run(argv)


_WITH_OWN_PARSER: dict[str, Callable[[list[str]], int]] = {
    "verify": _verify,
    "playground": _playground,
    "train": _train,
    "run": _run,
    "bench": _bench,
    "checkpoint": _checkpoint,
}


if __name__ == "__main__":
    sys.exit(main())
