"""Measure the memory and communication volume of gradients sharded between microbatches (ZeRO-2), by the group size of Ws.

A real GPT on gloo ranks of this machine, p pipeline ranks x d data-parallel replicas, is trained with ZeRO-1 and with
--zero-bubble-shard-gradients K for several K, from the same weights on the same data. Reported per run, as the maximum over
ranks:

  gradients     bytes of gradients during the whole iteration (persistent), and at their peak, with buckets filled or in flight
  waiting       peak bytes of inputs and output gradients saved for W
  all tensors   peak bytes of all tensors allocated in an iteration, gradients included, weights and optimizer state not
  reduced       bytes that a rank reduce-scatters per iteration
  bubble        bubble rate of the plan with F = B = W and zero P2P latency
  difference    largest difference of a weight from ZeRO-1's after three steps, relative to the largest entry of its tensor

Times are not measured: those of CPU ranks that share cores do not carry over to a cluster. The memory and the bandwidth needed
there are computed (`balance`), in a table of their own.

  python -m tools.benchmarks.shard_gradients --json docs/benchmarks/data/shard_gradients.json
  python -m tools.benchmarks.shard_gradients --from docs/benchmarks/data/shard_gradients.json > docs/benchmarks/shard_gradients.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import UserError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import build_plan, schedule_info
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.transforms import group_weight_gradients
from tools.benchmarks.emulation import run_on_ranks
from tools.benchmarks.schedules.contenders import ContenderSpec, Runtime, Sizes

FORMAT = "zerobubble-shard-gradients-benchmark/1"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The parameters of a measurement, sent to every rank."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    group_sizes: tuple[int | None, ...]
    """Group sizes K to measure; None is ZeRO-1 and must come first."""
    bucket_size: int
    sizes: Sizes


def serve(rank: int, request: Request) -> list[dict[str, float]]:
    """Run one rank: train with each group size and measure; the weights are compared with those of the first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, on import and on every config
        from megatron.zerobubble.mcore.cpu.device import HostDevice
        from tools.benchmarks.schedules.gpt import set_up, tear_down
        from tools.benchmarks.schedules.sharded import ShardingContender

        host = HostDevice()
        set_up(host, request.num_ranks)
        spec = ContenderSpec(name=request.schedule, runtime=Runtime.OURS, schedule=request.schedule, baseline=request.schedule)
        results, expected = [], None
        for group_size in request.group_sizes:
            contender = ShardingContender(spec, request.sizes, request.num_ranks, host, group_size, request.bucket_size)
            held = contender.look(request.num_microbatches)
            contender.iterate(request.num_microbatches)
            weights = contender.weights()
            expected = expected or weights
            results.append({**held, "apart": _apart(weights, expected)})
            contender.close()
        tear_down(host)
    return results


def measure(request: Request, world_size: int) -> list[dict[str, Any]]:
    """The rows of a table, one per group size; every number is the maximum over ranks."""
    ranks = run_on_ranks(serve, world_size, request)
    rows = []
    for place, group_size in enumerate(request.group_sizes):
        most = {name: max(rank[place][name] for rank in ranks) for name in ranks[0][place]}
        rows.append({"group_size": group_size, **most, **_planned(request, group_size)})
    return rows


def _planned(request: Request, group_size: int | None) -> dict[str, float]:
    plan = build_plan(request.schedule, num_ranks=request.num_ranks, num_microbatches=request.num_microbatches)
    if group_size is not None:
        plan = group_weight_gradients(plan, group_size)
    result = simulate(plan, CostModel.uniform(plan.placement))
    return {"bubble": result.bubble_rate, "peak_memory": max(result.peak_memory)}


def _apart(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    pairs = [(actual[name], expected[name]) for name in expected]
    return max(float((mine - theirs).abs().max() / (theirs.abs().max() or 1.0)) for mine, theirs in pairs)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| K | gradients, persistent | gradients, peak | waiting for W | all tensors, peak | reduced per step | bubble | "
        "difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = [
            f"{row[name] / 2**20:.2f} MiB" for name in ("gradients_kept", "gradients_peak", "waiting_peak", "all_peak", "reduced")
        ]
        name = "ZeRO-1" if row["group_size"] is None else str(row["group_size"])
        lines.append("| " + " | ".join([name, *sizes, f"{row['bubble']:.1%}", f"{row['apart']:.1e}"]) + " |")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Computed memory and bandwidth of one transformer layer; fp32 gradients, activations of arXiv 2401.10241's table 1."""

    hidden_size: int
    tokens: int
    """Tokens per microbatch."""
    data_parallel: int
    group_size: int

    @property
    def saved_mib(self) -> float:
        """MiB of gradients saved: 12 h^2 weights of 4 bytes, without the rank's shard."""
        return 48 * self.hidden_size**2 * (1 - 1 / self.data_parallel) / 2**20

    @property
    def held_mib(self) -> float:
        """MiB of inputs and output gradients that wait for the last W of their group: 32 bytes per token and unit of width."""
        return (self.group_size - 1) * 32 * self.tokens * self.hidden_size / 2**20

    @property
    def link_gb_s(self) -> float:
        """Bandwidth in GB/s that hides a group's reduction behind its Ws at 400 TFLOP/s, with 24 h^2 operations per token."""
        seconds = 24 * self.tokens * self.group_size * self.hidden_size**2 / 400e12
        return 48 * self.hidden_size**2 * (1 - 1 / self.data_parallel) / seconds / 1e9


