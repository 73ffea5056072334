"""`zerobubble train`: the reference trainer.

Under torchrun (`torchrun --nproc-per-node 4 -m megatron.zerobubble.cli.train FLAGS`) this process is one rank. With
`--nproc-per-node N` as its first argument it starts N ranks on this machine; without either it is a job of one rank.

This file is also the script that each rank runs, as `zerobubble run` runs those of others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.zerobubble.cli.ranks import start_ranks, take_count
from megatron.zerobubble.cli.run import run_itself
from megatron.zerobubble.errors import ConfigError

_PROG = "zerobubble train"
_MODULE = "megatron.zerobubble.cli.train"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or start the ranks that train.

    Args:
        argv: `--nproc-per-node N` (optional, first), flags of the reference trainer and zero-bubble flags; None takes those of
            the process.

    Returns:
        The exit code of one rank, or of torchrun with several.
    """
    try:
        count, flags = take_count(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"{_PROG}: error: {error}", file=sys.stderr)
        return 2
    if count is not None:
        return start_ranks(count, _MODULE, flags)
    run_itself(__file__, flags, prog=_PROG)
    return 0


if __name__ == "__main__":
    zero_bubble = globals().get("__zero_bubble__")  # if the lines above have started this
    if zero_bubble is None:
        sys.exit(main())
    from megatron.zerobubble.training import trainer

    trainer.main(zero_bubble)
