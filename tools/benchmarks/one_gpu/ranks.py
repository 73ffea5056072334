"""Step D: the programs of some ranks of a pipeline, each run alone on the device.

Per op its device time, between two events on the stream; per rank the whole iteration, memory beside the plan's, the host's time
to issue an op with and without the watchdog's watch, and the optimizer step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.plan.simulate import memory_after_ops
from megatron.zerobubble.plan.timeline import Activity, RankTimeline
from megatron.zerobubble.profiling.marks import Marks
from megatron.zerobubble.profiling.profile import combine, unit_bytes
from megatron.zerobubble.profiling.profiler import Profiler
from tools.benchmarks.one_gpu.alone import VOCABULARY, Alone, alone
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.reports import Row, markdown_table

__all__ = ["CONTENDERS", "Contender", "flags", "lines", "measure"]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A schedule."""

    name: str
    schedule: str
    """Its flag; `stock` is megatron-core's own function."""
    chunks: int = 1
    sync: bool = False
    """Whether megatron-core waits for the whole device behind each exchange."""

    @property
    def is_stock(self) -> bool:
        """Whether megatron-core's own function runs it."""
        return self.schedule == "stock"

    @property
    def plan_name(self) -> str:
        """The generator of the same order of ops."""
        if not self.is_stock:
            return self.schedule
        return "1f1b" if self.chunks == 1 else "interleaved-1f1b"


CONTENDERS = (
    Contender(name="1F1B, with its wait", schedule="stock", sync=True),
    Contender(name="1F1B", schedule="stock"),
    Contender(name="interleaved 1F1B, v = 2", schedule="stock", chunks=2),
    Contender(name="interleaved 1F1B, v = 4", schedule="stock", chunks=4),
    Contender(name="ZB-H1", schedule="zb-h1"),
    Contender(name="ZB-H2", schedule="zb-h2"),
    Contender(name="ZBV", schedule="zbv", chunks=2),
    Contender(name="V-Half", schedule="v-half", chunks=2),
    Contender(name="V-Min", schedule="v-min", chunks=2),
)
_TIMED = (3, 4)
"""Iterations that are timed, after one that allocates and one that measures memory. The last has the watchdog's watch."""
_LAYERS_PER_RANK = 4


def flags(contender: Contender, setting: Setting, num_ranks: int, num_microbatches: int) -> list[str]:
    """Of the reference trainer."""
    layer = setting.layer(4096)
    words = (
        f"--bf16 --num-layers {_LAYERS_PER_RANK * num_ranks} --hidden-size {layer.hidden_size} "
        f"--num-attention-heads {layer.num_attention_heads} --ffn-hidden-size {layer.ffn_hidden_size} --group-query-attention "
        f"--num-query-groups {layer.num_query_groups} --seq-length {layer.seq_length} --swiglu --normalization RMSNorm "
        "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
        f"--attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --eval-iters 0 "
        f"--micro-batch-size 1 --global-batch-size {num_microbatches} --train-iters 10 --lr 1e-30 --init-by-rank "
        f"--pipeline-model-parallel-size {num_ranks} --zero-bubble-schedule {contender.schedule}"
    ).split()
    if contender.is_stock and contender.chunks > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", str(contender.chunks)]
    return words


class _HostClock:
    """The host's times between the beginnings of two ops, as the recorder sees them."""

    def __init__(self, recorder: Any) -> None:
        start, self.begun = recorder.start, list[tuple[Op, float]]()

        def started(op: Op) -> None:
            self.begun.append((op, time.perf_counter()))
            start(op)

        recorder.start = started

    def least_ms(self) -> dict[str, float]:
        """Kind of op -> the least time from its beginning to that of the next op: where the device is behind, the host waits."""
        taken: dict[str, float] = {}
        for (op, begin), (_, end) in zip(self.begun, self.begun[1:], strict=False):
            taken[op.kind.name] = min(taken.get(op.kind.name, 1e9), 1e3 * (end - begin))
        self.begun.clear()
        return taken


