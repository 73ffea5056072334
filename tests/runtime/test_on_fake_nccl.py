"""Every family on the fake NCCL: random delays on all hosts, links and kernels, and everything that synchronizes inside of ops.

A seed names one order of everything, so what fails here fails again. The plain run has a few seeds per family; `-m slow` has a
thousand with two ranks and two hundred with four.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.plan.communication import Message, Program, links_of, place_communication, speculative_forwards
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.timeline import Activity
from megatron.zerobubble.plan.transforms import forward_only
from megatron.zerobubble.profiling.activation_memory import MemoryMeter
from megatron.zerobubble.profiling.recorder import OpRecorder
from megatron.zerobubble.runtime import p2p
from megatron.zerobubble.runtime.clock import clock_offset_ms
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import Handle, P2PLinks, ProcessGroupLinks
from megatron.zerobubble.runtime.recording import fan_out
from megatron.zerobubble.runtime.watch import Watch
from tests.runtime.delays import WaitingLinks
from tests.runtime.on_fake_nccl import CPU, SIZE, ArenaWork, Hazard, Setup, run_program
from tests.support.fake_nccl.device import Device
from tests.support.fake_nccl.engine import FakeNcclError, StuckError
from tests.support.fake_nccl.memory import OrderError
from tests.support.fake_nccl.ranks import run_ranks
from tests.support.fake_nccl.tracing import TracedOps
from tests.support.programs import FAMILIES, post_at_take, post_one_later, rewrite

pytestmark = [
    pytest.mark.claims(
        "Schedules",
        "every schedule on a double of NCCL (sends without a buffer, work on streams behind events, communicators made at first "
        "use or eagerly, memory handed out again at once, clocks that find accesses which nothing orders), 1,000 random orders "
        "with p = 2 and 200 with p = 4, with a device-wide synchronization or a new communicator inside ops, and with one "
        "hardware queue; discarded first forwards; every rule for order, buffers and streams broken once is noticed; receives "
        "posted one op early deadlock",
        "works on the double",
    ),
    pytest.mark.claims(
        "Schedules",
        "on the double of NCCL: recorder, memory meter, clock, link times; post-validation; real training steps with DDP, the "
        "distributed optimizer and overlapped reductions, every torch op traced",
        "works on the double; **not run on a GPU**",
        also=("optimizer/test_post_validation.py", "mcore/test_on_fake_nccl.py"),
    ),
]


HAZARDS = list(Hazard)


def program_of(name: str, p: int, *, m: int = 8, lookahead: int | None = None) -> Program:
    return place_communication(build_plan(name, num_ranks=p, num_microbatches=m), lookahead=lookahead)


def run_seed(program: Program, seed: int) -> int:
    """One run, with the hazard, the communicators and the hardware queues that belong to the seed; number of reuses of memory."""
    hazard = HAZARDS[seed % len(HAZARDS)]
    setup = Setup(hazard=hazard, replicas=2 if hazard is Hazard.COMMUNICATOR else 1)
    results = run_program(program, seed, setup, eager=seed % 4 == 1, single_queue=seed % 4 >= 2)
    for rank, result in enumerate(results):
        assert not result.stalls, f"rank {rank}: a retired send was still under way"
    return sum(result.num_reused for result in results)


def outcomes(program: Program, setup: Setup, seeds: range, **options: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            results = run_program(program, seed, setup, **options)
            found["stalls" if any(result.stalls for result in results) else "ends"] += 1
        except (Exception, FakeNcclError) as error:  # noqa: BLE001 - counted
            found[type(error).__name__] += 1
    return found


MANY = (pytest.mark.slow, pytest.mark.timeout(1800))


@pytest.mark.parametrize(
    ("p", "num_seeds"), [(2, 20), (4, 5), pytest.param(2, 1000, marks=MANY), pytest.param(4, 200, marks=MANY)]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_ends_under_random_delays_and_synchronizations(name: str, p: int, num_seeds: int) -> None:
    program = program_of(name, p)
    reused = sum(run_seed(program, seed) for seed in range(num_seeds))
    assert reused > 100, "no memory was handed out again: the test says nothing about reuse"


@pytest.mark.parametrize("name", FAMILIES)
def test_evaluation(name: str) -> None:
    program = place_communication(forward_only(build_plan(name, num_ranks=3, num_microbatches=4)))
    for seed in range(5):
        run_seed(program, seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_first_forwards_that_are_discarded_and_run_again(name: str) -> None:
    """Rollback of an optimistic optimizer step: the messages of the discarded ops are received and dropped."""
    plan = build_plan(name, num_ranks=3, num_microbatches=6)
    program = place_communication(plan, fence=speculative_forwards(plan))
    assert any(program.unread(rank) for rank in range(3))
    found = outcomes(program, Setup(rewinds=True, iterations=2), range(6))
    assert found["ends"] == 6, found


@pytest.mark.claims(
    "Schedules",
    "`--zero-bubble-batch-p2p-comm`: what stands between two ops is one batch, over before the next op; every schedule on gloo "
    "and on the double of NCCL, also with a rollback; losses in every loop bit for bit those without it",
    "works; on an H200 a job ran to its end",
    also=("runtime/test_executor.py", "mcore/stock_loop/test_install.py"),
)
@pytest.mark.parametrize("name", FAMILIES)
def test_batches_end_under_every_hazard_and_are_waited_for(name: str) -> None:
    """Also with first forwards that are run again. The parts of a batch run one after the other here, which is stricter."""
    plan = build_plan(name, num_ranks=3, num_microbatches=6)
    program = place_communication(plan, fence=speculative_forwards(plan))
    for seed in range(len(HAZARDS)):
        hazard = HAZARDS[seed]
        setup = Setup(hazard=hazard, replicas=2 if hazard is Hazard.COMMUNICATOR else 1, rewinds=seed % 2 == 1, batched=True)
        run_program(program, seed, setup, eager=seed % 4 == 1, single_queue=seed % 4 >= 2)


# -- D3: receives posted an op early, and something waits for the whole device inside of an op --------------------------------


HANG_WITH_A_SYNC_IN_EVERY_OP = [name for name in FAMILIES if name != "zb-h2"]


@pytest.mark.parametrize("name", HANG_WITH_A_SYNC_IN_EVERY_OP)
@pytest.mark.parametrize("p", [2, 4])
def test_receives_posted_one_op_early_deadlocked(name: str, p: int) -> None:
    """The placement of before, and today's, under the same delays."""
    setup = Setup(hazard=Hazard.SYNC_ALWAYS)
    assert outcomes(program_of(name, p, lookahead=1), setup, range(3)) == {"StuckError": 3}
    assert outcomes(program_of(name, p), setup, range(3)) == {"ends": 3}


