"""Plan a pipeline schedule, look at it, and write it to a file.

Times are per rank and microbatch; a schedule with several stages a rank divides them equally. Works without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import NoReturn

from megatron.zerobubble.errors import PlanError, UserError
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import build_plan, known_schedules, parse_max_pending_backward
from megatron.zerobubble.plan.render import render_chrome_trace, render_svg, render_text
from megatron.zerobubble.plan.simulate import Simulation, simulate
from megatron.zerobubble.plan.validate import live_microbatches, pending_wgrads, validate

EXAMPLES = """examples:
  python tools/plan.py plan --schedule zbv --num-ranks 4 --num-microbatches 8
  python tools/plan.py plan --schedule zb --num-ranks 8 --num-microbatches 24 --max-pending-backward 2p \\
      --forward-ms 18.5 --backward-ms 18.1 --wgrad-ms 9.3 --comm-ms 0.6 --activation-after-backward 0.37 \\
      --json plan.json --svg plan.svg --trace plan.trace.json
  python tools/plan.py plan --schedule zb-h1 --num-ranks 4 --num-microbatches 12 --json - | python tools/plan.py show -
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(prog="plan.py", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{plan,show}")
    schedules = "\n".join(f"  {info.name:17} {info.description} ({info.reference})" for info in known_schedules())
    plan = commands.add_parser(
        "plan",
        help="build a plan and show it",
        epilog=f"schedules:\n{schedules}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("--schedule", required=True, help="name of the schedule, see below")
    plan.add_argument("--num-ranks", type=int, required=True, help="pipeline ranks, p")
    plan.add_argument("--num-microbatches", type=int, required=True, help="microbatches per iteration, m")
    plan.add_argument("--num-chunks", type=int, help="stages a rank, for interleaved-1f1b (default 2)")
    plan.add_argument("--max-pending-backward", help="for zb: 1p, 2p or a number of microbatches (default 1p)")
    for name, default, meaning in (
        ("forward-ms", 1.0, "forward time of one rank and microbatch"),
        ("backward-ms", 1.0, "time of the input gradient"),
        ("wgrad-ms", 1.0, "time of the weight gradient"),
        ("comm-ms", 0.0, "added to every dependency that crosses ranks"),
        ("activation-after-backward", 1.0, "share of the activations that stays from B until W, 0..1"),
    ):
        plan.add_argument(f"--{name}", type=float, default=default, help=f"{meaning} (default %(default)s)")
    plan.add_argument("--json", metavar="FILE", help="write the plan as JSON; - prints it and nothing else")
    show = commands.add_parser(
        "show", help="show a plan file", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    show.add_argument("file", help="a plan in JSON; - reads standard input")
    for command in (plan, show):
        command.add_argument("--svg", metavar="FILE", help="write the timeline as SVG")
        command.add_argument("--trace", metavar="FILE", help="write the timeline as a Chrome trace")
        command.add_argument("--width", type=int, default=160, help="columns of the text timeline (default %(default)s)")
    return parser


def run_plan(args: argparse.Namespace) -> None:
    """`plan`: generate, simulate, write and show."""
    pending = args.max_pending_backward
    plan = build_plan(
        args.schedule,
        num_ranks=args.num_ranks,
        num_microbatches=args.num_microbatches,
        num_chunks=args.num_chunks,
        max_pending_backward=None if pending is None else parse_max_pending_backward(pending, args.num_ranks),
    )
    costs = CostModel.uniform(
        plan.placement,
        forward_ms=args.forward_ms,
        backward_ms=args.backward_ms,
        wgrad_ms=args.wgrad_ms,
        comm_ms=args.comm_ms,
        activation_after_backward=args.activation_after_backward,
    )
    simulation = simulate(plan, costs)
    if args.json is not None:
        text = plan.to_json(costs=costs.to_json(), metrics=simulation.metrics())
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    _write_pictures(args, simulation)
    if args.json != "-":
        print(summary(simulation, args.width))


def run_show(args: argparse.Namespace) -> None:
    """`show`: read, validate, simulate under the file's own costs, and show."""
    text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
    plan = Plan.from_json(text)
    validate(plan)
    given = json.loads(text).get("costs")
    costs = CostModel.uniform(plan.placement) if given is None else CostModel.from_json(given)
    simulation = simulate(plan, costs)
    _write_pictures(args, simulation)
    print(summary(simulation, args.width))


def _write_pictures(args: argparse.Namespace, simulation: Simulation) -> None:
    if args.svg is not None:
        svg = render_svg(simulation.rows, title=headline(simulation.plan), subtitle=measures(simulation))
        Path(args.svg).write_text(svg, encoding="utf-8")
    if args.trace is not None:
        Path(args.trace).write_text(render_chrome_trace(simulation.rows), encoding="utf-8")


def headline(plan: Plan) -> str:
    """What is planned, in one line."""
    return (
        f"{plan.schedule}: {plan.num_ranks} ranks, {plan.num_microbatches} microbatches, "
        f"{plan.placement.num_chunks} stage(s) a rank ({plan.placement.name})"
    )


def measures(simulation: Simulation) -> str:
    """What it reaches, in one line."""
    return (
        f"bubble {100 * simulation.bubble_rate:.2f} %, span {simulation.span_ms:.3f} ms, "
        f"makespan {simulation.makespan_ms:.3f} ms, peak memory {max(simulation.peak_memory):.4f} of 1F1B's"
    )


def summary(simulation: Simulation, width: int) -> str:
    """The text timeline under its headline, with the measures and what each rank holds."""
    plan = simulation.plan
    ranks = [
        f"  rank {rank}: peak memory {memory:.4f}, {live} passes held, {pending} W pending at most"
        for rank, (memory, live, pending) in enumerate(
            zip(simulation.peak_memory, live_microbatches(plan), pending_wgrads(plan), strict=True)
        )
    ]
    timeline = render_text(simulation.rows, max_width=width)
    return "\n".join([headline(plan), "", timeline, "", measures(simulation), *ranks])


def main(argv: list[str] | None = None) -> int:
    """Run one command. A user error is a message on stderr and exit code 2."""
    args = build_parser().parse_args(argv)
    try:
        (run_plan if args.command == "plan" else run_show)(args)
    except (UserError, OSError, UnicodeDecodeError) as error:
        text = str(error) if isinstance(error, PlanError) else " ".join(str(error).split())
        print(f"plan.py: error: {text}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
