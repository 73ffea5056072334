"""Measure variants of running wgrad (W) side by side with the current one, to decide which are worth building.

On any device: W of several microbatches of one linear as one GEMM, with the copies that make their operands contiguous, and
without them (`together.py`). On a GPU also: W in a CUDA graph, W overlapped with B on a side stream, both, and the current
variant (`beside.py`). Medians over rounds that run every variant; ratios are of times of the same round.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import UserError
from megatron.zerobubble.wgrad.gemm import choose_kernel, working_kernels
from tools.benchmarks.split import DTYPES, about, choose_device
from tools.benchmarks.wgrad.beside import PLAIN, BesideTimes, Card, CudaCard, LayerGemms, WayTimes, measure_ways
from tools.benchmarks.wgrad.shapes import SHAPES, LayerShape, shape_named
from tools.benchmarks.wgrad.together import TogetherTimes, measure_together

FORMAT = "zerobubble-wgrad-benchmark/1"
PAYS = 0.97
"""A variant pays if its time over that of the current one is at most this."""
EXAMPLES = """examples:
  python -m tools.benchmarks.wgrad --json wgrad.json --markdown wgrad.md
  python -m tools.benchmarks.wgrad --shape 1.5B --tokens 64 --tokens 512 --together 2 --together 8
  python -m tools.benchmarks.wgrad --device cpu --dtype fp32 --shape 6.2B --scale 0.125 --tokens 16 --tokens 128 --repeats 9
