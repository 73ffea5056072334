"""A rank that waits for another one counts as waiting, in every place of the package that waits.

Rank 0 gets there first. The others follow once a second thread of rank 0 has seen the wait, as the thread with the heartbeats
would; if it does not, they give up.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.zerobubble.job import pulse
from megatron.zerobubble.mcore import zb_schedules
from megatron.zerobubble.mcore.attention.context_parallel import _Shared
from megatron.zerobubble.mcore.cpu.gathers import one_at_a_time
from megatron.zerobubble.mcore.post_validation.token_count import TokenCount
from megatron.zerobubble.optimizer.post_validation import GradientStatistics, Relay
from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from megatron.zerobubble.runtime.recording import RecordedLinks
from megatron.zerobubble.runtime.watch import Watch
from megatron.zerobubble.wgrad.sharing import Gathered
from tests.support.gpt import Case
from tests.support.moe import MoeCase
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Long runs",
    "groups with collectives inside passes are used once before the first transfer: TP, SP, experts, overlapped reductions",
    "works with gloo, which opens nothing at first use; **not run on a GPU**",
)


CPU = torch.device("cpu")
PATIENCE = timedelta(seconds=60)
GRADIENT, ACTIVATION = Message(Payload.GRADIENT, 0, 2, 1, 0), Message(Payload.ACTIVATION, 1, 3, 0, 1)
OWN = GradientStatistics((1.0,), (0.0,))

Act = Callable[[], object]


def _passed(rank: int, watch: Watch, message: Message) -> Act:
    """One message, sent by its source and received by its target."""
    links = ProcessGroupLinks(Placement.linear(4), pipeline=range(4), rank=rank, device=CPU)
    recorded = RecordedLinks(links, watch)

    def act() -> None:
        if rank == message.source:
            recorded.send(message, torch.ones(3)).wait()
        elif rank == message.target:
            recorded.receive(message, torch.zeros(3)).wait()
        links.close()

    return act


def _unreported_send(rank: int, watch: Watch) -> Act:
    """As in evaluations of another training loop, or when clocks are compared."""
    return _passed(rank, Watch(CPU), ACTIVATION)


def _relayed(rank: int, watch: Watch, *, waits_to_send: bool) -> Act:
    """Rank 0 receives the global statistics from rank 1, or waits until rank 1 has received its own."""
    relay = Relay(range(4), rank, waits=watch.waits)

    def act() -> None:
        if rank == 0:
            relay.recv_prefix(OWN)
            relay.send_next(OWN)
            if not waits_to_send:
                relay.recv_global()
        elif rank == 1:
            relay.recv_prefix(OWN)
            if not waits_to_send:
                relay.send_prev(OWN)
        relay.close()

    return act


def _statistics_of_all(rank: int, watch: Watch) -> Act:
    relay = Relay(range(4), rank, waits=watch.waits)
    return lambda: (relay.all_reduce(OWN), relay.close())


def _number_of_tokens(rank: int, watch: Watch) -> Act:
    counts = TokenCount(pipeline=range(4), replicas=[rank], rank=rank, source=1, device=CPU)

    def act() -> None:
        if rank == 1:
            counts.send(torch.tensor(3))
        counts.total()
        dist.barrier()
        counts.close()

    return act


def _gather_of_a_linear(rank: int, watch: Watch) -> Act:
    return lambda: Gathered(torch.ones(2), None).wait()


def _context_parallel(rank: int, watch: Watch, *, function: str, size: int) -> Act:
    return functools.partial(getattr(_Shared(group=dist.group.WORLD, size=4), function), torch.ones(size, 1, 1, 4))


def _gather_before(rank: int, watch: Watch) -> Act:
    """The second of two all-gathers of one group waits for the first one. The handles are megatron-core's."""
    buckets = SimpleNamespace(intra_distributed_optimizer_instance_group=dist.group.WORLD, param_gather_handle=None)

    def start(buckets: Any) -> None:
        with dist.distributed_c10d._coalescing_manager(dist.group.WORLD, async_ops=True) as handle:
            dist.all_gather_into_tensor(torch.zeros(8), torch.ones(2))
        buckets.param_gather_handle = handle

    ordered = one_at_a_time(start)

    def act() -> None:
        for _ in range(2):
            ordered(buckets)
        buckets.param_gather_handle.wait()

    return act


def _phase(rank: int, watch: Watch) -> Act:
    """Saving, loading and evaluating gather objects, and have barriers."""

    def act() -> None:
        with watch.phase("saves the checkpoint of iteration 2"):
            dist.all_gather_object([None] * 4, rank)
            dist.barrier()

    return act


