"""Step C: the host's time to issue F, B and W against the device's time to run them, and both with CUDA graphs.

The graphs are captured by a process of their own (`python -m tools.benchmarks.one_gpu.host`): a capture that fails may leave its
CUDA context unusable.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.profiling.marks import Marks
from megatron.zerobubble.wgrad.gemm import choose_kernel
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.reports import Row, markdown_table
from tools.benchmarks.wgrad.measure import Clock
from tools.benchmarks.wgrad.shapes import LayerShape
from tools.benchmarks.wgrad.stack import Stack, world_of_one

COUNTS = (128, 256, 512, 1024, 2048, 4096)
"""Tokens of a microbatch."""
TENSOR_PARALLEL = 8
NAMES = {"forward": "F", "backward": "B", "wgrad": "W"}
LEAST_ROUNDS, MOST_ROUNDS, WARMUP = 3, 50, 2
GRAPH_ROUNDS, IN_A_ROW = 5, 10
PLANNED = build_plan("zb-h1", num_ranks=3, num_microbatches=4).ops[-1]
"""Of the last rank, whose Ws wait for up to two later Bs."""
GRAPH_LIMIT_S = 40.0
"""Seconds after which the process that captures graphs is ended; 5 s before, it begins no other case."""


class Passes:
    """F, B and W of a layer as torch issues them, op by op.

    Args:
        stack: of one layer.
        rotary: its rotary positions, for the longest sequence.
        x_sbh: input.
        gradient_sbh: gradient of the output.
    """

    def __init__(self, stack: Stack, rotary: Tensor, x_sbh: Tensor, gradient_sbh: Tensor) -> None:
        self._stack, self._rotary, self._x_sbh, self._gradient_sbh = stack, rotary, x_sbh, gradient_sbh
        self._outputs: dict[int, Tensor] = {}

    def forward(self, microbatch: int = 0) -> None:
        """F."""
        self._stack.chunk.module.rotary = self._rotary[: len(self._x_sbh)]
        x_sbh = self._x_sbh.roll(microbatch, 0) if microbatch else self._x_sbh
        self._outputs[microbatch] = self._stack.forward(x_sbh.detach().requires_grad_())

    def backward(self, microbatch: int = 0) -> None:
        """B."""
        self._stack.backward(self._outputs.pop(microbatch), self._gradient_sbh, fused=False, microbatch=microbatch)

    def wgrad(self, microbatch: int = 0) -> None:
        """W."""
        self._stack.weight_gradient(microbatch)

    @property
    def calls(self) -> list[Callable[[], None]]:
        """F, B and W."""
        return [self.forward, self.backward, self.wgrad]

    @property
    def planned(self) -> list[Callable[[], None]]:
        """The ops of a rank that leaves Ws for later, in the order of its plan."""
        call = {OpKind.F: self.forward, OpKind.B: self.backward, OpKind.W: self.wgrad}
        return [partial(call[op.kind], op.microbatch) for op in PLANNED]

    def gradients(self, calls: Sequence[Callable[[], None]]) -> Tensor:
        """All main gradients after these calls, in one tensor."""
        self._stack.chunk.zero_grad_buffer()
        for call in calls:
            call()
        return torch.cat([buffer.grad_data.flatten() for buffer in self._stack.chunk.buffers])


class HostClock:
    """Measures calls on the host's clock, and on the device's while the host is ahead.

    Args:
        device: the device on which the calls run.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock, self._marks = Clock(device), Marks(device)
        self._host: dict[str, list[float]] = {}
        self.late = 0
        """Rounds in which the device began before all was issued."""

    def round(self, case: str, calls: Sequence[Callable[[], None]]) -> None:
        """Issue F, B and W behind a pause of the stream, and record their times."""
        self._marks.synchronize()
        self._clock.get_ahead()
        paused = self._marks.now()
        for name, call in zip(NAMES, calls, strict=True):
            self._clock.time(f"{case} {name}", partial(self._issue, f"{case} {name}", call))
        self.late += self._marks.on_cuda and paused.query()

    def _issue(self, name: str, call: Callable[[], None]) -> None:
        begin = time.perf_counter()
        call()
        self._host.setdefault(name, []).append(1e3 * (time.perf_counter() - begin))

    def read(self, *, skip: int) -> dict[str, Row]:
        """Medians by case, in milliseconds, without the first `skip` rounds; on the CPU the device has none of its own."""
        found: dict[str, Row] = {}
        for key, device_ms in self._clock.read(skip=skip).items():
            case, _, name = key.rpartition(" ")
            row: Row = {"host_ms": statistics.median(self._host[key][skip:])}
            row["device_ms"] = statistics.median(device_ms) if self._marks.on_cuda else None
            found.setdefault(case, {"rounds": len(device_ms)})[name] = row
        return found


