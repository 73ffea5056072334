"""Step A: the passes of a layer, ours and megatron-core's, what W holds, and the rates of its GEMMs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.zerobubble.wgrad.gemm import WgradKernel, choose_kernel, working_kernels
from tools.benchmarks.one_gpu.clock import Clock, in_turn, rounds
from tools.benchmarks.one_gpu.layer_shape import LayerShape, Linear
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.one_gpu.stack import Stack, stacks
from tools.benchmarks.reports import Row, markdown_table

NUM_LAYERS = 2
TOKENS = (4096, 8192)
SPLIT_LIMIT = 1.02
"""Goal: time of B + W over that of the full backward, at most."""
RATE_LIMIT = 0.95
"""Goal: rate of W over that of the plain matmuls, at least."""
CACHE_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
"""Operands rotate through at least this number of bytes: a few times the last-level cache."""
MOST_ROTATIONS = 16


def measure(setting: Setting, seconds: float = 40.0) -> Row:
    """Measure the passes and GEMMs at both lengths, each of them for at most its share of the seconds."""
    dtypes: dict[str, Any] = {"input_dtype": setting.dtype, "accumulator_dtype": torch.float32}
    kernel, kernels = choose_kernel(setting.device, **dtypes), working_kernels(setting.device, **dtypes)
    return {
        "kernel": kernel.kind.value,
        "is_gpu": setting.on_gpu,
        "lengths": [_at(setting.layer(tokens), setting, kernel, kernels, seconds / len(TOKENS)) for tokens in TOKENS],
    }


def _at(shape: LayerShape, setting: Setting, kernel: WgradKernel, kernels: list[WgradKernel], seconds: float) -> Row:
    limits: dict[str, Any] = {"seconds": seconds / (1 + len(shape.linears))}
    limits |= {"repeats": 31, "warmup": 3} if setting.on_gpu else {"repeats": 2, "warmup": 1}
    with stacks(shape, NUM_LAYERS, setting, kernel, None) as (split, stock):
        passes = _passes(shape, setting, split, stock, limits)
    gemms = [_gemm(linear, shape.tokens, setting, kernels, limits) for linear in shape.linears]
    row = {
        "tokens": shape.tokens,
        "passes": passes,
        "gemms": gemms,
        "wgrad_tflops": _tflops(shape.linear_flops, passes["wgrad_ms"]),
        "plain_tflops": _tflops(shape.linear_flops, sum(gemm["plain_matmul_ms"] for gemm in gemms)),
        "needed_bytes": shape.held_bytes(setting.dtype.itemsize),
    }
    return row | {"verdicts": verdicts(row) if setting.on_gpu else []}


def _turns(
    setting: Setting, contenders: Sequence[Callable[[Clock, int], None]], limits: dict[str, Any]
) -> dict[str, list[float]]:
    """Milliseconds by name, with a contender's times of every round; each round begins behind a pause."""
    clock = Clock(setting.device)
    for number in rounds(**limits):
        clock.get_ahead()
        for contender in in_turn(contenders, number):
            contender(clock, number)
        clock.synchronize()
    return clock.read(skip=limits["warmup"])


def _passes(shape: LayerShape, setting: Setting, split: Stack, stock: Stack, limits: dict[str, Any]) -> Row:
    """F, B, W and the two full backwards of a layer, medians over the rounds, and the bytes in the store between B and W."""
    held_bytes = 0
    size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    buffers, gradients = ([torch.randn(size, device=setting.device).to(setting.dtype) for _ in range(4)] for _ in range(2))

    def full_backward(stack: Stack, name: str, clock: Clock, number: int) -> None:
        output = stack.forward(buffers[number % 4].detach().requires_grad_())
        clock.time(name, lambda: stack.backward(output, gradients[(number + 1) % 4], fused=True))

    def ours(clock: Clock, number: int) -> None:
        nonlocal held_bytes
        assert split.store is not None
        x_sbh = buffers[number % 4].detach().requires_grad_()
        outputs: list[Tensor] = []
        clock.time("forward", lambda: outputs.append(split.forward(x_sbh)))
        clock.time("backward", lambda: split.backward(outputs[0], gradients[(number + 1) % 4], fused=False))
        outputs.clear()
        x_sbh.grad = None
        held_bytes = split.store.pending_bytes
        clock.time("wgrad", split.weight_gradient)

    contenders: list[Callable[[Clock, int], None]] = [
        ours,
        partial(full_backward, split, "fused"),
        partial(full_backward, stock, "stock"),
    ]
    times = _turns(setting, contenders, limits)
    medians = {name: statistics.median(taken) / NUM_LAYERS for name, taken in times.items()}
    full = times["stock"] if medians["stock"] < medians["fused"] else times["fused"]
    rows = zip(times["backward"], times["wgrad"], full, strict=True)
    row: Row = {f"{name}_ms": value for name, value in medians.items()}
    row["split_ratio"] = statistics.median((b + w) / whole for b, w, whole in rows)
    return row | {"held_bytes": held_bytes / NUM_LAYERS, "rounds": len(full)}


