"""Ranks on this machine for commands that train: `--nproc-per-node N` as a command's first argument starts them by torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron.zerobubble.errors import ConfigError

__all__ = ["FLAG", "start_ranks", "take_count"]

FLAG = "--nproc-per-node"


def take_count(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number of ranks to start, None where the first argument is not `--nproc-per-node`, and the other arguments.

    Raises:
        ConfigError: it is not a number of ranks.
    """
    if not words or words[0].partition("=")[0] != FLAG:
        return None, list(words)
    _, has_value, value = words[0].partition("=")
    count, others = (value, words[1:]) if has_value else ("".join(words[1:2]), words[2:])
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"{FLAG} is {count!r}; give the number of ranks on this machine")
    return int(count), list(others)


def start_ranks(count: int, module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by torchrun with `count` ranks of `module` on this machine."""
    sys.stdout.flush()
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"{FLAG}={count}", "-m", module)
    os.execv(sys.executable, [*launcher, *arguments])
