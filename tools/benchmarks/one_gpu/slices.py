"""Step S: F, B and W of a layer that runs its sequence in slices of equal work, each attending to those before it."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, SlicePart
from megatron.zerobubble.mcore.slices.prefix_attention import attend_to_prefix
from megatron.zerobubble.plan.costs.length_model import Work
from megatron.zerobubble.plan.costs.slicing import slice_lengths
from megatron.zerobubble.wgrad.gemm import choose_kernel
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.reports import Row, markdown_table
from tools.benchmarks.wgrad.measure import Clock, rounds
from tools.benchmarks.wgrad.shapes import LayerShape
from tools.benchmarks.wgrad.stack import Stack, world_of_one

TOKENS, SLICES = (4096, 32768), (1, 4, 8)
PASSES = ("forward", "backward", "wgrad")
MULTIPLE = 128
"""Tokens of which the lengths of slices are multiples, if the sequence is one."""


class SlicedLayer:
    """One layer, whose passes run slice by slice.

    Args:
        shape: of the layer and its sequence.
        stack: of one layer, with our store.
    """

    def __init__(self, shape: LayerShape, stack: Stack) -> None:
        self._shape, self._stack, self._current = shape, stack, CurrentSlice()
        self._layer: Any = stack.chunk.module
        self._rotary = self._layer.rotary
        for layer in self._layer.layers:
            attend_to_prefix(layer.self_attention.core_attention, self._current)

    def parts(self, num_slices: int) -> list[SlicePart]:
        """Slices of equal work by the FLOPs of F."""
        shape, tokens = self._shape, self._shape.seq_length
        work = Work(per_token=2 * shape.linear_flops / tokens, per_square=2 * shape.attention_flops / tokens**2)
        lengths = slice_lengths(work, tokens, num_slices, multiple=math.gcd(MULTIPLE, tokens))
        return [
            SlicePart(index=index, offset=sum(lengths[:index]), length=length, whole=tokens)
            for index, length in enumerate(lengths)
        ]

    def run(
        self, clock: Clock, x_sbh: torch.Tensor, gradient_sbh: torch.Tensor, parts: Sequence[SlicePart]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """F of all slices, then B and W of each, the last one first; the clock gets a time per pass and slice.

        Returns:
            The layer's output and the gradient of its input, [s, b, h].
        """
        store, outputs, inputs = self._stack.store, [], []
        assert store is not None
        for part in parts:
            self._layer.rotary = self._rotary[part.offset : part.end]
            inputs.append(x_sbh[part.offset : part.end].detach().requires_grad_())
            with self._current.running(0, 0, part):
                clock.time(f"forward {len(parts)}", lambda: outputs.append(self._stack.forward(inputs[-1])))
        results = [output.detach() for output in outputs]
        gradients: list[torch.Tensor] = []
        for part in reversed(parts):
            backward = partial(self._stack.backward, outputs.pop(), gradient_sbh[part.offset : part.end], fused=False)
            with self._current.running(0, 0, part):
                clock.time(f"backward {len(parts)}", backward)
            gradient = inputs.pop().grad
            assert gradient is not None
            gradients.insert(0, gradient)
            del backward
            clock.time(f"wgrad {len(parts)}", self._stack.weight_gradient)
        self._current.release(0, 0)
        return torch.cat(results), torch.cat(gradients)


def measure(setting: Setting, seconds: float = 40.0) -> Row:
    """Measure both lengths, each for at most its share of the seconds."""
    rows = []
    for tokens in TOKENS:
        rows += measured_at(setting.layer(tokens), setting, setting.dtype, seconds / len(TOKENS))
        gc.collect()
        torch.cuda.empty_cache()
    return {"rows": rows}


def measured_at(shape: LayerShape, setting: Setting, dtype: torch.dtype, seconds: float) -> list[Row]:
    """Rows of one sequence length, one for each number of slices."""
    device, (repeats, warmup) = setting.device, (15, 2) if setting.on_gpu else (1, 0)
    with world_of_one(device) as host:
        kernel = choose_kernel(device, input_dtype=dtype, accumulator_dtype=torch.float32)
        stack, clock = Stack(shape, 1, dtype, device, host, kernel), Clock(device)
        layer = SlicedLayer(shape, stack)
        x_sbh, gradient_sbh = (torch.randn(shape.seq_length, 1, shape.hidden_size, device=device).to(dtype) for _ in range(2))
        parts, apart, whole = {n: layer.parts(n) for n in SLICES}, {}, list[torch.Tensor]()
        for n in SLICES:
            found = [each.float() for each in layer.run(clock, x_sbh, gradient_sbh, parts[n])]
            whole = whole or found
            apart[n] = [float((a - b).norm() / b.norm()) for a, b in zip(found, whole, strict=True)]
        clock.read(skip=0)
        del found, whole
        for number in rounds(clock, repeats=repeats, warmup=warmup, seconds=seconds):
            for index in range(len(SLICES)):
                n = SLICES[(index + number) % len(SLICES)]
                for _ in range(1 + n // 4):  # the host takes longer for more slices
                    clock.get_ahead()
                layer.run(clock, x_sbh, gradient_sbh, parts[n])
        times, rows = clock.read(skip=0), []
        for n in SLICES:
            row: Row = {"tokens": shape.seq_length, "slices": n, "apart": apart[n]}
            row |= {"lengths": [part.length for part in parts[n]], "rounds": len(times[f"wgrad {n}"]) // n - warmup}
            for name in PASSES:
                of_slices = times[f"{name} {n}"]
                of_rounds = [sum(of_slices[begin : begin + n]) for begin in range(warmup * n, len(of_slices), n)]
                row[f"{name}_ms"] = statistics.median(of_rounds)
            rows.append(row)
        stack.close()
        del stack, layer
        return rows


def lines(row: Row) -> list[str]:
    """The section of the page."""
    table, rows = [], row["rows"]
    for each in rows:
        [whole] = [one for one in rows if one["tokens"] == each["tokens"] and one["slices"] == 1]
        total, base = (sum(one[f"{name}_ms"] for name in PASSES) for one in (each, whole))
        cells = [f"{each['tokens']:,}", str(each["slices"]), f"{each['lengths'][0]:,} to {each['lengths'][-1]:,}"]
        cells += [f"{each[f'{name}_ms'] / whole[f'{name}_ms']:.3f}" for name in PASSES]
        table.append([*cells, f"{total / base:.3f}", f"{total:.2f}", " and ".join(f"{a:.1e}" for a in each["apart"])])
    heads = ("s", "slices", "tokens of a slice", "F", "B", "W", "F + B + W", "ms", "output and gradient apart")
    return [
        "## A layer in slices",
        "",
        "A layer of Llama-3-8B in bf16 runs a sequence in slices of equal work, which attend to the slices before them as in "
        "training. F, B and W are sums over the slices, as a share of the whole sequence's; ms is F + B + W. Medians of up to "
        f"{max(each['rounds'] for each in rows)} rounds, in which all numbers of slices take turns. The last column is how far "
        "the layer's output and the gradient of its input are from those of the whole sequence, by their norms.",
        "",
        *markdown_table(heads, table),
    ]
