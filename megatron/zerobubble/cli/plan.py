"""The planning commands of `zerobubble`: build or search a plan, show it, compare, convert. They work without torch.

Times are per rank and microbatch; a schedule with several virtual stages per rank divides them equally. With microbatches of
unequal length they are those of the mean length.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from typing import Any

from megatron.zerobubble.cli.cost_flags import (
    add_all_to_all_flag,
    add_slice_flags,
    add_step_flags,
    add_unequal_flags,
    read_request,
)
from megatron.zerobubble.cli.layouts import add_layout_flags, run_layout
from megatron.zerobubble.cli.output_files import columns, has_colors, write_text
from megatron.zerobubble.cli.parser import add_objective, add_search_flags
from megatron.zerobubble.cli.plan_files import run_export, run_import, run_show, write_picture
from megatron.zerobubble.cli.progress_bar import stoppable, track
from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.flags.memory_limit import bytes_of
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.anytime import best, with_defaults
from megatron.zerobubble.plan.communication import num_messages
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import known_schedules, schedule_info
from megatron.zerobubble.plan.render.plan_summary import summary
from megatron.zerobubble.plan.search.search_options import Effort

EXAMPLES = {
    "plan": """
  zerobubble plan -p 8 -m 24 --memory-limit 0.8 --forward-ms 18.5 --backward-ms 18.1 --wgrad-ms 9.3 --effort fast
  zerobubble plan --schedule zbv -p 4 --microbatch-tokens 512,4096,700,1800,1024,96 --attention-share 0.1""",
    "layout": """
  zerobubble layout --layers layers.json --schedule auto -p 8 -m 32 --memory 70GiB
  zerobubble layout --schedule interleaved-1f1b --memory 70GiB -- /path/to/Megatron-LM/pretrain_gpt.py ITS FLAGS""",
    "show": """
  zerobubble show plan.json --svg plan.svg
  zerobubble plan --schedule zb-h1 -p 4 -m 12 --json - | zerobubble show -""",
    "compare": """
  zerobubble compare -p 8 -m 24 --forward-ms 18.5 --backward-ms 18.1 --wgrad-ms 9.3
  zerobubble compare -p 4 -m 8 --schedules 1f1b,interleaved-1f1b:2,auto --comm-ms 0.1 --effort fast""",
    "export": """
  zerobubble export plan.json --torch-csv plan.csv
  zerobubble plan --schedule zbv -p 4 -m 8 --json - | zerobubble export - --torch-csv -""",
    "import": """
  zerobubble import plan.csv --json plan.json
  zerobubble import plan.csv --schedule zbv | zerobubble show -""",
}
"""Command -> two command lines that work, given the files."""


def add_commands(commands: Any) -> None:
    """Add `plan`, `show`, `compare`, `export` and `import` to the sub-parsers of a command line."""
    schedules = "\n".join(f"  {info.name:17} {info.description} ({info.reference})" for info in known_schedules())
    schedules += f"\n  {AUTO:17} the best of these within the memory limit"
    plan = _command(commands, "plan", f"schedules:\n{schedules}\n\n")
    plan.add_argument("--schedule", default=AUTO, help="name of the schedule, see below (default %(default)s)")
    plan.add_argument("--num-chunks", type=int, help="virtual stages (VPP) per rank, for the interleaved schedules (default 2)")
    plan.add_argument(
        "--max-pending-backward", help="most microbatches between F and W per rank, for zb: 1p, 2p or a number (default 1p)"
    )
    plan.add_argument(
        "--memory-limit", type=_share, help="most activation memory per rank; 1.0 is 1F1B's rank 0, the default of auto"
    )
    compare = _command(commands, "compare")
    compare.add_argument(
        "--schedules",
        default="1f1b,interleaved-1f1b:4,zbv,v-half",
        metavar="LIST",
        help="names separated by commas, NAME:V with V virtual stages (VPP) per rank; the first is the base of the speed-ups "
        "(default %(default)s)",
    )
    compare.add_argument(
        "--memory-limit",
        type=_share,
        help="most activation memory per rank; a base that exceeds it has none; without it and --effort, hand-written schedules",
    )
    for command in (plan, compare):
        _add_problem(command)
    show = _command(commands, "show")
    show.add_argument("file", help="a plan in JSON; - reads standard input")
    layout = _command(commands, "layout")
    add_layout_flags(layout)
    for command in (plan, show, layout):
        command.add_argument("--svg", metavar="FILE", help="write the timeline as SVG")
        command.add_argument("--width", type=int, help="columns of the text timeline (default: the terminal's, else 160)")
    export = _command(commands, "export")
    export.add_argument("file", help="a plan in JSON; - reads standard input")
    export.add_argument("--torch-csv", metavar="FILE", required=True, help="the action table to write; - prints it")
    importing = _command(commands, "import")
    importing.add_argument("file", help="an action table of torch.distributed.pipelining; - reads standard input")
    importing.add_argument("--schedule", default="imported", help="name of the plan (default %(default)s)")
    importing.add_argument("--json", metavar="FILE", default="-", help="the plan file to write; - prints it (default)")


def _command(commands: Any, name: str, before: str = "") -> argparse.ArgumentParser:
    """Add a command whose help ends with its examples, after other text."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        description=MEANINGS[name],
        help=MEANINGS[name],
        epilog=f"{before}examples:{EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_problem(command: argparse.ArgumentParser) -> None:
    """Add the flags for sizes, costs and the search."""
    command.add_argument("--num-ranks", "-p", type=int, required=True, help="pipeline ranks (PP), p")
    command.add_argument(
        "--num-microbatches",
        "-m",
        type=int,
        help="microbatches per iteration, m; with --microbatch-tokens their number is known",
    )
    for name, default, meaning in (
        ("forward-ms", 1.0, "F, forward, in ms per rank and microbatch"),
        ("backward-ms", 1.0, "B, input gradient (dgrad), in ms per rank and microbatch"),
        ("wgrad-ms", 1.0, "W, weight gradient (wgrad), in ms per rank and microbatch"),
        ("comm-ms", 0.0, "P2P latency per message, in ms"),
        ("activation-after-backward", 1.0, "activation fraction kept after B (M_W / M_B)"),
    ):
        command.add_argument(f"--{name}", type=float, default=default, help=f"{meaning} (default %(default)s)")
    command.add_argument(
        "--costs",
        metavar="FILE",
        help="JSON with per-stage lists instead of these scalars, as in a plan file, or a run's report.json; with "
        "--microbatch-tokens its costs by length count, if it has them",
    )
    add_step_flags(command)
    add_all_to_all_flag(command)
    add_unequal_flags(command)
    add_slice_flags(command)
    add_objective(command)
    add_search_flags(command, effort=None)
    command.add_argument("--json", metavar="FILE", help="write the result as JSON; - prints it and nothing else")


