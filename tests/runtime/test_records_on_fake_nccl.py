"""Recorder, memory meter, link times and clock on the fake NCCL: they read the device and disturb no transfer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.zerobubble.plan.communication import links_of, place_communication
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.timeline import Activity
from megatron.zerobubble.profiling.activation_memory import MemoryMeter
from megatron.zerobubble.profiling.recorder import OpRecorder
from megatron.zerobubble.runtime.clock import clock_offset_ms
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from megatron.zerobubble.runtime.recording import fan_out
from megatron.zerobubble.runtime.watch import Watch
from tests.runtime.on_fake_nccl import CPU, SIZE, ArenaWork
from tests.support.fake_nccl.device import Device
from tests.support.fake_nccl.engine import here
from tests.support.fake_nccl.ranks import run_ranks
from tests.support.fake_nccl.tracing import TracedOps
from tests.support.programs import FAMILIES

pytestmark = pytest.mark.claims(
    "Schedules",
    "on the double of NCCL: recorder, memory meter, clock, link times; post-validation; real training steps with DDP, the "
    "distributed optimizer and sharded gradients, every torch op traced",
    "works on the double; **not run on a GPU**",
    also=("optimizer/test_post_validation_on_fake_nccl.py", "mcore/ddp/test_zero2_on_fake_nccl.py"),
)

CUDA = torch.device("cuda", 0)
SEEDS = range(6)


def own_links(placement: Placement, rank: int) -> ProcessGroupLinks:
    return ProcessGroupLinks(placement, pipeline=range(dist.get_world_size()), rank=rank, device=CPU)


def record(rank: int, name: str, p: int) -> dict[str, Any]:
    """An iteration under all recorders at once."""
    device = Device.current()
    program = place_communication(build_plan(name, num_ranks=p, num_microbatches=6))
    links = own_links(program.plan.placement, rank)
    recorder, watch = OpRecorder(CUDA), Watch(CUDA)
    recorder.clear()
    num_syncs = device.num_syncs
    with MemoryMeter(CUDA) as meter, watch.passes(forward_only=False):
        Executor(program, rank, links, ArenaWork(program, device, lambda *_: None), fan_out([recorder, meter, watch])).run()
        seen = device.num_syncs - num_syncs
    recorder.pause()
    timeline = recorder.timeline()
    links.close()
    assert watch.current() is None
    return {"program": program, "timeline": timeline, "meter": meter, "num_syncs": seen}


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_recorder_memory_meter_and_watch(name: str, p: int) -> None:
    """Nothing is held after an op but what is in transit, which the meter subtracts; a temporary tensor and an output are not."""
    for seed in range(3):
        for rank, found in enumerate(run_ranks(p, record, name, p, seed=seed, cuda=True)):
            program, timeline, meter = found["program"], found["timeline"], found["meter"]
            steps = program.steps[rank]
            assert found["num_syncs"] == 0, "a recorder must not make the host wait"
            assert [timed.op for timed in timeline.ops] == [step.op for step in steps]
            kinds = [span.activity for span in timeline.spans]
            takes = sum(step.take is not None for step in steps)
            assert kinds.count(Activity.RECEIVE) == kinds.count(Activity.WAIT) == takes
            assert kinds.count(Activity.SEND) == sum(step.send is not None for step in steps)
            assert meter.peak_bytes == 0, f"rank {rank} holds a tensor that is not counted as in transit"
            assert meter.workspace_bytes >= SIZE * 4


def measure_clock(rank: int, skews: list[float]) -> float:
    """The clock is the number of things that have happened in the whole run: every rank reads the same one, with its skew."""
    links = own_links(Placement.linear(len(skews)), rank)
    engine = here().engine
    with TracedOps():
        offset = clock_offset_ms(links, rank=rank, num_ranks=len(skews), device=CPU, clock=lambda: engine.num_steps + skews[rank])
    links.close()
    return offset


@pytest.mark.parametrize("skews", [[0.0, 0.0], [0.0, 1e6], [5e5, -1e6, 0.0, 3e6]])
def test_the_clock_of_each_rank(skews: list[float]) -> None:
    for seed in SEEDS:
        offsets = run_ranks(len(skews), measure_clock, skews, seed=seed)
        for rank, offset in enumerate(offsets):
            expected = skews[0] - skews[rank]
            assert abs(offset - expected) < 1000.0 * rank + 1e-6, (seed, rank)
            assert expected or offset == 0.0, "ranks that share a clock stay aligned"


def measure_clock_by_readings(rank: int, skews: list[float], readings: Iterator[int]) -> float:
    links = own_links(Placement.linear(len(skews)), rank)
    clock = lambda: next(readings) + skews[rank]  # noqa: E731
    offset = clock_offset_ms(links, rank=rank, num_ranks=len(skews), device=CPU, clock=clock)
    links.close()
    return offset


@pytest.mark.parametrize(
    ("skews", "expected"),
    [([0.0], [0.0]), ([0.0, 1.0, 0.0], [0.0, 0.0, 0.0]), ([7.0, 5000.0, -300.0, 12.5], [0.0, -4993.0, 307.0, -5.5])],
)
def test_the_offset_undoes_the_skew(skews: list[float], expected: list[float]) -> None:
    """A clock for all ranks that advances by a millisecond whenever one of them reads its own: in the shortest round trip, three
    readings in a row, the reply lies exactly in the middle. A late rank makes earlier trips long, and they do not count. A skew
    of no more than half a trip could be the trip's own, and is left."""
    for seed in SEEDS:
        assert run_ranks(len(skews), measure_clock_by_readings, skews, itertools.count(), seed=seed) == expected


def measure_links(rank: int) -> dict[tuple[int, int], LinkTime]:
    links = own_links(Placement.v(4), rank)
    times = links.times(dict.fromkeys(links_of(Placement.v(4)), (4,)), torch.float32, repeats=2)
    links.close()
    return times


def test_link_times() -> None:
    for seed in SEEDS:
        for rank, times in enumerate(run_ranks(4, measure_links, seed=seed)):
            assert {source for source, _ in times} == {rank}
