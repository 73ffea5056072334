"""`zerobubble train`: pretrain_gpt.py without a checkout of the repository.

Under torchrun (`torchrun --nproc-per-node 4 -m megatron.zerobubble.cli.train FLAGS`) this process is one rank. With
`--nproc-per-node N` as its first argument it starts N ranks on this machine; without either it is a job of one rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron.zerobubble.training.arguments import parse_arguments
from megatron.zerobubble.training.entry import run
from megatron.zerobubble.training.gpt import forward_step_provider, model_provider

_FLAG = "--nproc-per-node"
_PROG = "zerobubble train"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or start the ranks that train.

    Args:
        argv: `--nproc-per-node N` (optional, first) and flags of pretrain_gpt.py; None takes those of the process.

    Returns:
        The exit code of one rank. Starting several ranks replaces this process and does not return.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].partition("=")[0] != _FLAG:
        run(model_provider, forward_step_provider, argv=words, prog=_PROG)
        return 0
    _, has_value, value = words[0].partition("=")
    count, flags = (value, words[1:]) if has_value else ("".join(words[1:2]), words[2:])
    if not count.isdecimal() or int(count) < 1:
        print(f"{_PROG}: error: {_FLAG} is {count!r}; give the number of ranks on this machine", file=sys.stderr)
        return 2
    parse_arguments(flags, rank=0, world_size=int(count), prog=_PROG)  # one line for a bad flag, before any rank starts
    return _start_ranks(int(count), flags)


def _start_ranks(count: int, flags: Sequence[str]) -> NoReturn:
    """Replace this process by torchrun with `count` ranks of this module on this machine."""
    sys.stdout.flush()
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"{_FLAG}={count}", "-m", __spec__.name)
    os.execv(sys.executable, [*launcher, *flags])


if __name__ == "__main__":
    sys.exit(main())