def balance(data_parallel: int = 8) -> str:
    """A Markdown table of `Balance` for layers of several widths."""
    lines = [
        "| hidden size | tokens | K | gradients saved | activations waiting for the group | net saving | "
        "bandwidth to hide behind W |",
        "|---|---|---|---|---|---|---|",
    ]
    for hidden_size in (2048, 4096, 8192, 12288):
        for tokens in (2048, 8192):
            for group_size in (1, 2, 4, 8):
                each = Balance(hidden_size=hidden_size, tokens=tokens, data_parallel=data_parallel, group_size=group_size)
                numbers = f"{each.saved_mib:.0f} MiB | {each.held_mib:.0f} MiB | {each.saved_mib - each.held_mib:+.0f} MiB"
                lines.append(f"| {hidden_size} | {tokens} | {group_size} | {numbers} | {each.link_gb_s:.0f} GB/s |")
    return "\n".join(lines)


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    zero1, *sharded = rows
    shares = [f"{row['all_peak'] / zero1['all_peak']:.0%} with K = {row['group_size']}" for row in sharded]
    return f"Peak of all tensors relative to ZeRO-1: {', '.join(shares)}."


def document(report: dict[str, Any]) -> str:
    """The report as a Markdown page, with the computed table."""
    settings = report["settings"]
    model = f"{settings['num_layers']} layers of hidden size {settings['hidden_size']}, {settings['seq_length']} tokens"
    ranks = f"{settings['num_ranks']} pipeline ranks x {settings['data_parallel']} data-parallel replicas"
    parts = [
        "# Gradients sharded between microbatches",
        f"`{report['command']}` on {report['machine']}, torch {report['torch']}: a GPT of {model}, {ranks}, "
        f"{settings['num_microbatches']} microbatches, buckets of {settings['bucket_size']} parameters, fp32. Every number is "
        "the maximum over ranks. The module's docstring defines the columns; ADR 14 has the design.",
    ]
    for schedule, rows in report["schedules"].items():
        parts += [f"## {schedule}, measured", table(rows), _verdict(rows)]
    parts += [
        "## A layer of a large model, computed",
        "Not measured. Eight data-parallel replicas; tensor parallelism divides the saved gradients and the waiting activations "
        "alike. Two full buckets per rank come on top. Groups save memory if the net saving is positive. Microbatches whose W "
        "the schedule delays in any case cost nothing more.",
        balance(),
    ]
    return "\n\n".join(parts) + "\n"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", action="append", help="repeat for several (default: zb-h1, zbv)")
    parser.add_argument("--num-ranks", type=int, default=2, help="pipeline ranks, p (default %(default)s)")
    parser.add_argument("--data-parallel", type=int, default=2, help="data-parallel replicas, d (default %(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=8, help="m (default %(default)s)")
    parser.add_argument("--group-size", type=int, action="append", help="repeat for several (default: 1, 2, 4, 8)")
    parser.add_argument("--bucket-size", type=int, default=150_000, help="parameters per bucket (default %(default)s)")
    for name, default in (("num-layers", 16), ("hidden-size", 256), ("num-attention-heads", 4), ("seq-length", 32)):
        parser.add_argument(f"--{name}", type=int, default=default, help="of the model (default %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="samples per microbatch (default %(default)s)")
    parser.add_argument("--from", dest="given", metavar="FILE", help="measure nothing; print the Markdown page of this result")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - prints it and nothing else")
    return parser


def run(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Measure; returns per schedule a row for ZeRO-1 and one for each group size."""
    sizes = Sizes(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    results = {}
    for schedule in track(args.schedule or ("zb-h1", "zbv"), "schedules"):
        schedule_info(schedule)
        request = Request(
            schedule=schedule,
            num_ranks=args.num_ranks,
            num_microbatches=args.num_microbatches,
            group_sizes=(None, *(args.group_size or (1, 2, 4, 8))),
            bucket_size=args.bucket_size,
            sizes=sizes,
        )
        results[schedule] = measure(request, args.num_ranks * args.data_parallel)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.num_ranks < 2 or args.data_parallel < 2 or min(args.group_size or [1]) < 1:
        parser.error("--num-ranks and --data-parallel must be 2 or more, --group-size 1 or more")
    if args.given is not None:
        print(document(json.loads(Path(args.given).read_text())), end="")
        return 0
    try:
        results = run(args)
    except UserError as error:
        parser.error(str(error))
    command = ["python", "-m", "tools.benchmarks.shard_gradients", *(sys.argv[1:] if argv is None else argv)]
    report = {
        "format": FORMAT,
        "command": " ".join(command),
        "settings": {key: value for key, value in vars(args).items() if key not in ("json", "given")},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()} with {os.cpu_count()} CPUs",
        "schedules": results,
    }
    text = json.dumps(report, indent=1)
    if args.json == "-":
        print(text)
        return 0
    for schedule, rows in results.items():
        print(f"{schedule}:\n\n{table(rows)}\n")
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
