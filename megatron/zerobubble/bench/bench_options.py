"""The options of `zerobubble bench`, and the script and its flags behind them. Imports no torch."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.zerobubble.bench.contenders import DEFAULT, WARM_UP, Contender, parse_contenders
from megatron.zerobubble.bench.jobs import Job
from megatron.zerobubble.bench.speed_ups import Outcome
from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.flags.loop_options import Seeds
from megatron.zerobubble.job.launch import is_turned_off
from megatron.zerobubble.messages import quoted, shown
from megatron.zerobubble.overlay import add_flags, flags_of
from megatron.zerobubble.script import add_seeds

__all__ = ["Options", "build_parser", "parse_options"]

_LATER_WARM_UP = 2
"""Untimed iterations of a contender's later blocks, which load the plan and measure nothing."""
_NAMES_AND_FLAGS = re.compile(r"((?:[^=]|(?<=:slices)=)*)=(.*)", re.DOTALL)
_EXAMPLE = "'zbv,v-half=--virtual-pipeline-model-parallel-size 2'"
_SEED = 1234
"""--zero-bubble-weights-seed, if it is not given: Megatron-LM's --seed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare, how often, and where to write the result."""

    job: Job
    """The user's job."""
    contenders: tuple[Contender, ...]
    baseline: str
    """Name of the contender that speed-ups are relative to."""
    programs: dict[str, Job]
    """Contender -> what it runs, for those under which the job can run."""
    outcomes: dict[str, Outcome]
    """Contender -> what is known of it: what differs from the job as given, or why the job cannot run under it."""
    rounds: int
    """Blocks of each contender."""
    num_timed: int
    """Timed iterations of a block."""
    num_warm_up: int
    """Untimed iterations of a contender's first block."""
    directory: Path
    """Where the report and the ranks' output go."""
    json: str | None
    """A file for the comparison as JSON, besides that of the report; -: standard output, and the summary goes to stderr."""

    @property
    def num_iterations(self) -> int:
        """Iterations of all blocks together."""
        return sum(self.block_length(number) for number in range(self.rounds)) * len(self.programs)

    def warm_up(self, number: int) -> int:
        """Untimed iterations of a block of round `number`, from 0."""
        return self.num_warm_up if number == 0 else _LATER_WARM_UP

    def block_length(self, number: int) -> int:
        """Iterations of a block of round `number`, from 0."""
        return self.warm_up(number) + self.num_timed


def parse_options(argv: Sequence[str], *, world_size: int, prog: str, ranks_on_host: int | None = None) -> Options:
    """Parse and check the command line.

    Args:
        argv: options of the comparison and zero-bubble flags, `--`, a script, its flags.
        world_size: number of ranks.
        prog: program name in the usage.
        ranks_on_host: number of ranks on this machine; None: all.

    Raises:
        UserError: one line.
        SystemExit: after --help.
    """
    words, script = list(argv), list[str]()
    if "--" in words:
        split = words.index("--")
        words, script = words[:split], words[split + 1 :]
    args, unknown = build_parser(prog).parse_known_args(words)
    contenders = parse_contenders(args.contenders)
    names = [contender.text for contender in contenders]
    baseline = args.baseline or names[0]
    if baseline not in names:
        raise ConfigError(f"--baseline {baseline} is not among the contenders {', '.join(names)}; add it to --contenders")
    rounds = _number("--rounds", args.rounds, default=3 if args.quick else 5, least=1)
    num_timed = _number("--timed-iters", args.timed_iters, default=3 if args.quick else 10, least=1)
    num_warm_up = _number("--warmup-iters", args.warmup_iters, default=WARM_UP, least=WARM_UP)
    several = (ranks_on_host or world_size) < world_size
    job = replace(_job(args, unknown, script, names), num_ranks=world_size, is_on_several_hosts=several)
    outcomes = {name: Outcome(name=name) for name in names}
    programs = _programs(contenders, job, outcomes)
    if not programs:
        raise ConfigError(f"no contender can run: {'; '.join(f'{each.name}: {each.failure}' for each in outcomes.values())}")
    return Options(
        job=job,
        contenders=tuple(contenders),
        baseline=baseline,
        programs=programs,
        outcomes=outcomes,
        rounds=rounds,
        num_timed=num_timed,
        num_warm_up=num_warm_up,
        directory=Path(args.bench_dir),
        json=args.json,
    )


def _number(flag: str, given: int | None, *, default: int, least: int) -> int:
    """The given value, or the default. Raises ConfigError below `least`."""
    value = default if given is None else given
    if value < least:
        raise ConfigError(f"{flag} {value} must be {least} or more")
    return value


