"""Measure the cost of splitting the backward pass into dgrad (B) and wgrad (W) on one device, and the speed of W.

For each kind of layer: F, B, W, and the full backward (B+W) twice, through our store and as megatron-core runs it, of a stack of
megatron-core's transformer layers with fp32 main gradients; then each wgrad GEMM alone, by every kernel that works here, vs. the
plain matmul of its shape. Times are CUDA events on a GPU, the host's clock on a CPU; medians over rounds that run every
contender; operands rotate, so that caches are cold. The bytes held between B and W are compared with the necessary bytes, and
with 32 sbh of arXiv 2401.10241.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.wgrad.gemm import WgradKernel, choose_kernel, working_kernels
from tools.benchmarks.reports import origin, write_json
from tools.benchmarks.wgrad.report import ShapeResult, to_json, to_markdown
from tools.benchmarks.wgrad.shapes import SHAPES, LayerShape, shape_named

FORMAT = "zerobubble-split-benchmark/1"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EXAMPLES = """examples:
  python -m tools.benchmarks.split --json split.json --markdown split.md
  python -m tools.benchmarks.split --shape 1.5B --shape Llama-3-8B --repeats 100
  python -m tools.benchmarks.split --device cpu --scale 0.05 --dtype fp32 --repeats 5
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.split", description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    names = ", ".join(shape.name for shape in SHAPES)
    parser.add_argument("--shape", action="append", metavar="NAME", help=f"repeat for several (default: all of {names})")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations (default %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on heads and tokens, one sample (default %(default)s)")
    parser.add_argument(
        "--num-layers", type=int, default=2, help="layers of the stack; times are per layer (default %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=31, help="rounds that count (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables to a file, too")
    return parser


def choose_device(name: str | None) -> torch.device:
    """Choose the device; raises ConfigError if there is no such device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda is given and torch sees no GPU here; give --device cpu --scale 0.05 to try the tool")
    return torch.device("cuda", 0) if name != "cpu" and torch.cuda.is_available() else torch.device("cpu")


def benchmark(shape: LayerShape, args: argparse.Namespace, device: torch.device) -> ShapeResult:
    """Measure one kind of layer."""
    from tools.benchmarks.wgrad.measure import measure_gemm, measure_passes
    from tools.benchmarks.wgrad.stack import Stack, world_of_one

    dtype = DTYPES[args.dtype]
    rounds: dict[str, Any] = {"device": device, "dtype": dtype, "repeats": args.repeats, "warmup": args.warmup}
    with world_of_one(device) as host, warnings.catch_warnings():
        # megatron-core warns on import and on every config about what is deprecated or not installed.
        warnings.filterwarnings("ignore", module=r"megatron\.core\.")
        kernel = choose_kernel(device, input_dtype=dtype, accumulator_dtype=torch.float32)
        split, stock = (Stack(shape, args.num_layers, dtype, device, host, each) for each in (kernel, None))
        passes = measure_passes(shape, split, stock, count=args.num_layers, **rounds)
        for stack in (split, stock):
            stack.close()
    gc.collect()  # before the next shape needs the memory
    kernels: list[WgradKernel] = working_kernels(device, input_dtype=dtype, accumulator_dtype=torch.float32)
    gemms = tuple(measure_gemm(linear, shape.tokens, kernels, **rounds) for linear in shape.linears)
    return ShapeResult(
        shape=shape,
        num_layers=args.num_layers,
        kernel=kernel.kind.value,
        bytes_per_element=dtype.itemsize,
        passes=passes,
        gemms=gemms,
    )


def about(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Where and how the benchmark was run."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "is_gpu": device.type == "cuda",
        "dtype": args.dtype,
        "scale": args.scale,
        "repeats": args.repeats,
        "torch": torch.__version__,
        "command": shlex.join(["python", "-m", "tools.benchmarks.split", *args.argv]),
    } | origin()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = build_parser()
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    for name in ("num_layers", "repeats", "warmup"):
        least = 0 if name == "warmup" else 1
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be {least} or more")
    try:
        device = choose_device(args.device)
        shapes = [shape_named(name) for name in args.shape] if args.shape else list(SHAPES)
        results = [benchmark(shape.scaled(args.scale), args, device) for shape in track(shapes, "shapes")]
    except UserError as error:
        parser.error(str(error))
    where = about(args, device)
    text = to_markdown(results, where)
    print(text)
    if args.markdown:
        Path(args.markdown).write_text(text + "\n", encoding="utf-8")
    if args.json:
        write_json(to_json(results, where, FORMAT), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