def _share(text: str) -> float:
    """A memory limit of `plan`, which is no size in bytes."""
    try:
        return float(text)
    except ValueError:
        if bytes_of(text):
            raise argparse.ArgumentTypeError(
                f"a size in bytes needs the model's: zerobubble layout --layers FILE --memory {text}; or give a share of 1F1B's "
                "memory such as 0.8"
            ) from None
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no number; give a share of 1F1B's memory such as 0.8") from None


def run_plan(args: argparse.Namespace) -> None:
    """`plan`: generate or search a plan, simulate it, write it to files and show it."""
    request = with_defaults(read_request(args), effort=Effort.DEFAULT)
    result = stoppable(f"planning {args.schedule}", lambda progress: best(request, progress))
    simulation = result.simulation
    lines, verdict = [summary(result, columns(args.width), is_colored=has_colors())], {}
    if args.schedule == AUTO:
        verdict = {"verdict": result.verdict(request.objective)}
    lines += verdict.values()
    text = simulation.plan.to_json(costs=simulation.costs.to_json(), metrics=result.metrics() | verdict)
    if args.json is not None:
        write_text(args.json, text)
    write_picture(args, simulation)
    if args.json != "-":
        print("\n".join(lines))


def run_compare(args: argparse.Namespace) -> None:
    """`compare`: several schedules for the same costs, the first of them as the base."""
    words = [word.strip() for word in args.schedules.split(",")]
    rows: list[dict[str, Any]] = []
    request = read_request(args, more_slices=tuple(n for word in words for n in _contender(word, ())[2]))
    objective, chosen = request.objective, dict[str, PlanRequest]()
    for word in words:
        name, chunks, slices = _contender(word, request.num_slices)
        chosen[word] = replace(request, schedule=name, num_chunks=chunks, num_slices=slices)
        if name != AUTO:
            chosen[word].spec(max(slices))  # refuses what the schedule does not take, before any is planned
    for word in track(list(chosen), "schedules"):
        asked, name = chosen[word], word
        try:
            simulation = best(with_defaults(asked, effort=Effort.DEFAULT)).simulation
        except (ConfigError, PlanError) as error:
            if asked.memory_limit is None and asked.schedule != AUTO:  # none that one of the schedules exceeds
                raise
            if rows:
                rows.append({"schedule": word, "error": str(error)})
                continue
            name = f"{word} (no limit)"
            asked = asked.with_options(memory_limit=math.inf if asked.schedule == AUTO else None)
            simulation = best(with_defaults(asked, effort=Effort.DEFAULT)).simulation
        rows.append(
            {
                "schedule": name if asked.schedule != AUTO else f"{AUTO} ({simulation.plan.schedule})",
                "iteration_ms": objective.of(simulation),
                "bubble": objective.bubble_of(simulation),
                "peak_memory": max(simulation.peak_memory),
                "num_messages": num_messages(simulation.plan),
            }
        )
        rows[-1]["speed_up"] = rows[0]["iteration_ms"] / rows[-1]["iteration_ms"] if rows[-1]["iteration_ms"] else 1.0
    if args.json is not None:
        write_text(args.json, json.dumps(rows))
    if args.json != "-":
        around = ", with reductions over replicas, gathering and optimizer step" if request.has_step else ""
        print(
            f"iteration time {objective.label}{around}; memory per rank, 1.0 is 1F1B's rank 0; messages of all ranks per "
            "iteration"
        )
        print(f"{'schedule':24} {'ms':>12} {'speed-up':>9} {'bubble':>9} {'memory':>7} {'messages':>9}")
        print("\n".join(map(_compared, rows)))