def _job(args: argparse.Namespace, unknown: Sequence[str], script: Sequence[str], contenders: Sequence[str]) -> Job:
    """The job of a script. Zero-bubble flags among its own count, too."""
    if unknown:
        raise ConfigError(
            f"unrecognized arguments before --: {shown(' '.join(unknown))}; the script and its flags follow the --, as in "
            "zerobubble bench --contenders zbv -- pretrain_gpt.py --num-layers 8"
        )
    if not script:
        raise ConfigError("give -- and then a training script and its flags, such as -- pretrain_gpt.py --num-layers 8")
    if not Path(script[0]).is_file():
        raise ConfigError(f"the script {shown(script[0])} is not a file")
    if is_turned_off():
        raise ConfigError("ZERO_BUBBLE=0 is in the environment, so no schedule would be installed; unset it to compare")
    among_its_own = _BenchParser(add_help=False, allow_abbrev=False)
    _add_job_flags(among_its_own)
    args, own = among_its_own.parse_known_args(script[1:], args)
    if args.zero_bubble_own_weights and args.zero_bubble_weights_seed is not None:
        raise ConfigError("--zero-bubble-weights-seed draws the weights that --zero-bubble-own-weights leaves to the script")
    seed = _SEED if args.zero_bubble_weights_seed is None else args.zero_bubble_weights_seed
    return Job(
        script=script[0],
        arguments=tuple(own),
        zero_bubble=flags_of(args),
        flags=_flags(args.contender_flags, contenders),
        seeds=Seeds(weights=None if args.zero_bubble_own_weights else seed, dropout=args.zero_bubble_dropout_seed),
        on_cpu=args.cpu,
    )


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Add the zero-bubble flags of a script's job, which may stand among its own."""
    add_flags(parser)
    add_seeds(parser)
    parser.add_argument(
        "--zero-bubble-own-weights",
        action="store_true",
        help="leave first weights to the script; by default each is drawn by its name, the same for all contenders",
    )


def _flags(given: Sequence[str], contenders: Sequence[str]) -> dict[str, str]:
    """--contender-flags by contender."""
    found: dict[str, str] = {}
    for text in given:
        split = _NAMES_AND_FLAGS.fullmatch(text)
        if split is None:
            raise ConfigError(f"--contender-flags {quoted(text)}: give CONTENDER[,CONTENDER...]=FLAGS, such as {_EXAMPLE}")
        names, flags = split.groups()
        try:
            shlex.split(flags)
        except ValueError as error:
            raise ConfigError(f"--contender-flags {quoted(text)}: {error}") from None
        for name in names.split(","):
            if name.strip() not in contenders:
                raise ConfigError(
                    f"--contender-flags {quoted(text)}: {shown(name)} is not among the contenders {', '.join(contenders)}"
                )
            found[name.strip()] = flags
    return found


def _programs(contenders: Sequence[Contender], job: Job, outcomes: dict[str, Outcome]) -> dict[str, Job]:
    """The programs by contender; notes and refusals are written to the outcomes."""
    programs: dict[str, Job] = {}
    for contender in contenders:
        outcome = outcomes[contender.text]
        try:
            program, outcome.note = job.under(contender)
            programs[contender.text], outcome.use = program, program.use(contender)
        except UserError as error:
            outcome.failure = " ".join(str(error).split())
    return programs


class _BenchParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(f"{message} (see --help)")


def build_parser(prog: str = "zerobubble bench") -> argparse.ArgumentParser:
    """The options of the comparison."""
    parser = _BenchParser(
        prog=prog,
        usage=f"{prog} [--nproc-per-node N] [options] [zero-bubble flags] -- SCRIPT [the script's flags]",
        description=(
            "Run a training script under several schedules, in alternating blocks on the same ranks, and compare them: any "
            "script for megatron-core, such as Megatron-LM's pretrain_gpt.py, unedited. Start it with torchrun or srun, or "
            "give --nproc-per-node N first."
        ),
        epilog="The job's schedule is replaced by each contender's.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--contenders",
        default=DEFAULT,
        metavar="NAME[,NAME...]",
        help="what to compare: stock-1f1b and interleaved-1f1b:CHUNKS are megatron-core's own schedules, every other name is "
        "one of --zero-bubble-schedule, or auto. NAME:CHUNKS sets the chunks per rank of an interleaved one, "
        "NAME:slices=N --zero-bubble-slices, NAME@LIMIT --zero-bubble-memory-limit, NAME+pv adds post-validation; "
        "stock-1f1b:no-sync is 1F1B without megatron-core's device-wide wait behind each exchange (default %(default)s)",
    )
    parser.add_argument("--baseline", metavar="NAME", help="contender that speed-ups are relative to (default: the first)")
    parser.add_argument("--rounds", type=int, metavar="N", help="blocks of each contender (default 5, with --quick 3)")
    parser.add_argument("--timed-iters", type=int, metavar="N", help="timed iterations of a block (default 10, with --quick 3)")
    parser.add_argument(
        "--warmup-iters", type=int, metavar="N", help=f"untimed iterations of each contender's first block (default {WARM_UP})"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks")
    parser.add_argument(
        "--bench-dir", default="bench", metavar="DIR", help="directory for the report and the ranks' output (default %(default)s)"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the comparison as JSON, as in DIR/bench.json; - prints it, and all else goes to stderr",
    )
    parser.add_argument("--cpu", action="store_true", help="run the script on the CPU instead of GPUs, with gloo; to try it out")
    parser.add_argument(
        "--contender-flags",
        action="append",
        default=[],
        metavar="NAME[,NAME...]=FLAGS",
        help="flags that the script gets under these contenders, in place of Megatron-LM's for the number of chunks per rank: "
        f"{_EXAMPLE}; repeatable",
    )
    _add_job_flags(parser)
    return parser