def run(contender: Contender, rank: int, setting: Setting, host: HostDevice, num_ranks: int, num_microbatches: int) -> Row:
    """Run one rank of a contender; returns its times in milliseconds and its memory in bytes."""
    on_gpu = setting.on_gpu
    with alone(rank, num_ranks, setting.device):
        words = flags(contender, setting, num_ranks, num_microbatches)
        job = Alone(words, rank=rank, num_ranks=num_ranks, host=host, sync=contender.sync)
        schedule = job.schedule
        schedule.recordings.choose(_TIMED, done=0)
        schedule.recordings.only_chosen = True
        state = torch.cuda.memory_allocated() if on_gpu else 0
        job.iterate()
        row: Row = {"contender": contender.name, "rank": rank, "state_bytes": torch.cuda.memory_allocated() if on_gpu else state}
        if contender.is_stock:
            job.iterate()
        else:
            row |= _memory(job, rank, num_ranks, num_microbatches)
        clock = _HostClock(schedule.recorder)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        row["iterations"] = []
        for number in _TIMED:
            schedule.hooks.watch = None if number == _TIMED[0] else job.watch
            begin = time.perf_counter()
            job.iterate()
            issued_ms = 1e3 * (time.perf_counter() - begin)
            row["iterations"].append(_times(schedule.recorder.timeline()) | {"issued_ms": issued_ms, "host_ms": clock.least_ms()})
        schedule.hooks.watch = None
        if on_gpu:
            row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
        if contender.schedule == "zb-h1":
            row["optimizer_ms"] = _optimizer(job)
        job.close()
        return row


def _memory(job: Alone, rank: int, num_ranks: int, num_microbatches: int) -> Row:
    """Run an iteration; returns the plan's activation memory of the rank and the measured one."""
    profiler = Profiler(job.schedule.device)
    job.schedule.hooks.profiler = profiler
    job.iterate()
    job.schedule.hooks.profiler = None
    profile, plan = profiler.profile(), job.schedule.plan(num_microbatches)
    own = {stage: profile.memory[stage] for stage in plan.placement.rank_to_stages[rank]}
    held = {stage: 0.0 for stage in own}
    least, most = 0.0, 0.0
    for op in plan.ops[rank]:
        memory = own[op.stage]
        change = {"F": memory.activation, "B": memory.after_backward - memory.activation, "W": -memory.after_backward}
        held[op.stage] += change.get(op.kind.name, -memory.activation)
        most = max(most, sum(held.values()))
    return {"planned_bytes": most, "held_bytes": profile.peak_bytes, "workspace_bytes": profile.workspace_bytes}


def _times(timeline: RankTimeline) -> Row:
    ops = timeline.ops
    steps = [span.end_ms - span.start_ms for span in timeline.spans if span.activity is Activity.OPTIMIZER]
    return {
        "ops": [[op.stage, op.kind.name, round(end - start, 4)] for op, start, end in ops],
        "gaps": [round(after.start_ms - before.end_ms, 4) for before, after in zip(ops, ops[1:], strict=False)],
        "whole_ms": ops[-1].end_ms - ops[0].start_ms,
        "step_ms": sum(steps),
    }


def _optimizer(job: Alone) -> dict[str, float]:
    """The parts of a step with post-validation, each alone."""
    post_validation = job.state.post_validation
    assert post_validation is not None
    optimizer, marks, taken = post_validation._optimizer, Marks(job.schedule.device), dict[str, float]()

    def time_of(name: str, call: Callable[[], Any]) -> Any:
        begin = marks.now()
        with job.state.on_host():
            result = call()
        end = marks.now()
        marks.synchronize()
        taken[name] = marks.elapsed_ms(begin, end)
        return result

    for _ in range(2):  # the second one finds its memory
        statistics_ = time_of("statistics", optimizer.prepare)
        time_of("snapshot", optimizer.snapshot)
        time_of("apply", lambda: optimizer.apply(statistics_))
        optimizer.drop_snapshot()
    return taken


def measure(setting: Setting, save: Callable[[Row], None], contenders: Sequence[Contender] = CONTENDERS) -> Row:
    """Run ranks of all contenders, rank by rank, so that contenders have the same clocks; saved after each rank."""
    num_ranks, num_microbatches = (8, 24) if setting.on_gpu else (4, 8)
    ranks = (1, 0, 7, 4) if setting.on_gpu else (1, 0, 3)
    report: Row = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "layers": _LAYERS_PER_RANK, "runs": []}
    host = HostDevice(enabled=not setting.on_gpu)
    with host:
        for turn, rank in enumerate(ranks):
            for index in range(len(contenders)):
                contender = contenders[(index + turn) % len(contenders)]
                report["runs"].append(run(contender, rank, setting, host, num_ranks, num_microbatches))
                save(report)
    return report
