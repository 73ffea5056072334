"""A model of a GPU's SMs and of the host's clock beside the simulator: what transfers take from the passes. Not run on a GPU.

The simulator's sends and receives take nothing from a pass. On a GPU each is a kernel of NCCL whose CTAs hold streaming
multiprocessors (SMs) from its start to its end, also while it waits for the other rank's. Here a rank is

  132 SMs     a block of a kernel takes one; a GEMM's blocks are its tiles of 128 x 256, which run in waves
  a stream    kernels one after the other; a receive starts when the kernels launched before it have ended, a send likewise
  links       first in, first out; a transfer begins when both ends have all of their CTAs at once, and moves bytes at a rate
              per CTA up to that of the link. Its CTAs come before waiting blocks (a stream of high priority)
  a host      launches kernels at a constant rate, at most 1,024 ahead of the device. Their number per layer and pass is counted
              (megatron-core's local layers, not fused)

and the program is the one that runs: the plan, and its receives where `place_communication` posts them. It is not part of any
objective of the planner. What it is used for: the defaults of `--zero-bubble-p2p-max-ctas` and of the margins in
`examples/gpu_environment.sh`.

  python -m tools.benchmarks.gpu_model --json docs/benchmarks/data/gpu_model.json --markdown docs/benchmarks/gpu_model.md
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import DeadlockError
from megatron.zerobubble.plan.communication import Message, Program, place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.registry import build_plan
from tools.benchmarks.reports import ROOT, Row, markdown_table, run_report, with_tables
from tools.benchmarks.wgrad.shapes import LayerShape, shape_named

FORMAT = "zerobubble-gpu-model-benchmark/1"
PAGE = ROOT / "docs" / "benchmarks" / "gpu_model.md"
CONTENDERS = (("1f1b", None), ("interleaved-1f1b", 4), ("zb-h1", None), ("zbv", None))
LAUNCHES = {OpKind.F: 37, OpKind.B: 37, OpKind.W: 4, OpKind.BW: 41}
"""Kernels per layer of Llama-3-8B, counted on FakeTensors of a CUDA device (`docs/benchmarks/fake_tensors.md`, first row):
megatron-core's local layers, torch's attention."""
PEAK_TFLOPS, HBM_TB = 989.0, 3.35
"""Of an H100 (SXM), as NVIDIA publishes them."""


class Kernel(NamedTuple):
    """Blocks of equal length, one per SM."""

    blocks: int
    us: float
    is_cooperative: bool = False
    """Starts only when all of its blocks can."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What is assumed of a GPU, its links and its host."""

    sms: int = 132
    ctas: int = 16
    """That a transfer holds at each end; 0: none, as in the simulator, and its time is that of 16."""
    cta_gb: float = 20.0
    """GB/s that one CTA moves."""
    link_gb: float = 350.0
    has_priority: bool = True
    gemm_margin: int | None = None
    """SMs that persistent GEMMs leave free; None: one block per tile."""
    norm_margin: int = 0
    is_norm_cooperative: bool = False
    """Of norms over more than one block per row: Transformer Engine's of sizes that are not tuned."""
    launch_us: float = 0.0
    queue: int = 1024

    def transfer_us(self, num_bytes: float) -> float:
        """Time of a transfer whose two ends are there."""
        return num_bytes / (1e3 * min(self.link_gb, self.cta_gb * (self.ctas or 16)))

    def gemm(self, rows: int, columns: int, depth: int) -> Kernel:
        """A GEMM in tiles of 128 x 256, at 75 % of the peak."""
        tiles, us = math.ceil(rows / 128) * math.ceil(columns / 256), 65536 * depth * self.sms / (0.75e6 * PEAK_TFLOPS)
        if self.gemm_margin is None:
            return Kernel(tiles, us)
        blocks = min(tiles, self.sms - self.gemm_margin)
        return Kernel(blocks, us * math.ceil(tiles / blocks))

    def attention(self, shape: LayerShape, factor: float) -> Kernel:
        """Causal flash attention at 50 % of the peak: blocks of 128 queries of one head."""
        blocks = shape.num_attention_heads * math.ceil(shape.seq_length / 128)
        return Kernel(blocks, factor * shape.attention_flops / 2 / blocks * self.sms / (0.5e6 * PEAK_TFLOPS))

    def norm(self, shape: LayerShape, passes: int) -> Kernel:
        """A norm that moves `passes` hidden states, on as many blocks as there are SMs without the margin."""
        blocks = self.sms - self.norm_margin
        us = 2 * passes * shape.tokens * shape.hidden_size / (HBM_TB * 1e6) * self.sms / blocks
        return Kernel(blocks, us, self.is_norm_cooperative)

    def layer(self, shape: LayerShape, kind: OpKind) -> list[Kernel]:
        """The kernels of one layer's pass; what is fused into them or as short as a launch is left out."""
        qkv, proj, fc1, fc2 = shape.linears
        t = shape.tokens
        if kind is OpKind.F:
            first, *rest = (self.gemm(t, each.out, each.in_) for each in (qkv, proj, fc1, fc2))
            norm = self.norm(shape, 2)
            return [norm, first, self.attention(shape, 1.0), rest[0], norm, *rest[1:]]
        wgrads = [self.gemm(each.out, each.in_, t) for each in (fc2, fc1, proj, qkv)]
        if kind is OpKind.W:
            return wgrads
        dgrads = [self.gemm(t, each.in_, each.out) for each in (fc2, fc1, proj, qkv)]
        norm = self.norm(shape, 3)
        found = [*dgrads[:2], norm, dgrads[2], self.attention(shape, 2.5), dgrads[3], norm]
        return found if kind is OpKind.B else found + wgrads


