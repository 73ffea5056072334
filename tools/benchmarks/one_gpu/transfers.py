"""Step B: what F, B, W and their GEMMs lose while a transfer holds SMs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.zerobubble.wgrad.gemm import choose_kernel
from tools.benchmarks.one_gpu.clock import Clock, in_turn, rounds
from tools.benchmarks.one_gpu.layer_shape import LayerShape
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.one_gpu.spinner import CudaSpinner, Spinner
from tools.benchmarks.one_gpu.stack import Stack, stacks
from tools.benchmarks.reports import Row, markdown_table

COUNTS = (0, 1, 4, 8, 16, 32)
"""CTAs of a transfer; 0 is the base."""
TOKENS, LAYERS = 4096, 2
NAMES = {"forward": "F", "backward": "B", "wgrad": "W", "forward_gemm": "fc1 in F", "wgrad_gemm": "fc1 in W"}
LEAST_ROUNDS = 3


def measure(setting: Setting, seconds: float = 25.0) -> Row:
    """Measure in rounds for about `seconds`; the rest of the step is the build of the kernel and the stack."""
    if not setting.on_gpu:
        return measure_beside(setting, Spinner(), (0,), seconds=0.0, least=1)
    return measure_beside(setting, CudaSpinner(setting.device), COUNTS, seconds=seconds)


def measure_beside(
    setting: Setting, spinner: Spinner, counts: Sequence[int], *, seconds: float, least: int = LEAST_ROUNDS
) -> Row:
    """Measure the passes beside each number of CTAs: all in every round, in changing order.

    Args:
        setting: device and size.
        spinner: holds SMs.
        counts: numbers of CTAs, 0 first.
        seconds: after them no round begins.
        least: rounds that run however long they take.
    """
    shape, device = setting.layer(TOKENS), setting.device
    clock, held = Clock(device), dict[int, list[bool]]()
    kernel = choose_kernel(device, input_dtype=setting.dtype, accumulator_dtype=torch.float32)
    with stacks(shape, LAYERS, setting, kernel) as (stack,):
        calls = _calls(stack, shape, setting)
        for _ in range(2):  # compiles, loads kernels and allocates while nothing spins
            clock.get_ahead()
            for call in calls.values():
                call()
        clock.read(skip=0)
        for number in rounds(warmup=1, seconds=seconds, least=least):
            for ctas in in_turn(counts, number):
                held.setdefault(ctas, []).append(_beside(spinner, ctas, clock, calls))
        times = clock.read(skip=1)
        about = spinner.describe()
        del stack, calls
    base = {name: statistics.median(times[f"0 {name}"]) for name in NAMES}
    per_layer = {name: base[name] / (1 if name.endswith("gemm") else LAYERS) for name in NAMES}
    rows = [_ratios(ctas, times, held[ctas][1:]) for ctas in counts[1:]]
    return {"tokens": shape.tokens, "layers": LAYERS, "rounds": len(held[0]) - 1, "cta": about, "ms": per_layer, "counts": rows}


def _calls(stack: Stack, shape: LayerShape, setting: Setting) -> dict[str, Callable[[], object]]:
    """F, B, W and the GEMMs of fc1 in F and in W, in the order in which they run."""
    fc1 = shape.linears[2]

    def operand(*size: int) -> Tensor:
        return torch.randn(size, device=setting.device).to(setting.dtype)

    whole = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    x_sbh, gradient_sbh, outputs = operand(*whole), operand(*whole), list[Tensor]()
    input_, weight, gradient = operand(shape.tokens, fc1.in_), operand(fc1.out, fc1.in_), operand(shape.tokens, fc1.out)
    output, wgrad = torch.empty_like(gradient), torch.empty_like(weight)
    return {
        "forward": lambda: outputs.append(stack.forward(x_sbh.detach().requires_grad_())),
        "backward": lambda: stack.backward(outputs.pop(), gradient_sbh, fused=False),
        "wgrad": stack.weight_gradient,
        "forward_gemm": partial(torch.mm, input_, weight.t(), out=output),
        "wgrad_gemm": partial(torch.mm, gradient.t(), input_, out=wgrad),
    }


def _beside(spinner: Spinner, ctas: int, clock: Clock, calls: Mapping[str, Callable[[], object]]) -> bool:
    """Time all calls beside spinning CTAs; returns whether these held their SMs all the time."""
    spinner.start(ctas)
    try:
        clock.get_ahead()
        for name, call in calls.items():
            clock.time(f"{ctas} {name}", call)
    finally:
        held = spinner.stop()
    return held


def _ratios(ctas: int, times: Mapping[str, Sequence[float]], held: Sequence[bool]) -> Row:
    """Times over those with no CTA in the same round, of rounds in which the SMs were held."""
    row: Row = {"ctas": ctas, "rounds": sum(held)}
    for name in NAMES:
        pairs = zip(times[f"{ctas} {name}"], times[f"0 {name}"], held, strict=True)
        ratios = [beside / alone for beside, alone, counts in pairs if counts]
        if ratios:
            row[name] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return row


def lines(row: Row) -> list[str]:
    """The section of the page."""
    cta = row["cta"]
    text = [
        "## Passes while a transfer holds SMs",
        "",
        "A spinning kernel stands in for a transfer of NCCL: each of its CTAs holds an SM from before F, B and W of "
        f"{row['layers']} layers with {row['tokens']:,} tokens until they have ended. Time over that with no CTA in the same "
        f"round: the median of {row['rounds']} rounds (least to most). Without a CTA: milliseconds per layer.",
        "",
    ]
    if cta["spins"]:
        text += [
            f"Assumed of a CTA: {cta['threads']} threads with {cta['registers']} registers, {cta['shared_bytes'] // 1024} KiB of "
            "shared memory, of which one polls a word of the device's memory.",
            "",
        ]
    else:
        text += ["No CTA spins on the CPU: a rehearsal.", ""]
    table = [["0", str(row["rounds"]), *(f"{row['ms'][name]:.3f} ms" for name in NAMES)]]
    for each in row["counts"]:
        table.append([str(each["ctas"]), str(each["rounds"]), *(_cell(each.get(name)) for name in NAMES)])
    return [*text, *markdown_table(("CTAs", "rounds", *NAMES.values()), table)]


def _cell(ratio: Row | None) -> str:
    if ratio is None:
        return "not held"
    return f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