def shapes(setting: Setting) -> list[LayerShape]:
    """A layer, and a tensor-parallel rank's shard of it."""
    whole = setting.layer(COUNTS[-1])
    heads, groups, ffn = whole.num_attention_heads, whole.num_query_groups, whole.ffn_hidden_size
    shard = replace(
        whole,
        name=f"{whole.name}, TP {TENSOR_PARALLEL}",
        num_attention_heads=max(1, heads // TENSOR_PARALLEL),
        num_query_groups=max(1, groups // TENSOR_PARALLEL),
        ffn_hidden_size=ffn // TENSOR_PARALLEL,
        kv_channels=whole.head_size,
    )
    return [whole, shard]


def measure(setting: Setting, seconds: float = 8.0) -> Row:
    """Measure the passes for about `seconds`, then the graphs for `GRAPH_LIMIT_S` at most."""
    rows = []
    with world_of_one(setting.device) as host:
        for shape in shapes(setting):
            rows += layer_times(setting, shape, host, seconds / 2 if setting.on_gpu else 0.0)
            _free(setting)
    return {"passes": rows, "graphs": graphs_of_a_process(setting)}


def layer_times(setting: Setting, shape: LayerShape, host: HostDevice, seconds: float) -> list[Row]:
    """Host and device time of F, B and W for each number of tokens: all in every round, in changing order."""
    stack, passes = _build(setting, shape, host)
    clocks = {tokens: HostClock(setting.device) for tokens in COUNTS}
    warmup, least = (WARMUP, LEAST_ROUNDS) if setting.on_gpu else (0, 1)
    end, number = time.monotonic() + seconds, 0
    while number < warmup + least or (number < warmup + MOST_ROUNDS and time.monotonic() < end):
        for index in range(len(COUNTS)):
            tokens = COUNTS[(index + number) % len(COUNTS)]
            clocks[tokens].round("eager", passes[tokens].calls)
        number += 1
        if number == warmup:  # it has compiled
            end = time.monotonic() + seconds
            for clock in clocks.values():
                clock.late = 0
    rows = []
    for tokens, clock in clocks.items():
        rows.append({"layer": shape.name, "tokens": tokens, "late": clock.late} | clock.read(skip=warmup)["eager"])
    stack.close()
    return rows


def _build(setting: Setting, shape: LayerShape, host: HostDevice) -> tuple[Stack, dict[int, Passes]]:
    """One layer, and its passes for each number of tokens."""
    kernel = choose_kernel(setting.device, input_dtype=setting.dtype, accumulator_dtype=torch.float32)
    stack, passes = Stack(shape, 1, setting.dtype, setting.device, host, kernel), {}
    rotary = stack.chunk.module.rotary
    for tokens in COUNTS:
        size = setting.layer(tokens).tokens, 1, shape.hidden_size
        x_sbh, gradient_sbh = (torch.randn(size, device=setting.device).to(setting.dtype) for _ in range(2))
        passes[tokens] = Passes(stack, rotary, x_sbh, gradient_sbh)
    return stack, passes


def _free(setting: Setting) -> None:
    gc.collect()
    if setting.on_gpu:
        torch.cuda.empty_cache()


def graphs_of_a_process(setting: Setting) -> Row:
    """Measure the passes as CUDA graphs in another process: what it measured, and why there is no more."""
    if not setting.on_gpu:
        return {"rows": [], "graph": "needs a GPU"}
    with tempfile.TemporaryDirectory() as folder:
        file, errors = Path(folder, "rows"), Path(folder, "errors")
        file.touch()
        until = str(time.time() + GRAPH_LIMIT_S - 5)
        command = [sys.executable, "-m", __spec__.name, str(file), "--scale", str(setting.scale), "--until", until]
        reason = None
        with errors.open("w") as stderr:
            try:
                done = subprocess.run(command, stdout=stderr, stderr=stderr, timeout=GRAPH_LIMIT_S, check=False)
                if done.returncode:
                    reason = (
                        errors.read_text(errors="replace").strip().rpartition("\n")[2][:300] or f"exit code {done.returncode}"
                    )
            except subprocess.TimeoutExpired:
                reason = f"ended after {GRAPH_LIMIT_S:g} s"
        return {"rows": [json.loads(line) for line in file.read_text().splitlines()], "graph": reason}


def graph_rows(setting: Setting, until: float) -> Iterator[Row]:
    """Rows of each layer and number of tokens; none begins after `until`, nor after a capture that failed."""
    with world_of_one(setting.device) as host:
        # All on the stream of the captures. A gradient is accumulated on the stream on which its parameter was wrapped, and a
        # capture must not reach another one.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            built = [(shape.name, *_build(setting, shape, host)) for shape in shapes(setting)]
            for tokens, (name, _, passes) in itertools.product(COUNTS, built):
                late = time.time() > until
                found: Row = {"graph": "no time was left"} if late else _graph_row(setting, passes[tokens], stream)
                yield {"layer": name, "tokens": tokens} | found
                if found["graph"] is not None:
                    return
                _free(setting)
            for _, stack, _ in built:
                stack.close()


def _graph_row(setting: Setting, passes: Passes, stream: torch.cuda.Stream) -> Row:
    """Capture F, B and W in this order, into one pool of memory, compare and measure."""
    for _ in range(3):
        expected = passes.gradients(passes.calls)
    try:
        replays = _captured(zip(NAMES.values(), passes.calls, strict=True), stream)
        relative = _relative(passes.gradients(replays), expected)
        expected = passes.gradients(passes.planned)
        planned = _relative(passes.gradients(_captured(zip(map(str, PLANNED), passes.planned, strict=True), stream)), expected)
    except _CaptureError as error:
        return {"graph": str(error)}
    del expected
    clock, marks, in_a_row = HostClock(setting.device), Marks(setting.device), dict[str, list[float]]()
    cases = [("eager", passes.calls), ("replay", replays)]
    for number in range(1 + GRAPH_ROUNDS):
        for case, calls in cases if number % 2 else cases[::-1]:
            clock.round(case, calls)
            marks.synchronize()
            begin = marks.now()
            for call in calls * IN_A_ROW:
                call()
            end = marks.now()
            marks.synchronize()
            in_a_row.setdefault(case, []).append(marks.elapsed_ms(begin, end) / IN_A_ROW)
    row: Row = clock.read(skip=1)
    for case, taken in in_a_row.items():
        row[case]["in_a_row_ms"] = statistics.median(taken[1:])
    return row | {"graph": None, "gradient": relative, "planned": planned, "late": clock.late}


class _CaptureError(Exception):
    """A pass cannot be captured."""


def _captured(calls: Iterable[tuple[str, Callable[[], None]]], stream: torch.cuda.Stream) -> list[Callable[[], None]]:
    """Capture passes in their order, into one pool of memory.

    Raises:
        _CaptureError: names the pass.
    """
    graphs, pool = [], torch.cuda.graph_pool_handle()
    for name, call in calls:
        graphs.append(torch.cuda.CUDAGraph())
        try:
            # Backward runs in a thread of its own, and another may query events: only this thread's calls are restricted.
            with torch.cuda.graph(graphs[-1], pool=pool, stream=stream, capture_error_mode="thread_local"):
                call()
        except RuntimeError as error:
            first = error.__context__ or error  # the end of a capture that was invalidated raises, too
            raise _CaptureError(f"capture of {name}: {' '.join(str(first).split())[:300]}") from error
    return [graph.replay for graph in graphs]


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def lines(row: Row) -> list[str]:
    """The section of the page."""
    table = []
    for each in row["passes"]:
        cells = [f"{_ms(each[name]['host_ms'])} / {_ms(each[name]['device_ms'])}" for name in NAMES]
        table.append([each["layer"], f"{each['tokens']:,}", *cells, _ratio(each), _rounds(each)])
    text = [
        "## Host time against device time",
        "",
        "F, B and W of one layer: milliseconds in which the host issues the pass, while a pause holds the device, over those in "
        "which the device then runs it; medians (late: rounds whose pause was too short). A pass starves the device where the "
        f"host takes longer. TP {TENSOR_PARALLEL}: one rank's shard, without its collectives.",
        "",
        *markdown_table(("layer", "tokens", "F, host / device", "B", "W", "host over device, F + B + W", "rounds"), table),
        "",
        "The same passes as three CUDA graphs that share a pool, captured and replayed as F, B, W, against eager ones: sums of "
        f"F, B and W. *In a row*: {IN_A_ROW} times without a pause, so that the slower of host and device sets the pace. "
        "*Gradient*: norm of the main gradients' difference over their norm. *Planned*: the same after four microbatches whose "
        "passes were captured and replayed in the order of a rank of ZB-H1, with Ws behind later Bs.",
        "",
    ]
    graphs, table = row["graphs"], []
    for each in sorted(graphs["rows"], key=lambda each: str(each["layer"])):
        if each["graph"] is None:
            cells = []
            for case in ("eager", "replay"):
                sums = [_ms(sum(each[case][name][clock] for name in NAMES)) for clock in ("host_ms", "device_ms")]
                cells += [" / ".join(sums), _ms(each[case]["in_a_row_ms"])]
            cells += [f"{each[name]:.1e}" if name in each else "not run" for name in ("gradient", "planned")]
        else:
            cells = [each["graph"], "", "", "", "", ""]
        table.append([each["layer"], f"{each['tokens']:,}", *cells])
    if table:
        heads = ("eager, host / device", "in a row", "replay, host / device", "in a row", "gradient", "planned")
        text += markdown_table(("layer", "tokens", *heads), table)
    if graphs["graph"]:
        text += [""] * bool(table) + [f"No more graphs: {graphs['graph']}."]
    return text


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ratio(row: Row) -> str:
    host, device = ([row[name][clock] for name in NAMES] for clock in ("host_ms", "device_ms"))
    return "-" if None in device else f"{sum(host) / sum(device):.2f}"


def _rounds(row: Row) -> str:
    return f"{row['rounds']}, {row['late']} late" if row["late"] else str(row["rounds"])


def main(argv: Sequence[str] | None = None) -> int:
    """Write a line of JSON per row of `graph_rows`."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.one_gpu.host", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--until", type=float, required=True, help="Unix time")
    args = parser.parse_args(argv)
    for row in graph_rows(Setting(device=torch.device("cuda", 0), scale=args.scale), args.until):
        with args.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
