"""The options of `zerobubble bench` beside the flags of the job. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.zerobubble.bench.contenders import DEFAULT, WARM_UP, Contender, parse_contenders
from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings

__all__ = ["Options", "parse_options"]

_LATER_WARM_UP = 2
_TRAIN_ITERS = "1000"
"""--train-iters, if it is not given: it only stretches the learning rate's schedule."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare, how often, and where to write the result."""

    job: Settings
    """The user's job."""
    contenders: tuple[Contender, ...]
    baseline: str
    """Name of the contender that speed-ups are relative to."""
    settings: dict[str, Settings] = field(default_factory=dict)
    """Contender -> its settings, for those under which the job can run."""
    notes: dict[str, str] = field(default_factory=dict)
    """Contender -> what differs from the job as given."""
    refused: dict[str, str] = field(default_factory=dict)
    """Contender -> why the job cannot run under it."""
    rounds: int
    """Blocks of each contender."""
    num_timed: int
    """Timed iterations of a block."""
    num_warm_up: int
    """Untimed iterations of a contender's first block."""
    num_later_warm_up: int
    """Untimed iterations of its later blocks, which load the plan and measure nothing."""
    peak_tflops: float | None
    """Of one device, for MFU."""
    directory: Path
    """Where the report and the ranks' output go."""

    @property
    def num_iterations(self) -> int:
        """Iterations of all blocks together."""
        return sum(self.block_length(number) for number in range(self.rounds)) * len(self.settings)

    def block_length(self, number: int) -> int:
        """Iterations of a block of round `number`, from 0."""
        return (self.num_warm_up if number == 0 else self.num_later_warm_up) + self.num_timed


def parse_options(argv: Sequence[str], *, world_size: int, prog: str) -> Options:
    """Parse and check the command line.

    Args:
        argv: options of the comparison and flags of the job, in any order.
        world_size: number of ranks.
        prog: program name in the usage.

    Raises:
        UserError: one line.
        SystemExit: after --help.
    """
    args, rest = _parser(prog).parse_known_args(argv)
    contenders = parse_contenders(args.contenders)
    names = [contender.text for contender in contenders]
    baseline = args.baseline or names[0]
    if baseline not in names:
        raise ConfigError(f"--baseline {baseline} is not among the contenders {', '.join(names)}; add it to --contenders")
    rounds = _number("--rounds", args.rounds, default=3 if args.quick else 5, least=1)
    num_timed = _number("--timed-iters", args.timed_iters, default=3 if args.quick else 10, least=1)
    num_warm_up = _number("--warmup-iters", args.warmup_iters, default=WARM_UP, least=WARM_UP)
    if args.peak_tflops is not None and not 0 < args.peak_tflops < float("inf"):
        raise ConfigError(f"--peak-tflops {args.peak_tflops} must be greater than 0 and finite")
    has_length = any(word.partition("=")[0] == "--train-iters" for word in rest)
    job = settings_from_argv(rest if has_length else ["--train-iters", _TRAIN_ITERS, *rest], world_size=world_size, prog=prog)
    settings, notes, refused = _settings(contenders, job, num_warm_up + num_timed)
    if not settings:
        raise ConfigError(f"no contender can run: {'; '.join(f'{name}: {why}' for name, why in refused.items())}")
    return Options(
        job=job,
        contenders=tuple(contenders),
        baseline=baseline,
        settings=settings,
        notes=notes,
        refused=refused,
        rounds=rounds,
        num_timed=num_timed,
        num_warm_up=num_warm_up,
        num_later_warm_up=_LATER_WARM_UP,
        peak_tflops=args.peak_tflops,
        directory=Path(args.bench_dir),
    )


def _number(flag: str, given: int | None, *, default: int, least: int) -> int:
    """The given value, or the default. Raises ConfigError below `least`."""
    value = default if given is None else given
    if value < least:
        raise ConfigError(f"{flag} {value} must be {least} or more")
    return value


def _settings(
    contenders: Sequence[Contender], job: Settings, num_iterations: int
) -> tuple[dict[str, Settings], dict[str, str], dict[str, str]]:
    """(settings, notes, refused) by contender. A layout for another number of stages is dropped, with a note."""
    settings: dict[str, Settings] = {}
    notes: dict[str, str] = {}
    refused: dict[str, str] = {}
    for contender in contenders:
        try:
            settings[contender.text] = contender.settings(job, num_iterations=num_iterations)
        except UserError as error:
            spread = _spread(contender, job, num_iterations)
            if spread is None:
                refused[contender.text] = " ".join(str(error).split())
            else:
                settings[contender.text] = spread
                notes[contender.text] = "--pipeline-model-parallel-layout has another number of stages; layers are spread evenly"
    return settings, notes, refused


def _spread(contender: Contender, job: Settings, num_iterations: int) -> Settings | None:
    """The settings without the job's layout, if there is one and the contender runs without it."""
    if job.parallel.pipeline_model_parallel_layout is None:
        return None
    try:
        return contender.settings(job.without_layout(), num_iterations=num_iterations)
    except UserError:
        return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(f"{message} (see --help)")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--nproc-per-node N] [options] [flags of pretrain_gpt.py]",
        description=(
            "Run one training job under several schedules, in alternating blocks on the same ranks, and compare them. "
            "Start it with torchrun or srun as pretrain_gpt.py, or give --nproc-per-node N first."
        ),
        epilog="Every other flag is pretrain_gpt.py's: the model, the data, the parallel sizes, the optimizer. Its schedule is "
        "replaced by each contender's.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--contenders",
        default=DEFAULT,
        metavar="NAME[,NAME...]",
        help="what to compare: stock-1f1b and interleaved-1f1b:CHUNKS are megatron-core's own schedules, every other name is one "
        "of --zero-bubble-schedule, or auto. NAME:CHUNKS sets the chunks per rank of an interleaved one, NAME@LIMIT "
        "--zero-bubble-memory-limit, NAME+pv adds post-validation (default %(default)s)",
    )
    parser.add_argument("--baseline", metavar="NAME", help="contender that speed-ups are relative to (default: the first)")
    parser.add_argument("--rounds", type=int, metavar="N", help="blocks of each contender (default 5, with --quick 3)")
    parser.add_argument("--timed-iters", type=int, metavar="N", help="timed iterations of a block (default 10, with --quick 3)")
    parser.add_argument(
        "--warmup-iters", type=int, metavar="N", help=f"untimed iterations of each contender's first block (default {WARM_UP})"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks")
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="what one device can do, in TFLOP/s, for MFU")
    parser.add_argument(
        "--bench-dir", default="bench", metavar="DIR", help="directory for the report and the ranks' output (default %(default)s)"
    )
    return parser