"""


@dataclass(frozen=True, kw_only=True)
class ShapeWays:
    """Results of one kind of layer and one number of tokens."""

    shape: LayerShape
    kernel: str
    """Kernel that W runs with."""
    together: tuple[TogetherTimes, ...]
    """Times for each linear, each number of microbatches, and each kernel that works."""
    beside: tuple[WayTimes, ...]
    """Times of the variants that could be measured."""
    not_measured: str
    """The variants that could not be measured, and why; empty if there are none."""

    def layer(self, count: int, kernel: str) -> LayerTogether:
        """`together` summed up over all linears of a layer."""
        of = [each for each in self.together if (each.count, each.kernel) == (count, kernel)]
        apart = sum(each.apart_ms for each in of)
        return LayerTogether(
            count=count,
            kernel=kernel,
            apart_ms=apart,
            copied_ratio=sum(each.copied_ratio * each.apart_ms for each in of) / apart,
            adjacent_ratio=sum(each.adjacent_ratio * each.apart_ms for each in of) / apart,
            workspace_bytes=max(each.workspace_bytes for each in of),
            difference=max(each.difference for each in of),
        )

    def layers(self) -> list[LayerTogether]:
        """`layer` for every number of microbatches and every kernel."""
        return [self.layer(*key) for key in dict.fromkeys((each.count, each.kernel) for each in self.together)]


@dataclass(frozen=True, kw_only=True)
class LayerTogether:
    """W of several microbatches of a layer, in one GEMM per linear. Ratios are means over the linears, weighted by time."""

    count: int
    kernel: str
    apart_ms: float
    copied_ratio: float
    adjacent_ratio: float
    workspace_bytes: int
    """Workspace of the largest linear, which the others share."""
    difference: float


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.wgrad", description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    names = ", ".join(shape.name for shape in SHAPES)
    parser.add_argument("--shape", action="append", metavar="NAME", help=f"repeat for several (default: all of {names})")
    parser.add_argument("--tokens", type=int, action="append", help="tokens per microbatch, repeatable (default: the shape's)")
    parser.add_argument("--together", type=int, action="append", metavar="K", help="microbatches per GEMM (default: 2, 4 and 8)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the operands (default %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on heads and tokens, one sample (default %(default)s)")
    parser.add_argument("--num-layers", type=int, default=2, help="layers of B and of the overlapping W (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on a CPU; a rank has one (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=31, help="rounds that count (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables to a file, too")
    return parser


def benchmark(shape: LayerShape, args: argparse.Namespace, device: torch.device, card: Card | None) -> ShapeWays:
    """Measure one kind of layer; without a card only the variants that need none."""
    dtype = DTYPES[args.dtype]
    rounds: dict[str, Any] = {"device": device, "dtype": dtype, "repeats": args.repeats, "warmup": args.warmup}
    kernels = working_kernels(device, input_dtype=dtype, accumulator_dtype=torch.float32)
    together = tuple(
        measure_together(linear, shape.tokens, count, kernel, **rounds)
        for count in args.together or (2, 4, 8)
        for linear in shape.linears
        for kernel in kernels
    )
    beside = measure_beside(shape, args, card, **rounds)
    return ShapeWays(
        shape=shape,
        kernel=choose_kernel(device, input_dtype=dtype, accumulator_dtype=torch.float32).kind.value,
        together=together,
        beside=beside.ways,
        not_measured=beside.not_measured,
    )


def measure_beside(
    shape: LayerShape,
    args: argparse.Namespace,
    card: Card | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    warmup: int,
) -> BesideTimes:
    """Measure CUDA graph and side stream, or state why not."""
    if card is None:
        return BesideTimes(ways=(), not_measured="CUDA graph and side stream need a GPU, and this is a CPU")
    from tools.benchmarks.wgrad.stack import Stack, world_of_one

    with world_of_one(device) as host, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core\.")  # what is deprecated or not installed
        kernel = choose_kernel(device, input_dtype=dtype, accumulator_dtype=torch.float32)
        stack = Stack(shape, args.num_layers, dtype, device, host, kernel)
        gemms = LayerGemms(shape, args.num_layers, kernel, device, dtype)
        rounds: dict[str, Any] = {"device": device, "dtype": dtype, "repeats": repeats, "warmup": warmup}
        try:
            return measure_ways(shape, stack, gemms, card, count=args.num_layers, **rounds)
        finally:
            stack.close()
            gc.collect()  # before the next shape needs the memory


def to_markdown(results: Sequence[ShapeWays], about: dict[str, Any]) -> str:
    """The results as Markdown: tables, then verdicts."""
    lines = [
        f"Device: {about['device']}, torch {about['torch']}, {about['dtype']} into fp32 main gradients; medians of "
        f"{about['repeats']} rounds, per layer. All values are *measured*; a ratio is over the current variant.",
        "",
        "W of K microbatches in one GEMM per linear:",
        "",
        "| layer | tokens | K | kernel | apart ms | together, with copies | without copies | copies MiB | difference |",
        "|" + "---|" * 9,
    ]
    for result in results:
        for each in result.layers():
            lines.append(
                f"| {result.shape.name} | {result.shape.tokens} | {each.count} | {each.kernel} | {each.apart_ms:.3f} "
                f"| {each.copied_ratio:.3f} | {each.adjacent_ratio:.3f} | {each.workspace_bytes / 2**20:.2f} "
                f"| {each.difference:.1e} |"
            )
    if any(result.beside for result in results):
        lines += ["", "B of one microbatch and W of another:", ""]
        lines += ["| layer | tokens | variant | device ms | host ms | ratio |", "|" + "---|" * 6]
    for result in results:
        for way in result.beside:
            lines.append(
                f"| {result.shape.name} | {result.shape.tokens} | {way.way} | {way.device_ms:.3f} | {way.host_ms:.3f} "
                f"| {way.ratio:.3f} |"
            )
    lines += ["", *(f"- {sentence}" for sentence in verdicts(results))]
    return "\n".join(lines)


def verdicts(results: Sequence[ShapeWays]) -> list[str]:
    """For each kind of layer which variants pay, with the kernel that W runs with; then what was not measured, once."""
    sentences = []
    for result in results:
        shape = result.shape
        ratios = {f"{each.count} together": each.copied_ratio for each in result.layers() if each.kernel == result.kernel}
        ratios |= {way.way: way.ratio for way in result.beside if way.way != PLAIN}
        outcomes = [f"{name} {'pays' if ratio <= PAYS else 'does not pay'} ({ratio:.3f})" for name, ratio in ratios.items()]
        sentences.append(f"{shape.name}, {shape.tokens} tokens: {', '.join(outcomes)}")
    sentences += dict.fromkeys(f"not measured: {result.not_measured}" for result in results if result.not_measured)
    return sentences


def to_json(results: Sequence[ShapeWays], where: dict[str, Any]) -> dict[str, Any]:
    """The JSON form."""
    shapes = [
        {
            "shape": asdict(result.shape),
            "kernel": result.kernel,
            "measured": {
                "together": [asdict(each) for each in result.together],
                "layer_together": [asdict(each) for each in result.layers()],
                "beside": [asdict(each) for each in result.beside],
            },
            "not_measured": result.not_measured,
        }
        for result in results
    ]
    return {"format": FORMAT, **where, "shapes": shapes, "verdicts": verdicts(results)}


def shapes_of(args: argparse.Namespace) -> list[LayerShape]:
    """Every kind of layer with every number of tokens. Raises ConfigError for an unknown shape."""
    named = [shape_named(name) for name in args.shape] if args.shape else list(SHAPES)
    scaled = [shape.scaled(args.scale) for shape in named]
    if not args.tokens:
        return scaled
    return [replace(shape, seq_length=tokens, micro_batch_size=1) for shape in scaled for tokens in args.tokens]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = build_parser()
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    for name, least in {"num_layers": 1, "repeats": 1, "warmup": 0, "threads": 1, "tokens": 1, "together": 2}.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < least:
                parser.error(f"--{name.replace('_', '-')} is {value}; it must be {least} or more")
    try:
        device = choose_device(args.device)
        torch.set_num_threads(args.threads)
        card = CudaCard(device) if device.type == "cuda" else None
        results = [benchmark(shape, args, device, card) for shape in track(shapes_of(args), "shapes")]
    except UserError as error:
        parser.error(str(error))
    where = about(args, device, "tools.benchmarks.wgrad")
    text = to_markdown(results, where)
    print(text)
    if args.markdown:
        Path(args.markdown).write_text(text + "\n", encoding="utf-8")
    if args.json:
        Path(args.json).write_text(json.dumps(to_json(results, where), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
