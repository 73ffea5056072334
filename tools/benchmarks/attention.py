"""Measure a transformer layer with torch's attention beside the same layer with megatron-core's own, on a CPU.

One thread, megatron-core's layers with the B/W split, no dropout. In every round each of three runs once, in changing order:

  own     F and the full backward (B+W), with megatron-core's own attention, which keeps its scores
  torch   F and the full backward, with torch's attention
  split   F, B and W, with torch's attention

Times are CPU time of the thread, so that other processes do not count. A ratio is the median over the rounds of the ratio within
a round, with a 95 % confidence interval. Activation memory is the bytes that F leaves behind, counted tensor by tensor.

  python -m tools.benchmarks.attention --json docs/benchmarks/data/attention.json
  python -m tools.benchmarks.attention --from docs/benchmarks/data/attention.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.profiling.activation_memory import MemoryMeter
from megatron.zerobubble.wgrad.gemm import choose_kernel
from tools.benchmarks.schedules.report import Estimate
from tools.benchmarks.wgrad.shapes import LayerShape, shape_named

FORMAT = "zerobubble-attention-benchmark/1"
KINDS = {"gpt": "6.2B", "llama": "Llama-3-8B"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEAD_SIZE = 64
CPU = torch.device("cpu")

Round = dict[str, float]
"""Milliseconds of one round by name: own, torch and split, each followed by the pass."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One layer."""

    kind: str
    hidden_size: int
    seq_length: int
    micro_batch_size: int
    own_ms: float
    """F and B+W with megatron-core's own attention; the median over the rounds."""
    torch_ms: float
    """The same with torch's attention."""
    speedup: Estimate
    """own_ms / torch_ms, within a round."""
    split_ratio: Estimate
    """(B + W) / full backward, with torch's attention."""
    own_bytes: int
    """Activation memory after F with megatron-core's own attention."""
    torch_bytes: int
    """The same with torch's attention."""
    predicted_bytes: int
    """`LayerShape.activation_bytes`."""


def shape_of(kind: str, hidden_size: int, seq_length: int, micro_batch_size: int) -> LayerShape:
    """A layer with the proportions of a known model, heads of `HEAD_SIZE` and a quarter of them for keys and values in Llama's.

    Raises:
        ConfigError: the hidden size does not divide into heads.
    """
    model = shape_named(KINDS[kind])
    heads, rest = divmod(hidden_size, HEAD_SIZE)
    group = model.num_attention_heads // model.num_query_groups
    if heads < 1 or rest or heads % group:
        raise ConfigError(f"--hidden-size {hidden_size} of a {kind} layer must be a multiple of {HEAD_SIZE * group}")
    return replace(
        model,
        name=f"{kind} {hidden_size}",
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_query_groups=heads // group,
        ffn_hidden_size=model.ffn_hidden_size * hidden_size // model.hidden_size,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
    )


def measure(kind: str, shape: LayerShape, args: argparse.Namespace) -> Result:
    """Measure one layer."""
    with quiet_third_parties():
        from megatron.core.transformer.enums import AttnBackend

        from tools.benchmarks.wgrad.stack import Stack, world_of_one

    dtype = DTYPES[args.dtype]
    kernel = choose_kernel(CPU, input_dtype=dtype, accumulator_dtype=torch.float32)
    with world_of_one(CPU) as host, quiet_third_parties():
        warnings.filterwarnings("ignore", module=r"megatron\.core\.")  # of what is deprecated, on every config
        own = Stack(shape, 1, dtype, CPU, host, kernel, AttnBackend.local)
        ours = Stack(shape, 1, dtype, CPU, host, kernel)
        sizes = (shape.seq_length, shape.micro_batch_size, shape.hidden_size)
        x_sbh = torch.randn(sizes).to(dtype)
        gradient = torch.randn(sizes).to(dtype)
        contenders = {
            "own": lambda: _passes(own, x_sbh, gradient, fused=True),
            "torch": lambda: _passes(ours, x_sbh, gradient, fused=True),
            "split": lambda: _passes(ours, x_sbh, gradient, fused=False),
        }
        rounds = run_rounds(contenders, args.repeats)
        bytes_of = [activation_bytes(stack, x_sbh, gradient) for stack in (own, ours)]
        for stack in (own, ours):
            stack.close()
    return Result(
        kind=kind,
        hidden_size=shape.hidden_size,
        seq_length=shape.seq_length,
        micro_batch_size=shape.micro_batch_size,
        own_ms=statistics.median(map(_whole("own"), rounds)),
        torch_ms=statistics.median(map(_whole("torch"), rounds)),
        speedup=_ratio(rounds, _whole("own"), _whole("torch")),
        split_ratio=_ratio(rounds, lambda row: row["split B"] + row["split W"], lambda row: row["torch BW"]),
        own_bytes=bytes_of[0],
        torch_bytes=bytes_of[1],
        predicted_bytes=shape.activation_bytes(dtype.itemsize),
    )