def _contender(word: str, num_slices: tuple[int, ...]) -> tuple[str, int | None, tuple[int, ...]]:
    """`interleaved-1f1b:4` is four virtual stages (VPP) per rank, `zb-h1:slices=8` eight slices per microbatch.

    Args:
        word: as given.
        num_slices: where it does not say, for schedules that run over slices.
    """
    name, *parts = word.split(":")
    words = [part.rpartition("=") for part in parts]
    numbers = {key: value for key, _, value in words if key in ("slices", "")}
    if len(numbers) < len(parts) or not all(value.isdecimal() and len(value) <= 6 for value in numbers.values()):
        raise ConfigError(
            f"--schedules has {quoted(word)}; give NAME, NAME:V with V virtual stages (VPP) per rank, or NAME:slices=N"
        )
    if "slices" in numbers:
        num_slices = (int(numbers["slices"]),)
    elif name != AUTO and not schedule_info(name).takes_slices:
        num_slices = (1,)
    return name, int(numbers[""]) if "" in numbers else None, num_slices


def _compared(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['schedule']:24} {row['error'].splitlines()[0]}"
    return (
        f"{row['schedule']:24} {row['iteration_ms']:12.3f} {row['speed_up']:9.3f} {100 * row['bubble']:7.2f} % "
        f"{row['peak_memory']:7.3f} {row['num_messages']:9}"
    )


MEANINGS = {
    "plan": "build a plan and show it",
    "layout": "the best --pipeline-model-parallel-layout for your schedule, 1F1B included, and its plan",
    "show": "show a plan file",
    "compare": "several schedules for your times: speed-up, bubble, memory, messages",
    "export": "write a plan as an action table of torch",
    "import": "read a plan from an action table of torch",
}
"""Command -> what it is for."""
COMMANDS = {
    "plan": run_plan,
    "layout": run_layout,
    "show": run_show,
    "compare": run_compare,
    "export": run_export,
    "import": run_import,
}
