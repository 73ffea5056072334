"""Shared by all command lines: errors in one line, files by name or `-`, and flags of the search."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron.zerobubble.machine import usable_cores
from megatron.zerobubble.messages import one_line
from megatron.zerobubble.plan.objective import DEFAULT_OBJECTIVE, Objective
from megatron.zerobubble.plan.registry import check_at_least_one
from megatron.zerobubble.plan.search.search_options import Effort


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit code 2, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and argparse's `message` in one line on stderr."""
        self.exit(2, f"{self.prog}: error: {one_line(message)} (see --help)\n")


def add_search_flags(command: argparse.ArgumentParser, *, effort: str | None) -> None:
    """Add --effort with this default, --workers and --seed."""
    command.add_argument(
        "--effort",
        choices=[each.value for each in Effort],
        default=effort,
        help="search for a better order for about 1, 8 or 120 s on one core (p=8, m=24)"
        + ("" if effort is None else " (default %(default)s)"),
    )
    command.add_argument(
        "--workers",
        type=int,
        help="threads to search with; the plan does not depend on it, the time does (default: the CPU cores of this process)",
    )
    command.add_argument("--seed", type=int, default=0, help="random seed of the search (default %(default)s)")


def add_objective(command: argparse.ArgumentParser) -> None:
    """Add --objective."""
    command.add_argument(
        "--objective",
        choices=[objective.value for objective in Objective],
        default=DEFAULT_OBJECTIVE.value,
        help=f"iteration time to minimize: {' or '.join(objective.label for objective in Objective)} (default %(default)s, as in "
        "a run without post-validation)",
    )


def workers_of(args: argparse.Namespace) -> int:
    """Threads to search with: as many as there are CPU cores for this process, unless --workers has a number."""
    if args.workers is None:
        return usable_cores()
    check_at_least_one(workers=args.workers)
    return int(args.workers)
