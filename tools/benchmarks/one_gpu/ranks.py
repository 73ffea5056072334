"""The programs of some ranks of a pipeline, each run alone on the device.

Per op its device time, between two events on the stream; per rank the whole iteration, memory beside the plan's, and the
optimizer step.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import schedule_spec
from megatron.zerobubble.plan.simulate import memory_after_ops
from megatron.zerobubble.plan.timeline import Activity, RankTimeline
from megatron.zerobubble.profiling.profiler import Profiler
from tools.benchmarks.one_gpu.alone import Alone, alone
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.reports import Row, markdown_table

__all__ = ["CONTENDERS", "Contender", "lines", "measure"]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A schedule."""

    name: str
    schedule: str
    """Its name; `stock` is megatron-core's own function."""
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
"""Iterations that are timed, after one that allocates and one that measures memory."""
_LAYERS_PER_RANK = 4
_ORDER = {each.name: index for index, each in enumerate(CONTENDERS)}
_KINDS = ("F", "B", "W", "BW")


def run(contender: Contender, rank: int, setting: Setting, host: HostDevice, num_ranks: int, num_microbatches: int) -> Row:
    """Run one rank of a contender; returns its times in milliseconds and its memory in bytes."""
    on_gpu = setting.on_gpu
    with alone(rank, num_ranks, setting.device):
        spec = schedule_spec(contender.schedule, num_ranks=num_ranks, num_chunks=contender.chunks)
        job = Alone(spec, setting, _LAYERS_PER_RANK * num_ranks, host, sync=contender.sync)
        schedule = job.schedule
        schedule.recordings.choose(_TIMED)
        schedule.recordings.only_chosen = True
        job.iterate(num_microbatches)
        row: Row = {"contender": contender.name, "rank": rank}
        if on_gpu:
            row["state_bytes"] = torch.cuda.memory_allocated()
        if contender.is_stock:
            job.iterate(num_microbatches)
        else:
            row |= _memory(job, rank, num_ranks, num_microbatches)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        row["iterations"] = []
        schedule.hooks.watch = job.watch
        for _ in _TIMED:
            job.iterate(num_microbatches)
            row["iterations"].append(_times(schedule.recorder.timeline()))
        schedule.hooks.watch = None
        if on_gpu:
            row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
        job.close()
        return row


def _memory(job: Alone, rank: int, num_ranks: int, num_microbatches: int) -> Row:
    """Run an iteration; returns the plan's activation memory of the rank and the measured one."""
    profiler = Profiler(job.schedule.device)
    job.schedule.hooks.profiler = profiler
    job.iterate(num_microbatches)
    job.schedule.hooks.profiler = None
    profile, plan = profiler.profile(), job.schedule.plan(num_microbatches)
    activation, after = [0.0] * plan.placement.num_stages, [0.0] * plan.placement.num_stages
    for stage in plan.placement.rank_to_stages[rank]:
        activation[stage], after[stage] = profile.memory[stage].activation, profile.memory[stage].after_backward
    costs = CostModel.uniform(plan.placement).with_lists(activation=tuple(activation), activation_after_backward=tuple(after))
    return {
        "planned_bytes": max(memory_after_ops(plan.ops[rank], costs)),
        "held_bytes": profile.peak_bytes,
        "workspace_bytes": profile.workspace_bytes,
    }


def _times(timeline: RankTimeline) -> Row:
    """By stage and kind the ops' times, by kind the gaps before them; the iteration from its first op to its last; the step."""
    ops = timeline.ops
    steps = [span.end_ms - span.start_ms for span in timeline.spans if span.activity is Activity.OPTIMIZER]
    taken: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    for op, start, end in ops:
        taken.setdefault(f"{op.stage} {op.kind.name}", []).append(round(end - start, 4))
    for before, after in itertools.pairwise(ops):
        gaps.setdefault(after.op.kind.name, []).append(round(after.start_ms - before.end_ms, 4))
    whole_ms = ops[-1].end_ms - ops[0].start_ms
    return {"ops_ms": taken, "gaps_ms": gaps, "whole_ms": whole_ms, "step_ms": sum(steps)}


def measure(setting: Setting, save: Callable[[Row], None], seconds: float) -> Row:
    """Run ranks of all contenders, rank by rank, so that contenders have the same clocks; saved after each.

    No rank begins that would probably end after `seconds`. A contender that fails does not end the others.
    """
    num_ranks, num_microbatches = (8, 24) if setting.on_gpu else (4, 4)
    ranks = (1, 0, 7, 4) if setting.on_gpu else (1, 0, 3)
    report: Row = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "layers": _LAYERS_PER_RANK,
        "vocabulary": setting.vocabulary,
        "runs": [],
        "failed": {},
    }
    begin = time.monotonic()
    with HostDevice(enabled=not setting.on_gpu) as host:
        for turn, rank in enumerate(ranks):
            if turn and (time.monotonic() - begin) * (turn + 1) / turn > seconds:
                break
            for index in range(len(CONTENDERS)):
                contender = CONTENDERS[(index + turn) % len(CONTENDERS)]
                print(f"rank {rank}, {contender.name}", flush=True)
                try:
                    report["runs"].append(run(contender, rank, setting, host, num_ranks, num_microbatches))
                except Exception as error:  # noqa: BLE001  # such as a GPU too small for it
                    traceback.print_exc()
                    report["failed"][contender.name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
                gc.collect()  # what it left, before the next one begins
                save(report)
    return report


def median_ops(run: Row) -> dict[str, float]:
    """Kind of op -> its median milliseconds."""
    taken: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for iteration in run["iterations"]:
        for key, ms in iteration["ops_ms"].items():
            taken[key.split()[1]] += ms
    return {kind: statistics.median(ms) for kind, ms in taken.items() if ms}


def lines(row: Row) -> list[str]:
    """The section of the page."""
    table, memory = [], []
    for run in sorted(row["runs"], key=lambda run: (run["rank"], _ORDER[run["contender"]])):
        who, both = [str(run["rank"]), run["contender"]], run["iterations"]
        ops = [taken for each in both for taken in each["ops_ms"].values()]
        sums = sum(map(sum, ops))
        table.append(
            [
                *who,
                " ".join(f"{kind} {ms:.3f}" for kind, ms in median_ops(run).items()),
                f"{sums / len(both):.1f}",
                f"{sum(each['whole_ms'] for each in both) / sums:.3f}",
                f"{statistics.fmean(each['step_ms'] for each in both):.1f}",
            ]
        )
        held = [run.get(name) for name in ("planned_bytes", "held_bytes", "workspace_bytes")]
        held += [run[name] - run["state_bytes"] if name in run else None for name in ("peak_bytes", "reserved_bytes")]
        if any(each is not None for each in held):
            memory.append([*who, *("" if each is None else f"{each / 2**30:.3f}" for each in held)])
    return [
        "## Ranks alone",
        "",
        f"p = {row['num_ranks']}, m = {row['num_microbatches']}, {row['layers']} layers of Llama-3-8B per rank, one sample per "
        f"microbatch, a vocabulary of {row['vocabulary']:,}. An op is the median of two iterations, between events on the "
        "stream; whole is from the first op to the last. The step is the synchronous optimizer's.",
        "",
        *markdown_table(
            ("rank", "schedule", "an op, ms", "sum of ops, ms", "whole / sum", "step, ms"),
            table,
        ),
        "",
        "Memory in GiB: activations by the plan, and measured after each op; what an op needs beside them; and the allocator's "
        "peak and reserve, above what it holds between iterations.",
        "",
        *markdown_table(("rank", "schedule", "planned", "measured", "workspace", "peak", "reserved"), memory),
    ]
