"""Measure pipeline schedules side by side: the speed-up of each over its baseline, and the fraction of the predicted speed-up.

Real (the default): train a GPT on this machine's CPU, one thread per rank, gloo. stock-1f1b and stock-interleaved-1f1b are
megatron-core's own schedules, torch-1f1b and torch-zbv are torch.distributed.pipelining's on plain layers of the same sizes, and
every other name is ours. An iteration is forward, backward and the optimizer step, started at the same time on all ranks; its
time is that of the slowest rank. Predictions are the simulator's with the pass times of the same run and free links, plus the
time outside of the passes (the optimizer).

--emulate: passes sleep for given times, so that any number of ranks fits on a few cores; the executor, its buffers and waits and
the tensors on gloo are real. NAME@LIMIT is the plan found for these times under a memory limit (1.0 = 1F1B on rank 0), NAME the
hand-written schedule. The span is measured: the longest time of any rank from its first op's start to its last op's end.

Every round runs one iteration of each contender in the same processes; a speed-up is a ratio of the total times of all rounds,
with a 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.search.search_options import Effort
from tools.benchmarks.published_times import read_configs
from tools.benchmarks.reports import PUBLISHED, Row, origin, write_json
from tools.benchmarks.schedules import emulated, real
from tools.benchmarks.schedules.contenders import Sizes, contender_specs
from tools.benchmarks.schedules.emulated import Times
from tools.benchmarks.schedules.report import table

FORMAT = "zerobubble-schedules-benchmark/2"
REAL = ("stock-1f1b", "stock-interleaved-1f1b", "1f1b", "zb-h1", "zb-h2", "zbv", "v-half", "torch-1f1b", "torch-zbv")
EMULATED = ("1f1b", "zb@1", "zb@2", "zbv@1")
MODEL_HELP = {
    "num_layers": "layers of the whole model, a multiple of every schedule's number of stages",
    "hidden_size": "width of the model",
    "num_attention_heads": "attention heads per layer",
    "seq_length": "tokens per sample",
    "micro_batch_size": "samples per microbatch",
}
PASS_HELP = {
    "forward_ms": "F per rank and microbatch",
    "backward_ms": "B per rank and microbatch",
    "wgrad_ms": "W per rank and microbatch",
    "comm_ms": "P2P latency per message that planner and simulator assume",
    "last_stage": "factor on the last stage's passes; each NAME@LIMIT is then compared with a plan for equal stages",
}
EXAMPLES = """examples:
  python -m tools.benchmarks.schedules --num-microbatches 4 8 --json real.json
  python -m tools.benchmarks.schedules --emulate --published-row 1 --json emulated.json
  python -m tools.benchmarks.schedules --emulate --published-row 1 --last-stage 1.4 --schedule zb@1 --schedule zbv@1
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line. Options of one mode have no default here, so that the other mode can reject them."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.schedules", description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--emulate", action="store_true", help="passes that sleep")
    parser.add_argument(
        "--schedule",
        action="append",
        metavar="NAME",
        help=f"repeat for several (default: {', '.join(REAL)}; emulated: {', '.join(EMULATED)})",
    )
    parser.add_argument("--num-ranks", type=int, help="p (default 2; emulated 8)")
    parser.add_argument("--num-microbatches", type=int, nargs="+", help="m, several in the real mode (default 4 8; emulated 24)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds: iterations of each contender (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - prints it and nothing else")
    model = parser.add_argument_group("real mode")
    for field in fields(Sizes):
        model.add_argument(_flag(field.name), type=int, help=f"{MODEL_HELP[field.name]} (default {field.default})")
    passes = parser.add_argument_group("emulated mode")
    for field in fields(Times):
        passes.add_argument(_flag(field.name), type=float, help=f"{PASS_HELP[field.name]} (default {field.default})")
    passes.add_argument("--published-row", type=int, metavar="ROW", help=f"p, m and times of a row of {PUBLISHED.name}")
    passes.add_argument("--message-kib", type=float, help="size of a P2P message (default 64)")
    passes.add_argument("--effort", choices=[effort.value for effort in Effort], help="effort of NAME@LIMIT (default fast)")
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


EMULATED_ONLY = (*(field.name for field in fields(Times)), "published_row", "message_kib", "effort")
REAL_ONLY = tuple(field.name for field in fields(Sizes))