def test_receives_posted_at_their_op_deadlock_in_one_hardware_queue() -> None:
    """So that posting later is no way out."""
    assert outcomes(program_of("zbv", 2, lookahead=0), Setup(), range(3), single_queue=True) == {"StuckError": 3}
    assert outcomes(program_of("zbv", 2), Setup(), range(3), single_queue=True) == {"ends": 3}


def test_a_deadlock_is_reported_with_what_every_rank_waits_for() -> None:
    with pytest.raises(StuckError) as error:
        run_program(program_of("1f1b", 2, lookahead=1), 0, Setup(hazard=Hazard.SYNC_ALWAYS))
    text = str(error.value)
    assert "rank 0, the host of rank 0: waits for a device-wide synchronization in 0F" in text
    assert "is next, 0 behind it" in text
    assert "receive" in text


SEEDS = range(9)
"""Three of each kind of lateness."""


# -- order: rules 1 to 4 ------------------------------------------------------------------------------------------------------


def test_rule_1_receives_in_the_order_they_are_taken_in() -> None:
    """Under V a link's messages are taken in another order than they are sent in."""
    assert outcomes(rewrite(program_of("zbv", 2), post_at_take), Setup(), SEEDS) == {"AssertionError": 9}


def test_rule_2_a_receive_behind_the_op_that_takes_it() -> None:
    """There is nothing that the op could wait for."""
    assert outcomes(rewrite(program_of("zbv", 2, lookahead=0), post_one_later), Setup(), SEEDS) == {"KeyError": 9}


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_rule_3_a_send_that_blocks_its_rank(name: str) -> None:
    """With receives on the plan's timeline ranks only wait for each other; with receives at their op they wait for ever."""
    assert outcomes(program_of(name, 2), Setup(links=WaitingLinks), SEEDS) == {"stalls": 9}
    program = program_of(name, 2, lookahead=0)
    assert outcomes(program, Setup(links=WaitingLinks), SEEDS) == {"StuckError": 9}
    assert outcomes(program, Setup(), SEEDS) == {"ends": 9}


def test_rule_4_a_send_that_is_retired_before_it_is_proven_to_have_arrived() -> None:
    """Before the next op instead: the stream waits for the peer."""

    def retire_early(_: int, row: list[Any]) -> list[Any]:
        before = [(), *[step.send for step in row[:-1]]]
        return [replace(step, retire=retired) for step, retired in zip(row, before, strict=True)]

    found = outcomes(rewrite(program_of("zb-h1", 4), retire_early), Setup(), SEEDS)
    assert found["ends"] < 5, found
    assert found["stalls"] + found["StuckError"] > 4, found


# -- buffers ------------------------------------------------------------------------------------------------------------------