class Item(NamedTuple):
    """What a host launches: a kernel with the message that it waits for, or one end of a transfer."""

    launches: float
    kernel: Kernel | None = None
    message: Message | None = None


@dataclass
class Rank:
    """One GPU and its host, at the time of the event that is looked at."""

    items: list[Item]
    free: int
    place: int = 0
    """The next item of the compute stream."""
    left: int | None = None
    """Blocks of its kernel that have not started; None: the kernel has not."""
    running: int = 0
    launched: list[float] = field(default_factory=list)
    """When the host has launched each item."""
    host_us: float = 0.0
    ahead: float = 0.0
    ends: dict[tuple[int, int], deque[Message]] = field(default_factory=dict)
    """Per link the transfers that this rank has started, in order."""
    resident: set[Message] = field(default_factory=set)
    last_us: float = 0.0


class Model:
    """Runs a program on GPUs, event by event."""

    def __init__(self, program: Program, gpu: Gpu, shape: LayerShape, num_layers: int) -> None:
        self.gpu, self.transfer_us = gpu, gpu.transfer_us(2 * shape.tokens * shape.hidden_size)
        self.events: list[tuple[float, int, int, Message | int]] = []
        self.arrived: set[Message] = set()
        self.count = 0
        passes = {kind: gpu.layer(shape, kind) * num_layers for kind in OpKind}
        self.ranks = []
        for steps in program.steps:
            items = []
            for step in steps:
                kernels = passes[step.op.kind]
                each = LAUNCHES[step.op.kind] * num_layers / len(kernels)
                items += [Item(1.0, message=message) for message in step.post]
                items += [Item(each, kernel, None if place else step.take) for place, kernel in enumerate(kernels)]
                items += [Item(1.0, message=step.send)] if step.send else []
            self.ranks.append(Rank(items, gpu.sms))

    def run(self) -> float:
        """The makespan in milliseconds. Raises DeadlockError if the ranks wait for each other forever."""
        for number in range(len(self.ranks)):
            self.advance(number, 0.0)
        while self.events:
            now, _, number, what = heapq.heappop(self.events)
            rank = self.ranks[number]
            if isinstance(what, Message):
                self.arrived.add(what)
                for end in (what.source, what.target):
                    other = self.ranks[end]
                    other.ends[what.source, what.target].popleft()
                    other.resident.remove(what)
                    other.free += self.gpu.ctas
                    self.advance(end, now)
            else:
                rank.free += what
                rank.running -= what
                self.advance(number, now)
        if any(rank.place < len(rank.items) for rank in self.ranks):
            raise DeadlockError("the ranks of the model wait for each other forever")
        return max(rank.last_us for rank in self.ranks) / 1e3

    def at(self, us: float, rank: int, what: Message | int) -> None:
        """Look at a rank at this time: a message has arrived, or blocks have ended (0: something was launched)."""
        self.count += 1
        heapq.heappush(self.events, (us, self.count, rank, what))

    def advance(self, number: int, now: float) -> None:
        """Start what can start on a rank."""
        rank = self.ranks[number]
        while True:
            self.launch(rank, number, now)
            if rank.place == len(rank.items) or len(rank.launched) <= rank.place or rank.launched[rank.place] > now:
                break
            item = rank.items[rank.place]
            if item.kernel is None:
                assert item.message is not None
                rank.ends.setdefault((item.message.source, item.message.target), deque()).append(item.message)
            elif rank.left is None:
                if item.message is not None and item.message not in self.arrived:
                    break
                rank.left = item.kernel.blocks
                break
            elif rank.left or rank.running:
                break
            else:
                rank.left, rank.last_us = None, now
            rank.place, rank.ahead = rank.place + 1, rank.ahead - item.launches
        for part in (self.transfers, self.blocks) if self.gpu.has_priority else (self.blocks, self.transfers):
            if not part(rank, number, now):
                break

    def launch(self, rank: Rank, number: int, now: float) -> None:
        """Launch kernels of a rank until its launch queue is full."""
        while len(rank.launched) < len(rank.items) and rank.ahead < self.gpu.queue:
            item = rank.items[len(rank.launched)]
            rank.host_us = max(rank.host_us, now) + self.gpu.launch_us * item.launches
            rank.launched.append(rank.host_us)
            rank.ahead += item.launches
            if rank.host_us > now:
                self.at(rank.host_us, number, 0)

    def transfers(self, rank: Rank, number: int, now: float) -> bool:
        """Start ends of transfers; False: one waits for SMs, which are kept for it."""
        for queue in rank.ends.values():
            if queue and queue[0] not in rank.resident:
                if rank.free < self.gpu.ctas:
                    return False
                message = queue[0]
                rank.free -= self.gpu.ctas
                rank.resident.add(message)
                if message in self.ranks[message.source].resident and message in self.ranks[message.target].resident:
                    self.at(now + self.transfer_us, number, message)
        return True

    def blocks(self, rank: Rank, number: int, now: float) -> bool:
        """Start blocks of the kernel whose turn it is; False: some wait for SMs."""
        if not rank.left:
            return True
        kernel = rank.items[rank.place].kernel
        assert kernel is not None
        count = min(rank.free, rank.left)
        if count and (count == rank.left or not kernel.is_cooperative):
            rank.left, rank.free, rank.running = rank.left - count, rank.free - count, rank.running + count
            self.at(now + kernel.us, number, count)
        return not rank.left