def run_rounds(contenders: dict[str, Callable[[], dict[str, float]]], repeats: int) -> list[Round]:
    """Run every contender once per round, each round beginning with another one. A first round does not count."""
    names, rounds = list(contenders), []
    for number in range(repeats + 1):
        row: Round = {}
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            row |= {f"{name} {each}": value for each, value in contenders[name]().items()}
        rounds.append(row)
    return rounds[1:]


def _passes(stack: Any, x_sbh: torch.Tensor, gradient: torch.Tensor, *, fused: bool) -> dict[str, float]:
    """Milliseconds of F and BW, or of F, B and W."""
    gc.collect()
    gc.disable()
    try:
        x_sbh = x_sbh.detach().requires_grad_()
        times = [time.thread_time()]
        output = stack.forward(x_sbh)
        times.append(time.thread_time())
        stack.backward(output, gradient, fused=fused)
        times.append(time.thread_time())
        if not fused:
            stack.weight_gradient()
            times.append(time.thread_time())
    finally:
        gc.enable()
    spans = [1000.0 * (end - begin) for begin, end in itertools.pairwise(times)]
    return dict(zip(("F", "BW") if fused else ("F", "B", "W"), spans, strict=True))


def activation_bytes(stack: Any, x_sbh: torch.Tensor, gradient: torch.Tensor) -> int:
    """Bytes that are alive after F and were not before."""
    meter = MemoryMeter(CPU)
    with meter:
        output = stack.forward(x_sbh.detach().requires_grad_())
        held = meter.held_bytes
    stack.backward(output, gradient, fused=True)
    return held


def _whole(name: str) -> Callable[[Round], float]:
    return lambda row: row[f"{name} F"] + row[f"{name} BW"]


def _ratio(rounds: Sequence[Round], above: Callable[[Round], float], below: Callable[[Round], float]) -> Estimate:
    return Estimate.of(rounds, lambda rows: statistics.median(above(row) / below(row) for row in rows))


def to_markdown(body: dict[str, Any]) -> str:
    """The results as a table."""
    about = body["about"]
    lines = [
        f"{about['device']}, torch {about['torch']}, {about['dtype']}, {about['repeats']} rounds. Milliseconds are CPU time of F "
        "and B+W of one layer.",
        "",
        "| layer | s | own ms | torch ms | speed-up | (B + W) / full backward | own MiB | torch MiB | of own | predicted MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in body["results"]:
        mib = [each[name] / 2**20 for name in ("own_bytes", "torch_bytes", "predicted_bytes")]
        lines.append(
            f"| {each['kind']}, h = {each['hidden_size']} | {each['seq_length']} | {each['own_ms']:.0f} | {each['torch_ms']:.0f} "
            f"| {_shown(each['speedup'])} | {_shown(each['split_ratio'])} "
            f"| {mib[0]:.1f} | {mib[1]:.1f} | {mib[1] / mib[0]:.1%} | {mib[2]:.1f} |"
        )
    return "\n".join(lines)


def _shown(estimate: dict[str, float]) -> str:
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.attention", description=__doc__, formatter_class=raw)
    parser.add_argument("--kind", action="append", choices=KINDS, help="repeat for several (default: all)")
    parser.add_argument("--hidden-size", action="append", type=int, help="repeat for several (default: 512 and 1024)")
    parser.add_argument("--seq-length", type=int, default=2048, help="default %(default)s")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="default %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default %(default)s")
    parser.add_argument("--repeats", type=int, default=15, help="rounds that count (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--from", dest="read", metavar="FILE", help="print the tables of such a JSON, and measure nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.read:
        print(to_markdown(json.loads(Path(args.read).read_text(encoding="utf-8"))))
        return 0
    for name in ("seq_length", "micro_batch_size", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be 1 or more")
    try:
        sizes = args.hidden_size or [512, 1024]
        wanted = [
            (kind, shape_of(kind, size, args.seq_length, args.micro_batch_size)) for kind in args.kind or KINDS for size in sizes
        ]
    except UserError as error:
        parser.error(str(error))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = [measure(kind, shape, args) for kind, shape in track(wanted, "kinds and sizes")]
    torch.set_num_threads(threads)
    about = {
        "device": "CPU, 1 thread",
        "dtype": args.dtype,
        "repeats": args.repeats,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    body = {"format": FORMAT, "about": about, "results": [asdict(result) for result in results]}
    print(to_markdown(body))
    if args.json:
        Path(args.json).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
