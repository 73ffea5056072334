"""Predict iteration time and MFU of pipelines of 8, 16 and 32 GPUs from pass times measured on one.

Reads the JSON of `tools.benchmarks.split`, assumes the same number of layers on every rank, and simulates the plans. 1F1B,
interleaved or not, gets the faster of the two measured full backwards, not B + W. What a single GPU cannot show is given by
options and marked as given: the bandwidth of the links, the peak of the device. Not included: embedding, head, optimizer, and
the reduction over data-parallel replicas. The span is the iteration time with post-validation, the makespan the iteration time
with the synchronous optimizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from tools.benchmarks.wgrad.shapes import LayerShape

FORMAT = "zerobubble-gpu-prediction/1"
MEASURED = "zerobubble-split-benchmark/1"
CLASSIC = ("1f1b", "interleaved-1f1b")
"""Schedules with a full backward (B+W); the first is the baseline."""
SCHEDULES = (*CLASSIC, "zb-h1", "zb-h2", "zbv")
BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}
EXAMPLES = """examples:
  python -m tools.benchmarks.predict_gpu split.json --peak-tflops 989 --json gpu.json
  python -m tools.benchmarks.predict_gpu split.json --num-ranks 16 --microbatches-per-rank 4 --link-gb-per-s 400
"""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Measured times and bytes of one layer and microbatch, with computed FLOPs."""

    shape: LayerShape
    forward_ms: float
    backward_ms: float
    wgrad_ms: float
    classic_ms: float
    """The faster of the two full backwards (B+W)."""
    model_flops: int
    activation_bytes: float
    is_activation_measured: bool
    held_bytes: float
    plain_matmul_tflops: float

    def costs(self, schedule: str, layers: int, comm_ms: float, placement: Placement) -> CostModel:
        """Costs of a pipeline with `layers` layers per rank, for the simulator."""
        backward, wgrad = self.backward_ms, self.wgrad_ms
        if schedule in CLASSIC:
            # Only the sum counts for a full backward. The split-off W may be slower than the full backward was.
            wgrad = min(wgrad, self.classic_ms)
            backward = self.classic_ms - wgrad
        return CostModel.uniform(
            placement,
            forward_ms=self.forward_ms * layers,
            backward_ms=backward * layers,
            wgrad_ms=wgrad * layers,
            comm_ms=comm_ms,
            activation_after_backward=min(1.0, self.held_bytes / self.activation_bytes),
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted metrics of one schedule."""

    layer: str
    num_ranks: int
    num_microbatches: int
    layers_per_rank: int
    schedule: str
    span_ms: float
    makespan_ms: float
    bubble_rate: float
    peak_memory: float
    """Peak activation memory; 1.0 is 1F1B on rank 0."""
    mfu_span: float
    mfu_makespan: float
    speedup_span: float
    """1F1B's makespan over this span: 1F1B with the synchronous optimizer vs. this schedule with post-validation."""
    speedup_makespan: float
    """1F1B's makespan over this makespan: both with the synchronous optimizer."""


def read_passes(body: Any) -> list[Passes]:
    """Read the passes from the JSON of `tools.benchmarks.split`.

    Raises:
        ConfigError: it has another format.
    """
    if not isinstance(body, Mapping) or body.get("format") != MEASURED:
        raise ConfigError(f"the input is not of format {MEASURED!r}; write one with python -m tools.benchmarks.split --json FILE")
    found = []
    for entry in body["shapes"]:
        layer, predicted = entry["measured"]["per_layer"], entry["predicted"]
        taken = layer["activation_bytes"]
        found.append(
            Passes(
                shape=LayerShape(**entry["shape"]),
                forward_ms=layer["forward_ms"],
                backward_ms=layer["backward_ms"],
                wgrad_ms=layer["wgrad_ms"],
                classic_ms=min(layer["fused_ms"], layer["stock_ms"]),
                model_flops=predicted["model_flops"],
                activation_bytes=predicted["activation_bytes"] if taken is None else taken,
                is_activation_measured=taken is not None,
                held_bytes=layer["held_bytes"],
                plain_matmul_tflops=entry["measured"]["plain_matmul_tflops"],
            )
        )
    return found


def predict(passes: Passes, num_ranks: int, args: argparse.Namespace, peak_tflops: float, comm_ms: float) -> list[Prediction]:
    """Predict every schedule on `num_ranks` ranks, 1F1B first."""
    layers = args.layers_per_rank or passes.shape.layers_per_rank
    num_microbatches = args.microbatches_per_rank * num_ranks
    flops = passes.model_flops * layers * num_microbatches  # per rank and iteration
    rows: list[Prediction] = []
    for schedule in SCHEDULES:
        result = make_plan(
            schedule,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            costs_of=partial(passes.costs, schedule, layers, comm_ms),
            options=SearchOptions(budget=Effort(args.effort).budget) if args.effort else SearchOptions(budget=0.0),
        )
        run = result.simulation
        classic_ms = rows[0].makespan_ms if rows else run.makespan_ms
        mfu = {name: flops / elapsed / 1e9 / peak_tflops for name, elapsed in (("s", run.span_ms), ("m", run.makespan_ms))}
        rows.append(
            Prediction(
                layer=passes.shape.name,
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                layers_per_rank=layers,
                schedule=schedule,
                span_ms=run.span_ms,
                makespan_ms=run.makespan_ms,
                bubble_rate=run.bubble_rate,
                peak_memory=max(run.peak_memory),
                mfu_span=mfu["s"],
                mfu_makespan=mfu["m"],
                speedup_span=classic_ms / run.span_ms,
                speedup_makespan=classic_ms / run.makespan_ms,
            )
        )
    return rows


def table(rows: Sequence[Prediction]) -> str:
    """The predictions as a Markdown table. Speed-ups are over 1F1B's makespan."""
    lines = [
        "| layer | p | m | layers per rank | schedule | span ms | makespan ms | bubble | memory | MFU, span | MFU, makespan "
        "| speed-up, span | speed-up, makespan |",
        "|" + "---|" * 13,
    ]
    for row in rows:
        lines.append(
            f"| {row.layer} | {row.num_ranks} | {row.num_microbatches} | {row.layers_per_rank} | {row.schedule} "
            f"| {row.span_ms:.1f} | {row.makespan_ms:.1f} | {100 * row.bubble_rate:.1f} % | {row.peak_memory:.2f} "
            f"| {100 * row.mfu_span:.1f} % "
            f"| {100 * row.mfu_makespan:.1f} % | {row.speedup_span:.3f} | {row.speedup_makespan:.3f} |"
        )
    return "\n".join(lines)


def inputs_table(inputs: Sequence[Mapping[str, Any]]) -> str:
    """The inputs of the predictions as a Markdown table, one value per line with its source, per layer and microbatch."""
    lines = ["| layer | figure | value | |", "|" + "---|" * 4]
    for of_layer in inputs:
        for source in ("measured", "predicted", "given"):
            for name, value in of_layer[source].items():
                lines.append(f"| {of_layer['layer']} | {name} | {value:.6g} | *{source}* |")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.predict_gpu", description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("file", help="JSON written by tools.benchmarks.split")
    parser.add_argument("--num-ranks", type=int, action="append", help="p; repeat for several (default: 8, 16, 32)")
    parser.add_argument("--microbatches-per-rank", type=int, default=3, help="m / p (default %(default)s)")
    parser.add_argument(
        "--layers-per-rank", type=int, help="default: as in the paper, where embedding and head count as one layer each"
    )
    parser.add_argument("--link-gb-per-s", type=float, default=50.0, help="bandwidth of a P2P link (default %(default)s)")
    parser.add_argument("--peak-tflops", type=float, help="peak of the device; default: the rate of the plain matmul in FILE")
    parser.add_argument("--effort", choices=[each.value for each in Effort], help="search effort (default: almost none)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for values that are not positive."""
    for name in ("num_ranks", "microbatches_per_rank", "layers_per_rank", "link_gb_per_s", "peak_tflops"):
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be more than 0")


def describe(passes: Passes, peak_tflops: float, comm_ms: float, args: argparse.Namespace) -> dict[str, Any]:
    """The inputs of one layer's predictions, grouped by source."""
    measured = asdict(passes)
    for name in ("shape", "is_activation_measured", "activation_bytes", "model_flops"):
        del measured[name]
    predicted: dict[str, float] = {"comm_ms": comm_ms, "model_flops": passes.model_flops}
    (measured if passes.is_activation_measured else predicted)["activation_bytes"] = passes.activation_bytes
    given: dict[str, float] = {"link_gb_per_s": args.link_gb_per_s}
    (measured if args.peak_tflops is None else given)["peak_tflops"] = peak_tflops
    return {"layer": passes.shape.name, "measured": measured, "predicted": predicted, "given": given}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the prediction. A user error is one line on stderr and exit code 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    rows: list[Prediction] = []
    inputs = []
    try:
        check(args)
        body = json.loads(Path(args.file).read_text(encoding="utf-8"))
        for passes in read_passes(body):
            shape = passes.shape
            sent = BYTES_PER_ELEMENT[body["dtype"]] * shape.tokens * shape.hidden_size
            comm_ms = sent / args.link_gb_per_s / 1e6
            peak = args.peak_tflops or passes.plain_matmul_tflops
            inputs.append(describe(passes, peak, comm_ms, args))
            for num_ranks in args.num_ranks or (8, 16, 32):
                rows += predict(passes, num_ranks, args, peak, comm_ms)
    except (UserError, OSError, json.JSONDecodeError) as error:
        parser.error(str(error))
    print(f"All values are *predicted* from passes *measured* on {body['device']}.\n")
    print(table(rows))
    print(f"\nInputs, per layer and microbatch:\n\n{inputs_table(inputs)}")
    if args.json:
        result = {
            "format": FORMAT,
            "measured_on": body["device"],
            "is_gpu": body["is_gpu"],
            "inputs": inputs,
            "predicted": [asdict(row) for row in rows],
        }
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
