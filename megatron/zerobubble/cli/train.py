"""`zerobubble train`: the reference trainer.

Under torchrun (`torchrun --nproc-per-node 4 -m megatron.zerobubble.cli.train FLAGS`) this process is one rank. With
`--nproc-per-node N` as its first argument it starts N ranks on this machine; without either it is a job of one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.zerobubble.cli.ranks import start_ranks, take_count
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.arguments import parse_arguments
from megatron.zerobubble.training.entry import run
from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider

_PROG = "zerobubble train"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or start the ranks that train.

    Args:
        argv: `--nproc-per-node N` (optional, first) and flags of the reference trainer; None takes those of the process.

    Returns:
        The exit code of one rank, or of torchrun with several.
    """
    try:
        count, flags = take_count(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"{_PROG}: error: {error}", file=sys.stderr)
        return 2
    if count is None:
        run(model_provider, forward_step_provider, argv=flags, prog=_PROG)
        return 0
    parse_arguments(flags, rank=0, world_size=count, prog=_PROG)  # one line for a bad flag, before any rank starts
    return start_ranks(count, __spec__.name, flags)


if __name__ == "__main__":
    sys.exit(main())
