"""`zerobubble run`: a training script for megatron-core, such as Megatron-LM's own pretrain_gpt.py, with a zero-bubble schedule.

::

    torchrun --nproc-per-node 4 -m megatron.zerobubble.run --enable-zero-bubble /path/to/Megatron-LM/pretrain_gpt.py ITS FLAGS

The schedule is installed, then the script runs as `python pretrain_gpt.py` would run it: as `__main__`, with its folder first on
the path, so that a checkout's own `megatron.core` is imported. Not a line of it is edited.

The zero-bubble flags may stand before the script or among its own. They are taken off the command line before the script sees it:
that works for any script, with any parser of flags. A script that adds the flags itself, and calls `install` with what it
parsed, finds none of them there, and the schedule is installed already. Megatron-LM's flags for virtual stages are set as the
schedule takes them, and flags of the authors' fork become ours (`flags/`); a line says each change.

With ZERO_BUBBLE=0 in the environment of every rank nothing is installed, and the script runs without a zero-bubble schedule.

Under torchrun this process is one rank. With `--nproc-per-node N` as its first argument it starts N ranks on this machine.

This project's pretrain_gpt.py, whose flags include the zero-bubble flags, needs no such command: it calls `run_itself`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatron.zerobubble.cli.ranks import FLAG, start_ranks, take_count
from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.flags.fork_flags import in_our_flags
from megatron.zerobubble.flags.loop_options import READY_LENGTHS, MicrobatchLengths, Seeds
from megatron.zerobubble.flags.require import installed
from megatron.zerobubble.flags.virtual_stages import with_chunks
from megatron.zerobubble.job.exit import exit_with_error
from megatron.zerobubble.job.launch import Launch, is_turned_off, read_launch
from megatron.zerobubble.job.rendezvous import announce_exit
from megatron.zerobubble.messages import closest
from megatron.zerobubble.overlay import add_flags, chunks_of, schedule_of
from megatron.zerobubble.script import add_seeds, put_folder_first, run_script

__all__ = ["build_parser", "main", "run_itself"]

_PROG = "zerobubble run"
_MODULE = "megatron.zerobubble.run"
_PACKING = ("--sft", "--dataloader-inter-document-masking")  # of pretrain_gpt.py
_OURS = ("--zero-bubble-", "--enable-zero-bubble", "--enable-optimizer-post-validation")


class _RunParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, so that one rank reports it."""
        if "SCRIPT" in message:
            message = "give a training script and its flags"
        typos = [word for word in message.split() if message.startswith("unrecognized") and word.startswith("--")]
        meant = [closest(word.partition("=")[0], list(self._option_string_actions), cutoff=0.85) for word in typos]
        message += "".join(f"; did you mean {each}?" for each in meant if each)
        raise ConfigError(f"{message} (see --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script, or start the ranks that run it.

    Args:
        argv: `--nproc-per-node N` (optional, first), zero-bubble flags, the script and its flags; None takes the process's.

    Returns:
        The exit code of one rank, or of torchrun with several.
    """
    launch = None
    try:
        launch = read_launch()
        count, words = take_count(sys.argv[1:] if argv is None else argv)
        installed(_PROG, "torch", "megatron.core")
        args = _parse(words)
        if count is None:
            return _run(args, launch)
    except UserError as error:
        _exit(error, launch, prog=_PROG)
    return start_ranks(count, _MODULE, words)


def run_itself(script: str, argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Run the script that calls this as `main` would: without a flag that chooses a schedule, with megatron-core's own.

    Where torch sees no GPU, or with `--distributed-backend gloo`, it runs on the CPU. The script then has the zero-bubble flags
    in its global `__zero_bubble__` (`script.run_script`).

    Args:
        script: its file.
        argv: its flags, zero-bubble flags among them; None takes the process's.
        prog: its name in errors; None: that of the file.
    """
    launch, prog = None, prog or Path(script).name
    try:
        launch = read_launch()
        args = _parse([script, *(sys.argv[1:] if argv is None else argv)], is_ours=True)
        args.cpu = _backend(args.arguments) == "gloo" or not _sees_gpu()
        if args.cpu and _backend(args.arguments) == "nccl":
            raise ConfigError("--distributed-backend nccl needs GPUs, and torch sees none: leave it out to train on the CPU")
        args.microbatch_tokens = "thd" if set(_PACKING) & set(args.arguments) else None
        _run(args, launch)
    except UserError as error:
        _exit(error, launch, prog=prog)


def _exit(error: UserError, launch: Launch | None, *, prog: str) -> NoReturn:
    exit_with_error(
        error,
        rank=0 if launch is None else launch.rank,
        prog=prog,
        error_file=None if launch is None else launch.error_file,
        is_reporting=None if launch is None else launch.local_rank == 0,
        before_exit=None if launch is None else partial(announce_exit, launch),
    )


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _backend(words: Sequence[str]) -> str | None:
    """The value of --distributed-backend; None if it is not given."""
    flag = "--distributed-backend"
    values = [after for word, after in itertools.pairwise(words) if word == flag]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return values[-1] if values else None


def build_parser() -> argparse.ArgumentParser:
    """The zero-bubble flags, `cpu`, `script`, and its own `arguments`."""
    parser = _RunParser(
        prog=_PROG,
        usage=f"{_PROG} [{FLAG} N] [--cpu] [--microbatch-tokens NAME] [zero-bubble flags] SCRIPT [the script's flags]",
        description="Run a training script that is written for megatron-core, such as Megatron-LM's pretrain_gpt.py, with a "
        "zero-bubble schedule, without a change in it. Start it with torchrun -m megatron.zerobubble.run, or with "
        f"{FLAG} as the first argument. With ZERO_BUBBLE=0 in the environment the script runs without the schedule.",
        allow_abbrev=False,
    )
    parser.add_argument("--cpu", action="store_true", help="run the script on the CPU instead of GPUs, with gloo; to try it out")
    parser.add_argument(
        "--microbatch-tokens",
        choices=READY_LENGTHS,
        help="for a script that sets variable_seq_lengths: where its data iterator's batches have their length; thd: packed "
        "sequences in tokens or input_ids, with cu_seqlens; nested: nested tensors",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its flags; zero-bubble flags may be among them"
    )
    add_flags(parser)
    add_seeds(parser)
    return parser


def _parse(words: Sequence[str], *, is_ours: bool = False) -> argparse.Namespace:
    """The same, with zero-bubble flags wherever they stand, and `notes`, lines about what changed. Raises ConfigError."""
    words, note = in_our_flags(words, is_ours=is_ours)
    args = build_parser().parse_args(words, argparse.Namespace(notes=[note]))
    among_its_own = _RunParser(prog=_PROG, add_help=False, allow_abbrev=False)
    add_seeds(among_its_own)
    add_flags(among_its_own)  # a value that `args` has already is not replaced by the default
    _, args.arguments = among_its_own.parse_known_args(args.arguments, args)
    for word in args.arguments:
        if word.startswith(_OURS):
            name = word.partition("=")[0]
            meant = closest(name, list(among_its_own._option_string_actions), cutoff=0.85)
            hint = f"; did you mean {meant}?" if meant else ""
            raise ConfigError(f"{name} is not a zero-bubble flag of zerobubble run{hint} (see --help)")
    if not Path(args.script).is_file():
        raise ConfigError(f"the script {args.script} is not a file")
    if schedule_of(args) == "stock" and not is_ours and args.zero_bubble_schedule is None:
        raise ConfigError(
            "no schedule is chosen: give --enable-zero-bubble, --zero-bubble-v-schedule or --zero-bubble-schedule NAME before "
            "the script; stock is megatron-core's own"
        )
    chunks, schedule = chunks_of(args), schedule_of(args)
    if chunks is not None and not is_turned_off():
        args.arguments, note = with_chunks(args.arguments, chunks, schedule)
        args.notes.append(note)
    return args


def _run(args: argparse.Namespace, launch: Launch) -> int:
    for note in filter(None, args.notes if launch.rank == 0 else ()):
        print(note, file=sys.stderr)
    put_folder_first(args.script)
    run_script(
        args.script,
        args.arguments,
        launch,
        zero_bubble=args,
        on_cpu=args.cpu,
        lengths=None if args.microbatch_tokens is None else MicrobatchLengths(args.microbatch_tokens),
        seeds=Seeds(weights=args.zero_bubble_weights_seed, dropout=args.zero_bubble_dropout_seed),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