def given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options among `names` that are on the command line."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for invalid values, and for options of the other mode."""
    foreign = given(args, REAL_ONLY if args.emulate else EMULATED_ONLY)
    if foreign:
        without = "without" if args.emulate else "with"
        raise ConfigError(f"{', '.join(map(_flag, foreign))} goes {without} --emulate only")
    if args.num_ranks is not None and args.num_ranks < 2:
        raise ConfigError(f"--num-ranks is {args.num_ranks}; a pipeline has 2 or more")
    if args.rounds < 1 or any(count < 1 for count in args.num_microbatches or ()):
        raise ConfigError("--rounds and --num-microbatches must be 1 or more")
    if args.message_kib is not None and args.message_kib <= 0:
        raise ConfigError(f"--message-kib is {args.message_kib}; it must be more than 0")
    if args.emulate and len(args.num_microbatches or ()) > 1:
        raise ConfigError("--emulate takes one --num-microbatches; the plans are made for it")
    try:
        if args.json not in (None, "-"):
            Path(args.json).open("a").close()  # fail now, not after minutes of measuring
    except OSError as error:
        raise ConfigError(f"cannot write {args.json}: {error.strerror}") from None


def run_real(args: argparse.Namespace) -> Row:
    """Run the real mode; returns its part of the report."""
    sizes = Sizes(**given(args, REAL_ONLY))
    num_ranks, counts = args.num_ranks or 2, tuple(args.num_microbatches or (4, 8))
    chosen = contender_specs(args.schedule or REAL, num_ranks, counts, sizes)
    results = real.measure(chosen, sizes, num_ranks=num_ranks, numbers_of_microbatches=counts, rounds=args.rounds)
    return {"mode": "real", "measured": "iteration", "num_ranks": num_ranks, "sizes": asdict(sizes), "results": results}


def run_emulated(args: argparse.Namespace) -> Row:
    """Run the emulated mode; returns its part of the report."""
    num_ranks, num_microbatches = args.num_ranks or 8, (args.num_microbatches or [24])[0]
    times = given(args, [field.name for field in fields(Times)])
    if args.published_row is not None:
        (config,) = read_configs(PUBLISHED, str(args.published_row))
        num_ranks, num_microbatches = args.num_ranks or config.num_ranks, (args.num_microbatches or [config.num_microbatches])[0]
        one = config.costs_of(Placement.linear(1))
        published = {"forward_ms": one.forward_ms[0], "backward_ms": one.backward_ms[0], "wgrad_ms": one.wgrad_ms[0]}
        times = {**published, "comm_ms": one.comm_ms, **times}
    chosen = Times(**times)
    budget = Effort(args.effort or "fast").budget
    emulations = emulated.plan_emulations(
        args.schedule or EMULATED, chosen, num_ranks=num_ranks, num_microbatches=num_microbatches, budget=budget
    )
    message_kib = 64.0 if args.message_kib is None else args.message_kib
    results = emulated.measure(emulations, rounds=args.rounds, message_kib=message_kib)
    about = {"mode": "emulated", "measured": "span", "num_ranks": num_ranks, "times": asdict(chosen), "message_kib": message_kib}
    return about | {"results": results}


def text(report: Row) -> str:
    """The report in Markdown."""
    parts = []
    for result in report["results"]:
        parts.append(
            f"{report['num_ranks']} ranks, {result['num_microbatches']} microbatches, times are of the {report['measured']}:"
        )
        parts.append(table(result["rows"]))
        for placement, passes in result.get("passes", {}).items():
            stages = ", ".join(f"{s['stage']}: {s['F_ms']:.1f} {s['B_ms']:.1f} {s['W_ms']:.1f}" for s in passes["stages"])
            parts.append(f"ms of F, B, W per stage ({placement}): {stages}; outside of the passes {passes['outside_ms']:.1f}")
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. A user error is one line on stderr and exit code 2."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    args = parser.parse_args(words)
    try:
        check(args)
        print(f"{args.rounds} rounds of all contenders", file=sys.stderr)
        body = run_emulated(args) if args.emulate else run_real(args)
    except UserError as error:
        parser.error(str(error))
    report: Row = {
        "format": FORMAT,
        "command": shlex.join(["python", "-m", "tools.benchmarks.schedules", *words]),
        "torch": torch.__version__,
        "rounds": args.rounds,
    }
    report |= origin() | body
    print(json.dumps(report, indent=1) if args.json == "-" else text(report))
    if args.json not in (None, "-"):
        write_json(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