class Case(NamedTuple):
    """One point of a sweep."""

    sweep: str
    label: str
    gpu: Gpu
    lookahead: int | None = None
    """See `place_communication`."""
    seq_length: int = 4096


CHOSEN = Gpu(ctas=4, norm_margin=16)
CASES = (
    *(Case("CTAs of a transfer", str(each), Gpu(ctas=each)) for each in (1, 2, 4, 8, 16, 32)),
    *(Case("CTAs, 10 GB/s each", str(each), Gpu(ctas=each, cta_gb=10.0)) for each in (1, 2, 4, 8, 16)),
    *(Case("4 CTAs, margin of norms", str(each), Gpu(ctas=4, norm_margin=each)) for each in (0, 4, 8, 16, 32)),
    *(
        Case("4 CTAs, margin of cooperative norms", str(each), Gpu(ctas=4, norm_margin=each, is_norm_cooperative=True))
        for each in (0, 4, 8, 16, 32)
    ),
    *(Case("margin of persistent GEMMs", str(each), replace(CHOSEN, gemm_margin=each)) for each in (0, 4, 8, 16)),
    Case("margin of persistent GEMMs", "not persistent", CHOSEN),
    *(Case("streams without priority, CTAs", str(each), Gpu(ctas=each, has_priority=False)) for each in (4, 16)),
    Case("receives are posted", "on the timeline", CHOSEN),
    *(
        Case("receives are posted", "at their use" if each == 0 else f"{each} op{'s' * (each > 1)} before it", CHOSEN, each)
        for each in (0, 1, 2, 8)
    ),
    *(Case("us per launch, 4,096 tokens", str(each), replace(CHOSEN, launch_us=each)) for each in (5, 10, 20, 40, 60)),
    *(Case("us per launch, 512 tokens", str(each), replace(CHOSEN, launch_us=each), None, 512) for each in (5, 10, 20)),
)


