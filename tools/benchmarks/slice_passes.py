"""Measure F, B and W of a transformer layer in slices: what short passes cost on one device.

A layer of Llama-3-70B's shape (hidden size 8192, 64 heads, 8 KV heads, SwiGLU of 28672) runs a sequence in n slices of equal
work, each attending to the slices before it as in training, with fp32 main gradients. Times are of a whole microbatch: medians of
the sums over its slices, in rounds that run every n; and of each slice. On a GPU by events on the stream, behind a pause in which
the host gets ahead.

  python -m tools.benchmarks.slice_passes --json slice_passes.json
  python -m tools.benchmarks.slice_passes --device cpu --scale 0.01 --dtype fp32 --repeats 2
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, SlicePart
from megatron.zerobubble.mcore.slices.prefix_attention import attend_to_prefix
from megatron.zerobubble.plan.costs.length_model import Terms
from megatron.zerobubble.plan.costs.slicing import slice_lengths
from megatron.zerobubble.wgrad.gemm import choose_kernel
from tools.benchmarks.reports import Row, markdown_table, origin, run_report
from tools.benchmarks.split import DTYPES, choose_device
from tools.benchmarks.wgrad.measure import Clock
from tools.benchmarks.wgrad.shapes import LayerShape, shape_named
from tools.benchmarks.wgrad.stack import Stack, world_of_one

FORMAT = "zerobubble-slice-passes/1"
SHAPE = replace(shape_named("Llama-3-8B"), name="Llama-3-70B", hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672)
LENGTHS, SLICES = (4096, 32768), (1, 2, 4, 8, 16)
PASSES = ("forward", "backward", "wgrad")


class SlicedLayer:
    """One layer, whose passes run slice by slice.

    Args:
        shape: of the layer and its sequence.
        stack: of one layer, with our store.
    """

    def __init__(self, shape: LayerShape, stack: Stack) -> None:
        self._stack, self._current = stack, CurrentSlice()
        self._layer: Any = stack.chunk.module
        self._rotary = self._layer.rotary
        for layer in self._layer.layers:
            attend_to_prefix(layer.self_attention.core_attention, self._current)
        self._work = Terms(
            per_token=2 * shape.linear_flops / shape.tokens, per_square=2 * shape.attention_flops / shape.seq_length**2
        )

    def parts(self, tokens: int, num_slices: int, multiple: int) -> list[SlicePart]:
        """Slices of equal work by the FLOPs of F, in multiples of tokens."""
        lengths, parts = slice_lengths(self._work, tokens, num_slices, multiple=multiple), []
        for index, length in enumerate(lengths):
            parts.append(SlicePart(index=index, offset=sum(lengths[:index]), length=length, whole=tokens))
        return parts

    def run(
        self, clock: Clock, x_sbh: torch.Tensor, gradient_sbh: torch.Tensor, parts: Sequence[SlicePart]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """F of all slices, then B and W of each, the last one first; times go to the clock by pass, n and slice.

        Returns:
            The layer's output and the gradient of its input, [s, b, h].
        """
        store, outputs, inputs = self._stack.store, [], []
        assert store is not None
        for part in parts:
            self._layer.rotary = self._rotary[part.offset : part.end]
            inputs.append(x_sbh[part.offset : part.end].detach().requires_grad_())
            with self._current.running(0, 0, part):
                clock.time(f"forward {len(parts)} {part.index}", lambda: outputs.append(self._stack.forward(inputs[-1])))
        results = [output.detach() for output in outputs]
        gradients: list[torch.Tensor] = []
        for part in reversed(parts):
            backward = partial(self._stack.backward, outputs.pop(), gradient_sbh[part.offset : part.end], fused=False)
            with self._current.running(0, 0, part):
                clock.time(f"backward {len(parts)} {part.index}", backward)
            gradient = inputs.pop().grad
            assert gradient is not None
            gradients.insert(0, gradient)
            del backward
            clock.time(f"wgrad {len(parts)} {part.index}", self._stack.weight_gradient)
        self._current.release(0, 0)
        return torch.cat(results), torch.cat(gradients)


def measured_at(tokens: int, args: argparse.Namespace, device: torch.device) -> list[Row]:
    """Rows of one sequence length, one for each number of slices."""
    shape = replace(SHAPE, seq_length=tokens)
    if args.scale < 1:
        shape = replace(shape, hidden_size=512, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=1024)
    dtype = DTYPES[args.dtype]
    with world_of_one(device) as host:
        kernel = choose_kernel(device, input_dtype=dtype, accumulator_dtype=torch.float32)
        stack = Stack(shape, 1, dtype, device, host, kernel)
        layer, clock = SlicedLayer(shape, stack), Clock(device)
        x_sbh, gradient_sbh = (torch.randn(tokens, 1, shape.hidden_size, device=device).to(dtype) for _ in range(2))
        multiple = min(128, tokens // (4 * max(args.slices)))
        numbers = [n for n in args.slices if n * multiple <= tokens]
        apart, whole = {}, list[torch.Tensor]()
        for n in numbers:
            found = [each.double() for each in layer.run(clock, x_sbh, gradient_sbh, layer.parts(tokens, n, multiple))]
            whole = whole or found
            apart[n] = [float((a - b).norm() / b.norm()) for a, b in zip(found, whole, strict=True)]
        clock.read(skip=0)
        del found, whole
        for number in range(args.warmup + args.repeats):
            for index in range(len(numbers)):
                n = numbers[(index + number) % len(numbers)]
                for _ in range(1 + n // 4):  # the host takes longer for more slices
                    clock.get_ahead()
                layer.run(clock, x_sbh, gradient_sbh, layer.parts(tokens, n, multiple))
        times = clock.read(skip=args.warmup)
        rows = []
        for n in numbers:
            parts = layer.parts(tokens, n, multiple)
            row: Row = {"tokens": tokens, "slices": n, "lengths": [part.length for part in parts], "apart": apart[n]}
            for name in PASSES:
                of_slices = [times[f"{name} {n} {part.index}"] for part in parts]
                row[f"{name}_ms"] = statistics.median(map(sum, zip(*of_slices, strict=True)))
                row[f"{name}_ms_by_slice"] = [statistics.median(each) for each in of_slices]
            rows.append(row)
        stack.close()
        return rows


def markdown(report: Row) -> str:
    """The table."""
    lines, rows = [], report["rows"]
    for row in rows:
        [whole] = [each for each in rows if each["tokens"] == row["tokens"] and each["slices"] == 1]
        total, base = (sum(each[f"{name}_ms"] for name in PASSES) for each in (row, whole))
        cells = [f"{row['tokens'] // 1024}k", str(row["slices"]), f"{row['lengths'][0]} to {row['lengths'][-1]}"]
        cells += [f"{row[f'{name}_ms'] / whole[f'{name}_ms']:.3f}" for name in PASSES]
        lines.append([*cells, f"{total / base:.3f}", f"{total:.2f}", " and ".join(f"{each:.1e}" for each in row["apart"])])
    heads = ("s", "slices", "tokens of a slice", "F", "B", "W", "F + B + W", "ms", "output and gradient apart")
    return "\n".join(markdown_table(heads, lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table. Exit code 2 for wrong arguments."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.slice_passes", description=__doc__, formatter_class=raw)
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="sequence lengths (default %(default)s)")
    parser.add_argument("--slices", type=int, nargs="+", default=SLICES, help="numbers, 1 among them (default %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations (default %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: a small layer and this share of the tokens")
    parser.add_argument("--repeats", type=int, default=11, help="rounds that count (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them (default %(default)s)")

    def measured(args: argparse.Namespace) -> Row:
        device, rows = choose_device(args.device), list[Row]()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        for tokens in track([max(64, int(each * args.scale) // 64 * 64) for each in args.tokens], "lengths"):
            rows += measured_at(tokens, args, device)
        return {"rows": rows, "device": name, "torch": torch.__version__, "command": args.command} | origin()

    return run_report(parser, argv, FORMAT, measured, markdown)


if __name__ == "__main__":
    sys.exit(main())
