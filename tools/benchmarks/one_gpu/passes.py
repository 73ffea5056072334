"""Step A: the passes of a layer, ours and megatron-core's, what W holds, and the rates of its GEMMs."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch

from megatron.zerobubble.wgrad.gemm import WgradKernel, choose_kernel, working_kernels
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.reports import Row, markdown_table
from tools.benchmarks.wgrad.measure import measure_gemm, measure_passes
from tools.benchmarks.wgrad.shapes import LayerShape
from tools.benchmarks.wgrad.stack import Stack, world_of_one

NUM_LAYERS = 2
TOKENS = (4096, 8192)
SPLIT_LIMIT = 1.02
"""Goal: time of B + W over that of the full backward, at most."""
RATE_LIMIT = 0.95
"""Goal: rate of W over that of the plain matmuls, at least."""


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
    device, dtype, linears = setting.device, setting.dtype, shape.linears
    rounds: dict[str, Any] = {"device": device, "dtype": dtype, "seconds": seconds / (1 + len(linears))}
    rounds |= {"repeats": 31, "warmup": 3} if setting.on_gpu else {"repeats": 2, "warmup": 1}
    with world_of_one(device) as host:
        split, stock = (Stack(shape, NUM_LAYERS, dtype, device, host, each) for each in (kernel, None))
        passes = measure_passes(shape, split, stock, count=NUM_LAYERS, **rounds)
        for stack in (split, stock):
            stack.close()
        del split, stock, stack
    _free()
    gemms = [measure_gemm(linear, shape.tokens, kernels, **rounds) for linear in linears]
    _free()
    row = {
        "tokens": shape.tokens,
        "passes": asdict(passes),
        "gemms": [asdict(gemm) for gemm in gemms],
        "wgrad_tflops": _tflops(shape.linear_flops, passes.wgrad_ms),
        "plain_tflops": _tflops(shape.linear_flops, sum(gemm.plain_matmul_ms for gemm in gemms)),
        "needed_bytes": shape.held_bytes(dtype.itemsize),
    }
    return row | {"verdicts": verdicts(row) if setting.on_gpu else []}


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


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