def pass_ms(gpu: Gpu, shape: LayerShape, kind: OpKind) -> float:
    """A layer's pass when no transfer holds an SM."""
    return math.fsum(kernel.us * math.ceil(kernel.blocks / gpu.sms) for kernel in gpu.layer(shape, kind)) / 1e3


def programs(num_layers: int, lookahead: int | None, shape: LayerShape) -> dict[str, tuple[Program, int]]:
    """Per contender its program and the layers of a stage."""
    free, found = Gpu(ctas=0), {}
    kinds = {"forward_ms": OpKind.F, "backward_ms": OpKind.B, "wgrad_ms": OpKind.W}
    times = {name: num_layers * pass_ms(free, shape, kind) for name, kind in kinds.items()}
    for name, chunks in CONTENDERS:
        plan = build_plan(name, num_ranks=8, num_microbatches=24, num_chunks=chunks)
        comm = free.transfer_us(2 * shape.tokens * shape.hidden_size) / 1e3
        costs = CostModel.uniform(plan.placement, **times, comm_ms=comm)
        program = place_communication(plan, costs=costs, lookahead=lookahead)
        found[name] = program, num_layers // plan.placement.num_chunks
    return found


def measure(args: argparse.Namespace) -> Row:
    """Run every case: milliseconds, and those of the same passes if transfers held no SM."""
    shape, rows = shape_named("Llama-3-8B"), []
    for case in track(CASES, "cases"):
        own = replace(shape, seq_length=case.seq_length)
        row: Row = {"sweep": case.sweep, "label": case.label, "gpu": asdict(case.gpu), "ms": {}, "free_ms": {}}
        for name, (program, layers) in programs(4, case.lookahead, own).items():
            row["ms"][name] = round(Model(program, case.gpu, own, layers).run(), 3)
        for name, (program, layers) in programs(4, None, own).items():
            row["free_ms"][name] = round(Model(program, Gpu(ctas=0), own, layers).run(), 3)
        rows.append(row)
    return {"rows": rows}


def markdown(report: Row) -> str:
    """The page with the table of the report."""
    lines, names = [], [name for name, _ in CONTENDERS]
    for row in report["rows"]:
        costs = [f"{100 * (row['ms'][name] / row['free_ms'][name] - 1):+.1f}" for name in names]
        lead = f"{row['ms']['interleaved-1f1b'] / row['ms']['zbv']:.3f}"
        lines.append([row["sweep"], row["label"], *costs, lead])
    heads = ("what", "value", *(f"{name}, %" for name in names), "ZBV over interleaved")
    return with_tables(PAGE, [markdown_table(heads, lines)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.gpu_model", description=__doc__, formatter_class=raw)
    return run_report(parser, argv, FORMAT, measure, markdown)


if __name__ == "__main__":
    raise SystemExit(main())