WAITS: dict[str, tuple[Callable[[int, Watch], Act], str | None]] = {
    "receive": (
        functools.partial(_passed, message=GRADIENT),
        "waits, before 0B2, to receive the gradient for stage 0, microbatch 2 (rank 1 to rank 0)",
    ),
    "send": (
        functools.partial(_passed, message=ACTIVATION),
        "waits until it has sent the activation for stage 1, microbatch 3 (rank 0 to rank 1)",
    ),
    "statistics received": (
        functools.partial(_relayed, waits_to_send=False),
        "waits to receive gradient statistics from rank 1",
    ),
    "statistics sent": (
        functools.partial(_relayed, waits_to_send=True),
        "waits until it has sent gradient statistics to rank 1",
    ),
    "statistics of all": (_statistics_of_all, None),
    "number of tokens": (_number_of_tokens, None),
    "gather of a linear": (_gather_of_a_linear, None),
    "context-parallel gather": (functools.partial(_context_parallel, function="gather", size=2), None),
    "context-parallel scatter": (functools.partial(_context_parallel, function="scatter", size=8), None),
    "gather before": (_gather_before, None),
    "unreported send": (_unreported_send, None),
    "phase": (_phase, "saves the checkpoint of iteration 2"),
}
"""What prepares a wait, and what rank 0 reports in it; None: nothing, and it is seen by where its main thread is."""


def _observe(watch: Watch, done: Callable[[str | None], None], is_over: threading.Event) -> None:
    """Call `done` with the report of the main thread when it has been at one place for a while, waiting."""
    before, count = None, 0
    while not is_over.is_set() and count < 5:
        doing, frame = watch.current(), sys._current_frames()[threading.main_thread().ident or 0]
        here = doing, frame.f_code, frame.f_lasti
        count = count + 1 if here == before and pulse._is_waiting(doing, frame) else 0
        before = here
        del frame
        time.sleep(0.02)
    if is_over.is_set():
        done("was not seen to wait")
    else:
        done(None if before is None or before[0] is None else before[0].text)


def _first_there(rank: int, prepare: Callable[[int, Watch], Act], key: str) -> str | None:
    watch, store = Watch(CPU), dist.distributed_c10d._get_default_store()
    act = prepare(rank, watch)
    dist.barrier()
    if rank > 0:
        store.wait([key], PATIENCE)
        act()
        return None
    seen: list[str | None] = []
    is_over = threading.Event()
    observer = threading.Thread(target=_observe, args=(watch, lambda text: (seen.append(text), store.set(key, "")), is_over))
    observer.start()
    act()
    is_over.set()
    observer.join()
    return seen[0]


@pytest.mark.parametrize("name", WAITS)
def test_a_rank_in_a_wait_counts_as_waiting(four_ranks: RankPool, name: str) -> None:
    prepare, reported = WAITS[name]
    found, *_ = four_ranks.run(_first_there, prepare, f"waits {name} {time.time_ns()}")
    assert found == reported


class _GroupsUsed(TorchDispatchMode):
    """The groups of the collectives that run inside; transfers between two ranks do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            groups = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.ScriptObject)]
            unboxed = [dist.ProcessGroup.unbox(each) for each in groups if "ProcessGroup" in str(each._type())]  # type: ignore[attr-defined]
            self.names |= {group.group_name for group in unboxed if group.size() > 1}
        return func(*args, **(kwargs or {}))


def _first_uses(rank: int, case: Case) -> tuple[list[str], set[str], set[str]]:
    """What happened at start, in order; the groups used at start; and those used inside the passes."""
    order: list[str] = []
    warm_up, open_links = zb_schedules.warm_up_groups, ProcessGroupLinks._open
    at_start = _GroupsUsed()

    def warmed(*given: Any) -> list[str]:
        with at_start:
            names = warm_up(*given)
        order.extend(names)
        return names

    def opened(links: ProcessGroupLinks, which: Any) -> None:
        order.append("links")
        open_links(links, which)

    with mock.patch.object(zb_schedules, "warm_up_groups", warmed), mock.patch.object(ProcessGroupLinks, "_open", opened):
        trainer = case.trainer()
    trainer.forward_backward(0)  # megatron-core overlaps no reduction with the first iteration
    for chunk in trainer.built.chunks:
        chunk.zero_grad_buffer()
    inside = _GroupsUsed()
    trainer.config.finalize_model_grads_func = None  # these reductions come after the passes
    with inside:
        trainer.forward_backward(1)
    trainer.close()
    return order, at_start.names, inside.names


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("zbv", 2, 4, num_chunks=2, tensor_parallel=2, sequence_parallel=True), ["tp"]),
        (Case("zb-h1", 2, 4, tensor_parallel=2), ["tp"]),
        (Case("zb-h1", 2, 4, overlap_grad_reduce=True), ["gradients in buffers"]),
        (Case("zbv", 2, 4, num_chunks=2, context_parallel=2), ["cp"]),
        (MoeCase("zb-h1", 2, 4, expert_parallel=2), ["ep", "tp_dp_cp"]),
        (Case("zb-h1", 4, 4), []),
    ],
    ids=str,
)
@pytest.mark.sampled(0.42)
def test_every_group_of_a_pass_has_been_used_before_the_first_transfer(
    four_ranks: RankPool, case: Case, expected: list[str]
) -> None:
    for order, at_start, inside in four_ranks.run(_first_uses, case):
        first_link = order.index("links")
        assert set(expected) <= set(order[:first_link])
        assert "links" in order
        assert set(order[first_link:]) == {"links"}
        assert inside <= at_start
        assert bool(inside) == bool(expected), "the passes had collectives, and they were seen"
