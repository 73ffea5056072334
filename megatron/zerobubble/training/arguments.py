"""Parses the command line into checked `Settings`, or reports one line and exits with code 2.

Besides the commands in `cli`, the only module that reads argv. It imports no torch and has no side effects, so that `--help` and
a mistyped flag cost nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron.zerobubble.errors import ConfigError, PlanError, UserError
from megatron.zerobubble.flags.dataclass_flags import add_group, from_namespace
from megatron.zerobubble.flags.fork_flags import in_our_flags
from megatron.zerobubble.job.exit import exit_with_error
from megatron.zerobubble.messages import closest, one_line, shown
from megatron.zerobubble.training.check import check_settings
from megatron.zerobubble.training.config.ignored import add_ignored
from megatron.zerobubble.training.config.settings import Settings

__all__ = ["build_parser", "parse_arguments", "settings_from_argv"]

_GROUPS: dict[str, Any] = {name: kind for name, kind in typing.get_type_hints(Settings).items() if dataclasses.is_dataclass(kind)}
"""Field of `Settings` -> dataclass with its flags, in the order of --help."""

_PROG = "pretrain_gpt.py"
"""Program name in the usage and in error lines, unless the caller passes another."""

_ELSEWHERE = "megatron-core 0.17 (Python 3.12), where pretrain_gpt.py is Megatron-LM's own loop"
"""Where a flag of Megatron-LM runs that this trainer does not have."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(f"{message} (--help lists all flags)")


def build_parser(*, prog: str = _PROG) -> argparse.ArgumentParser:
    """The parser with the flags of all groups.

    Args:
        prog: program name in the usage.
    """
    about = "Train a GPT through zero-bubble pipeline schedules on megatron-core. Start it with torchrun."
    parser = _Parser(prog=prog, description=about, allow_abbrev=False)
    for config_class in _GROUPS.values():
        add_group(parser, config_class)
    add_ignored(parser)
    return parser


def settings_from_argv(argv: Sequence[str], *, world_size: int, rank: int = 0, prog: str = _PROG) -> Settings:
    """Parse and check flags.

    Args:
        argv: the flags.
        world_size: number of ranks of the job.
        rank: this process' rank. Rank 0 checks more than the others (`check.check_settings`).
        prog: program name in the usage.

    Raises:
        UserError: a flag is wrong; the message is one line.
    """
    words = list(argv)
    try:
        words, note = in_our_flags(words)
        return _checked(words, note, prog=prog, world_size=world_size, is_first=rank == 0)
    except UserError as error:
        draws_plan = isinstance(error, PlanError) and "\n" in str(error)
        raise type(error)(str(error) if draws_plan else one_line(str(error), _values(words))) from None
    except OSError as error:  # a path that the system refuses to look up, such as a name of more than 255 bytes
        raise ConfigError(f"{shown(error.filename)}: {error.strerror}; give another path") from None


def _values(words: Sequence[str]) -> list[str]:
    """The words of a command line, and the values of those with an equals sign."""
    return [*words, *(word.partition("=")[2] for word in words if "=" in word)]


def _checked(words: Sequence[str], note: str | None, *, prog: str, world_size: int, is_first: bool) -> Settings:
    """`words` of the command line as settings that can run. `note`: on its flags. Raises UserError, and OSError for paths."""
    parser = build_parser(prog=prog)
    required = [action for action in parser._actions if action.required]
    for action in required:
        action.required = False  # what is missing comes after what is unknown
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"unrecognized arguments: {_described(unknown, list(parser._option_string_actions))}")
    if missing := [action.option_strings[0] for action in required if getattr(namespace, action.dest) is None]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    groups: dict[str, Any] = {name: from_namespace(config_class, namespace) for name, config_class in _GROUPS.items()}
    parallel = groups["parallel"]
    groups["model"] = groups["model"].with_layers(parallel)
    groups["parallel"] = parallel.without_idle_sequence_parallel()
    ignored = namespace.ignored_flags
    if groups["parallel"] != parallel:
        ignored = (*ignored, "--sequence-parallel")
    settings = Settings(**groups, world_size=world_size, ignored_flags=ignored, notes=(note,) if note else ())
    check_settings(settings, is_first=is_first)
    return settings


def _described(unknown: Sequence[str], known: Sequence[str]) -> str:
    """The flags among what argparse does not know, likely typos first; or if there are none, all of it."""
    flags = dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("--"))
    meant = {flag: closest(flag, known, cutoff=0.85) for flag in flags}
    typos = [f"{flag} (did you mean {likely}?)" for flag, likely in meant.items() if likely]
    others = [shown(flag) for flag in flags if not meant[flag]]
    listed = ", ".join([*typos, *others] or map(shown, unknown))
    return f"{listed}, which need{'s' if len(others) == 1 else ''} {_ELSEWHERE}" if others else listed


def parse_arguments(
    argv: Sequence[str] | None = None,
    *,
    rank: int,
    world_size: int,
    is_reporting: bool | None = None,
    prog: str = _PROG,
    error_file: str | None = None,
    before_exit: Callable[[UserError], None] | None = None,
) -> Settings:
    """Parse and check the command line of this process.

    Args:
        argv: flags; None takes them from `sys.argv`.
        rank: this process' rank.
        world_size: number of ranks of the job.
        is_reporting: as of `exit_with_error`.
        prog: program name in the usage and in the error line.
        error_file: where torchrun expects the reason of a failure.
        before_exit: as of `exit_with_error`.

    Raises:
        SystemExit: a flag is wrong (exit code 2), or --help was printed (exit code 0).
    """
    try:
        return settings_from_argv(sys.argv[1:] if argv is None else argv, world_size=world_size, rank=rank, prog=prog)
    except UserError as error:
        exit_with_error(error, rank=rank, is_reporting=is_reporting, prog=prog, error_file=error_file, before_exit=before_exit)
