"""Step K: the kernels that F, B and W of a layer spend their time in, whole and in slices, by torch's profiler.

It is the last step on the device: what the profiler leaves attached would slow the host in the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.zerobubble.wgrad.gemm import choose_kernel
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.one_gpu.slices import SlicedLayer
from tools.benchmarks.reports import Row, markdown_table
from tools.benchmarks.wgrad.measure import Clock
from tools.benchmarks.wgrad.stack import Stack, world_of_one

CASES = ((4096, 1), (32768, 1), (32768, 4))
"""(tokens, slices)."""
_MOST, _LONGEST_NAME = 12, 60


class _Profiled(Clock):
    """Profiles each kind of pass instead of timing it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.found: dict[str, dict[str, list[float]]] = {}

    def time(self, name: str, call: Callable[[], object]) -> None:
        """Run `call`, and add the kernels' milliseconds and numbers to those of the pass."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        kernels = self.found.setdefault(name.split()[0], {})
        for event in profiler.key_averages():
            if event.device_type == torch.autograd.DeviceType.CUDA:  # type: ignore[attr-defined]
                taken = kernels.setdefault(event.key, [0.0, 0])
                taken[0] += event.self_device_time_total / 1e3
                taken[1] += event.count


def measure(setting: Setting) -> Row:
    """The longest kernels of each pass; none on the CPU."""
    rows = [_case(setting, *case) for case in CASES] if setting.on_gpu else []
    return {"rows": rows}


def _case(setting: Setting, tokens: int, num_slices: int) -> Row:
    shape, device = setting.layer(tokens), setting.device
    with world_of_one(device) as host:
        kernel = choose_kernel(device, input_dtype=setting.dtype, accumulator_dtype=torch.float32)
        stack = Stack(shape, 1, setting.dtype, device, host, kernel)
        layer = SlicedLayer(shape, stack)
        x_sbh, gradient_sbh = (
            torch.randn(shape.seq_length, 1, shape.hidden_size, device=device).to(setting.dtype) for _ in range(2)
        )
        parts = layer.parts(num_slices)
        layer.run(Clock(device), x_sbh, gradient_sbh, parts)  # compiles
        clock = _Profiled(device)
        layer.run(clock, x_sbh, gradient_sbh, parts)
        stack.close()
    passes = {
        name: [[kernel[:_LONGEST_NAME], round(ms, 4), int(count)] for kernel, (ms, count) in _longest(kernels)]
        for name, kernels in clock.found.items()
    }
    return {"tokens": shape.seq_length, "slices": num_slices, "passes": passes}


def _longest(kernels: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
    return sorted(kernels.items(), key=lambda item: -item[1][0])[:_MOST]


def lines(row: Row) -> list[str]:
    """The section of the page."""
    table = [
        [f"{case['tokens']:,}", str(case["slices"]), name, f"`{kernel}`", str(count), f"{ms:.3f}"]
        for case in row["rows"]
        for name, kernels in case["passes"].items()
        for kernel, ms, count in kernels[:5]
    ]
    return [
        "## Kernels",
        "",
        "The five kernels of a layer's F, B and W that take longest, by torch's profiler, with how often they run in one "
        "microbatch.",
        "",
        *markdown_table(("s", "slices", "pass", "kernel", "number", "ms"), table),
    ]
