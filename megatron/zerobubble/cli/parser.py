"""Shared by all command lines: errors in one line, and files by name or `-`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from megatron.zerobubble.machine import usable_cores
from megatron.zerobubble.messages import one_line
from megatron.zerobubble.plan.registry import check_at_least_one


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit code 2, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and argparse's `message` in one line on stderr."""
        self.exit(2, f"{self.prog}: error: {one_line(message)} (see --help)\n")


def read_text(source: str) -> str:
    """The text of a file in UTF-8, or of standard input for `-`."""
    return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")


def workers_of(args: argparse.Namespace) -> int:
    """Threads to search with: as many as there are CPU cores for this process, unless --workers has a number."""
    if args.workers is None:
        return usable_cores()
    check_at_least_one(workers=args.workers)
    return int(args.workers)