class Forgetful:
    """Links whose handles keep no tensor."""

    def __init__(self, links: P2PLinks) -> None:
        self._links = links

    def send(self, message: Message, tensor: Tensor) -> Handle:
        handle: Any = self._links.send(message, tensor)
        handle.tensor = None
        return handle  # type: ignore[no-any-return]

    def receive(self, message: Message, buffer: Tensor) -> Handle:
        handle: Any = self._links.receive(message, buffer)
        handle.tensor = None
        return handle  # type: ignore[no-any-return]


class _Hasty(Executor):
    """Reads what it received without waiting for it."""

    def _received_of(self, message: Message) -> Tensor:
        tensor, _ = self._receiving.pop(message)
        return tensor


class _Careless(Executor):
    """Frees the buffers of what it drops without waiting for it."""

    def abandon(self, unread: Sequence[Message]) -> None:
        for message in unread:
            self._links.receive(message, self._work.buffer(message))
        super().abandon(())


def test_a_sent_tensor_that_is_freed_is_overwritten_by_its_memorys_next_owner() -> None:
    with pytest.raises(OrderError, match=r"\(a temporary tensor\) writes .*, and nothing orders it after: send \d+ of .* reads"):
        run_program(program_of("zb-h1", 2), 0, Setup(links=Forgetful))
    assert outcomes(program_of("zb-h1", 2), Setup(links=Forgetful), SEEDS) == {"OrderError": 9}


def test_a_message_that_is_read_before_it_is_waited_for_is_noticed() -> None:
    with pytest.raises(OrderError, match=r"1F0 reads .*, and nothing orders it after: receive \d+ of .* writes"):
        run_program(program_of("zb-h1", 2), 1, Setup(executor=_Hasty))
    assert outcomes(program_of("zb-h1", 2), Setup(executor=_Hasty), SEEDS) == {"OrderError": 9}


def test_a_receive_buffer_that_is_freed_is_noticed() -> None:
    plan = build_plan("zb-h1", num_ranks=3, num_microbatches=6)
    program = place_communication(plan, fence=speculative_forwards(plan))
    setup = Setup(links=Forgetful, executor=_Careless, rewinds=True)
    found = outcomes(program, setup, SEEDS)
    assert found["OrderError"] == 9, found


# -- communicators --------------------------------------------------------------------------------------------------------


def _in_pairs(links: ProcessGroupLinks, pairs: Sequence[tuple[int, int]]) -> None:
    """In place of `_open`: in an order that both ends of a communicator share, if several links share it."""
    for link in sorted(pairs):
        links._pass(torch.zeros(1), link)


@pytest.mark.parametrize("eager", [True, False])
def test_links_that_share_a_communicator(eager: bool) -> None:
    """One group for all: in eager mode all links of a rank are one channel, and in lazy mode both directions of a pair.

    The order in which transfers are placed is free of deadlocks in any serialization; with receives one op early ranks deadlock.
    """
    broken = {"color_links": lambda links: (tuple(links),)}
    for lookahead, expected in ((1, "StuckError"), (None, "ends")):
        with mock.patch.multiple(p2p, **broken), mock.patch.object(ProcessGroupLinks, "_open", _in_pairs):
            found = outcomes(program_of("zbv", 4, lookahead=lookahead), Setup(), SEEDS, eager=eager)
        assert found == {expected: 9}


CUDA = torch.device("cuda", 0)
RECORD_SEEDS = range(6)


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
            assert [timed.op for timed in timeline.ops] == [op for step in steps for op in step.ops]
            kinds = [span.activity for span in timeline.spans]
            takes = sum(len(step.take) for step in steps)
            assert kinds.count(Activity.RECEIVE) == kinds.count(Activity.WAIT) == takes
            assert kinds.count(Activity.SEND) == sum(len(step.send) for step in steps)
            assert meter.peak_bytes == 0, f"rank {rank} holds a tensor that is not counted as in transit"
            assert meter.workspace_bytes >= SIZE * 4


def measure_clock_by_readings(rank: int, skews: list[float], readings: Iterator[int]) -> float:
    links = own_links(Placement.linear(len(skews)), rank)
    clock = lambda: next(readings) + skews[rank]  # noqa: E731
    with TracedOps():
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
    for seed in RECORD_SEEDS:
        assert run_ranks(len(skews), measure_clock_by_readings, skews, itertools.count(), seed=seed) == expected


def measure_links(rank: int) -> dict[tuple[int, int], LinkTime]:
    links = own_links(Placement.v(4), rank)
    times = links.times(dict.fromkeys(links_of(Placement.v(4)), (4,)), torch.float32, repeats=2)
    links.close()
    return times


def test_link_times() -> None:
    for seed in RECORD_SEEDS:
        for rank, times in enumerate(run_ranks(4, measure_links, seed=seed)):
            assert {source for source, _ in times} == {rank}