def _gemm(linear: Linear, tokens: int, setting: Setting, kernels: Sequence[WgradKernel], limits: dict[str, Any]) -> Row:
    """W of one linear by each kernel, and the plain matmul of its shape, ``dY^T X`` in the inputs' dtype."""
    device, dtype = setting.device, setting.dtype
    one = dtype.itemsize * tokens * (linear.out + linear.in_)
    rotations = min(MOST_ROTATIONS, max(2, -(-CACHE_BYTES[device.type] // one)))
    pairs = [
        (torch.randn(tokens, linear.out, device=device).to(dtype), torch.randn(tokens, linear.in_, device=device).to(dtype))
        for _ in range(rotations)
    ]
    accumulator = torch.zeros(linear.out, linear.in_, device=device)
    product = torch.empty(linear.out, linear.in_, device=device, dtype=dtype)
    position = 0

    def on_next(name: str, call: Callable[[Tensor, Tensor], object], clock: Clock, _: int) -> None:
        nonlocal position
        operands, position = pairs[position % rotations], position + 1
        clock.time(name, partial(call, *operands))

    calls: dict[str, Callable[[Tensor, Tensor], object]] = {"plain": lambda y, x: torch.mm(y.t(), x, out=product)}
    calls |= {kernel.kind.value: partial(kernel.accumulate, accumulator) for kernel in kernels}
    times = _turns(setting, [partial(on_next, *each) for each in calls.items()], limits)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    row: Row = {"linear": linear.name, "out": linear.out, "in_": linear.in_, "tokens": tokens, "flops": linear.flops(tokens)}
    return row | {"plain_matmul_ms": medians.pop("plain"), "kernels_ms": medians}


def verdicts(row: Row) -> list[Row]:
    """The goals at one length, each with the measured value."""
    split, rate = row["passes"]["split_ratio"], row["wgrad_tflops"] / row["plain_tflops"]
    held = row["passes"]["held_bytes"] / row["needed_bytes"]
    found = (
        ("(B + W) / full backward", split, f"<= {SPLIT_LIMIT}", split <= SPLIT_LIMIT),
        ("rate of W / rate of the plain matmuls", rate, f">= {RATE_LIMIT}", rate >= RATE_LIMIT),
        ("bytes held from B to W / bytes needed", held, "<= 1", held <= 1),
    )
    return [dict(zip(("what", "measured", "goal", "is_met"), each, strict=True)) for each in found]


def lines(row: Row) -> list[str]:
    """The section of the page."""
    passes, gemms, goals = [], [], []
    for at in row["lengths"]:
        p, s = at["passes"], f"{at['tokens']:,}"
        times = (p[f"{name}_ms"] for name in ("forward", "backward", "wgrad", "fused", "stock"))
        held = [f"{count / 2**20:.2f}" for count in (p["held_bytes"], at["needed_bytes"])]
        passes.append([s, *(f"{ms:.3f}" for ms in times), f"{p['split_ratio']:.3f}", *held])
        for gemm in at["gemms"]:
            rates = [_tflops(gemm["flops"], ms) for ms in (gemm["plain_matmul_ms"], *gemm["kernels_ms"].values())]
            gemms.append([s, gemm["linear"], f"[{gemm['out']}, {gemm['in_']}]", *(f"{rate:.2f}" for rate in rates)])
        for each in at["verdicts"]:
            met = "met" if each["is_met"] else "MISSED"
            goals.append(f"- s = {s}: {each['what']} {each['measured']:.3f}, goal {each['goal']}: {met}")
    full = ("B+W, ours ms", "B+W, megatron-core ms", "(B + W) / faster B+W")
    return [
        "## Passes of a layer",
        "",
        f"A stack of {NUM_LAYERS} layers of Llama-3-8B in bf16 with fp32 main gradients. Times are per layer: F, B, W, and the "
        f"full backward (B+W) through our store and as megatron-core runs it. The kernel of W is {row['kernel']}. Medians of up "
        f"to {max(at['passes']['rounds'] for at in row['lengths'])} rounds, in which all take turns.",
        "",
        *markdown_table(("s", "F ms", "B ms", "W ms", *full, "held from B to W, MiB", "needed, MiB"), passes),
        "",
        "The wgrad GEMM of each linear, dY^T X of [s, out] and [s, in], in TFLOP/s: added to fp32 by every kernel that works "
        "here, and as the plain matmul of its shape in bf16. Operands rotate, so that caches are cold.",
        "",
        *markdown_table(("s", "linear", "[out, in]", "plain matmul", *row["lengths"][0]["gemms"][0]["kernels_ms"]), gemms),
        *(["", *goals] if goals else []),
    ]


def _tflops(flops: int, elapsed_ms: float) -> float:
    return flops / elapsed_ms / 1e9
