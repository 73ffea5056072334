"""`zerobubble bench`: one training script under several schedules, side by side.

::

    zerobubble bench --nproc-per-node 4 --contenders stock-1f1b,zb-h1,zbv -- /path/to/Megatron-LM/pretrain_gpt.py ITS FLAGS

Under torchrun or srun this process is one rank. With `--nproc-per-node N` as its first argument it starts N ranks on this
machine; without either it is a job of one rank. A rank trains nothing itself: it starts a process for each block
(`bench.workers`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from megatron.zerobubble.bench.bench_options import Options, parse_options
from megatron.zerobubble.bench.bench_progress import BenchProgress
from megatron.zerobubble.cli.ranks import start_ranks, take_count
from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.job.exit import exit_with_error
from megatron.zerobubble.job.launch import read_launch
from megatron.zerobubble.job.rendezvous import announce_exit, share_store
from megatron.zerobubble.script import put_folder_first

_PROG = "zerobubble bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or start the ranks that compare.

    Args:
        argv: `--nproc-per-node N` (optional, first), options of the comparison, `--`, a script and its flags; None takes those
            of the process.

    Returns:
        The exit code of one rank: 2 after a user error, 1 if no contender could be measured, 130 after an interruption. Starting
        several ranks replaces this process and does not return.
    """
    try:
        count, flags = take_count(sys.argv[1:] if argv is None else argv)
        if count is not None:
            _checked(flags, world_size=count)  # one line for a bad flag, before any rank starts
    except UserError as error:
        print(f"{_PROG}: error: {error}", file=sys.stderr)
        return 2
    if count is not None:
        return start_ranks(count, __spec__.name, flags)
    try:
        launch = read_launch()
    except ConfigError as error:
        exit_with_error(error, rank=0, prog=_PROG)
    try:
        options = _checked(flags, world_size=launch.world_size, ranks_on_host=launch.ranks_on_host)
    except UserError as error:
        exit_with_error(error, rank=launch.rank, prog=_PROG, before_exit=partial(announce_exit, launch))
    put_folder_first(options.job.script)
    progress = BenchProgress(options.num_iterations, is_quiet=launch.rank != 0)
    names = ", ".join(options.programs)
    progress.say(f"{len(options.programs)} contenders ({names}) x {options.rounds} rounds on {launch.world_size} ranks")

    from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

    with quiet_third_parties():
        from megatron.zerobubble.bench.compare import compare
        from megatron.zerobubble.bench.workers import Workers

        workers = Workers(launch, share_store(launch), options.directory / "logs")
        return compare(options, launch, workers, argv=flags, progress=progress)


def _checked(flags: Sequence[str], *, world_size: int, ranks_on_host: int | None = None) -> Options:
    """The options; the directory for the report exists and can be written to."""
    options = parse_options(flags, world_size=world_size, prog=_PROG, ranks_on_host=ranks_on_host)
    try:
        (options.directory / "logs").mkdir(parents=True, exist_ok=True)
        probe = options.directory / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--bench-dir {options.directory}: cannot write there: {error.strerror}") from None
    return options


if __name__ == "__main__":
    sys.exit(main())
