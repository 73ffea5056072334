"""Shared by the benchmarks: ranks as processes on this machine, and passes that sleep instead of computing.

With sleeping passes any number of ranks fits on a few cores. Everything else is real: the plan, the executor, its buffers and
waits, and the P2P messages on gloo.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.mcore.cpu.gloo_device import one_device_per_process
from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.costs.all_to_alls import all_to_all_ms
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.executor import Pass, StageWork

LATENESS_STEP_S = 5e-6
"""Step by which `Sleeper` adjusts its estimate of the lateness."""


class Sleeper:
    """Sleeps until given times, late as often as early.

    The system wakes a process about 0.1 ms late, because of timer slack and scheduling: at every pass, which along a pipeline
    adds up to several percent. Busy waiting is no alternative with more ranks than cores, as it takes the core from ranks that
    have work to do. So a sleep aims earlier by the typical lateness, a running median that is adjusted in small steps. A sleep
    that is much too late, as on a busy machine, is not compensated.
    """

    def __init__(self) -> None:
        self._lateness_s = 0.0

    def sleep_until(self, end_s: float) -> None:
        """Return at about `end_s` of `time.perf_counter`; at once if that has passed."""
        remaining = end_s - time.perf_counter() - self._lateness_s
        if remaining <= 0.0:
            return
        time.sleep(remaining)
        self._lateness_s += LATENESS_STEP_S if time.perf_counter() > end_s else -LATENESS_STEP_S


class SleepingWork(StageWork):
    """A `StageWork` whose passes sleep for the planned time and check that every received tensor is the expected one.

    The time of a pass counts from its start, and includes making the tensor for the next stage. With all-to-alls in the costs the
    two passes of a pair are threads of `alternating_parts`, which sleep on two resources that one thread has at a time: the
    rank's computation, and its communication. Beside the all-to-alls of a single F or B another thread sleeps for the W that
    waits longest. Where the W of this B comes next, that is what its layers so far have left.

    Args:
        costs: times of each stage's passes, of microbatches that are alike.
        row: the ops of the rank, which count where W is computed beside all-to-alls.
        num_elements: float32 elements of each message.
    """

    def __init__(self, costs: CostModel, row: Sequence[Op] = (), *, num_elements: int = 64) -> None:
        self._num_elements, self._costs = num_elements, costs
        self._sleeper, self._sleepers = Sleeper(), (Sleeper(), Sleeper())
        self._resources = threading.Lock(), threading.Lock()
        self._fills = costs.wgrad_beside > 0 and any(costs.all_to_all)
        self._at_once = {after for op, after in itertools.pairwise(row) if after == op._replace(kind=OpKind.W)}
        self._left: dict[Op, float] = {}
        """A W that waits -> seconds of it that can be computed ahead, the oldest first."""
        self.ahead: dict[Op, float] = {}
        """A W that waits -> seconds of it that were computed ahead."""
        parts = range(costs.num_slices)
        self._seconds = {
            (stage, kind, part): costs.duration_ms(stage, kind, slice=part) / 1000.0
            for stage in range(costs.num_stages)
            for kind in OpKind
            for part in parts
        }

    def pair(self, forward: Pass, backward: Pass) -> tuple[Tensor | None, Tensor | None]:
        """Sleep for the time of both, each part when its resource is free."""
        if not any(self._costs.all_to_all):
            return super().pair(forward, backward)
        threads = []
        for (op, _, _), sleeper in zip((forward, backward), self._sleepers, strict=True):
            threads.append(threading.Thread(target=_sleep_in_parts, args=(self._parts(op), self._resources, sleeper)))
        for thread in threads:
            thread.start()
        results = self._result(*forward[:2], forward[0].stage - 1), self._result(*backward[:2], backward[0].stage + 1)
        for thread in threads:
            thread.join()
        if backward[0].kind is OpKind.B:
            own = backward[0]._replace(kind=OpKind.W)
            self._left[own] = self._movable(own)
        return results

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor:
        """Sleep for the time of F."""
        return self._run(op, activation, received_from=op.stage - 1)

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor:
        """Sleep for the time of B or BW."""
        return self._run(op, gradient, received_from=op.stage + 1)

    def weight_gradient(self, op: Op, last: bool) -> None:
        """Sleep for the time of W."""
        ahead = self.ahead.pop(op, 0.0)
        self._left.pop(op, None)
        self._sleeper.sleep_until(time.perf_counter() + self._seconds[op.stage, op.kind, op.slice] - ahead)

    def buffer(self, message: Message) -> Tensor:
        """Allocate a tensor to receive into."""
        return torch.empty(self._num_elements)

    def _run(self, op: Op, received: Tensor | None, received_from: int) -> Tensor:
        end = time.perf_counter()
        result = self._result(op, received, received_from)
        if self._fills and op.kind is not OpKind.BW:
            self._sleep_and_fill(op, end)
        else:
            self._sleeper.sleep_until(end + self._seconds[op.stage, op.kind, op.slice])
        return result

    def _parts(self, op: Op) -> list[tuple[int, float]]:
        travels = all_to_all_ms(self._costs, op) / 1000.0
        return alternating_parts(self._seconds[op.stage, op.kind, op.slice] - travels, travels, op.kind is OpKind.F)

    def _sleep_and_fill(self, op: Op, end: float) -> None:
        """Sleep for the parts of an F or B, one after the other from `end` on, and for W beside those that communicate."""
        parts, own = self._parts(op), op._replace(kind=OpKind.W)
        computes, grows = sum(each for resource, each in parts if resource == 0), op.kind is OpKind.B and own in self._at_once
        for resource, seconds in parts:
            end += seconds
            if resource == 1:
                self._fill_until(end, seconds)
                continue
            self._sleeper.sleep_until(end)
            if grows:
                self._left[own] = self._left.get(own, 0.0) + self._movable(own) * seconds / computes
        if op.kind is OpKind.B and not grows:
            self._left[own] = self._movable(own)

    def _fill_until(self, end: float, seconds: float) -> None:
        """Communicate until `end`, and compute what there is of Ws meanwhile, for `seconds` at most."""
        rest = seconds
        for op, left in self._left.items():
            beside = min(rest, left)
            rest -= beside
            self._left[op] -= beside
            self.ahead[op] = self.ahead.get(op, 0.0) + beside
        part = [(0, seconds - rest)]
        thread = threading.Thread(target=_sleep_in_parts, args=(part, self._resources, self._sleepers[1]))
        if rest < seconds:
            thread.start()
        with self._resources[1]:
            self._sleeper.sleep_until(end)
        if rest < seconds:
            thread.join()

    def _movable(self, op: Op) -> float:
        """Seconds of a W that may be computed beside all-to-alls."""
        return self._costs.wgrad_beside * self._seconds[op.stage, op.kind, op.slice]

    def _result(self, op: Op, received: Tensor | None, received_from: int) -> Tensor:
        """What an op returns that was given the right tensor."""
        if received is not None and received[-1].item() != _mark(op._replace(stage=received_from)):
            raise ExecutionError(f"{op} was given a tensor that is not of {op._replace(stage=received_from).where}")
        return torch.empty(self._num_elements).fill_(_mark(op))


def alternating_parts(computes: float, travels: float, is_forward: bool, num_layers: int = 4) -> list[tuple[int, float]]:
    """The parts of an F or B of MoE layers as (resource, time), 0 for computation and 1 for communication.

    A layer of F is attention, dispatch, experts and combine, one of B the reverse. Attention is two thirds of the computation,
    and both all-to-alls are equal.

    Args:
        computes: time of its computation.
        travels: time of its all-to-alls.
        is_forward: whether it is an F.
        num_layers: in the stage.
    """
    third, half = computes / 3 / num_layers, travels / 2 / num_layers
    layer = [(0, 2 * third), (1, half), (0, third), (1, half)]
    return (layer if is_forward else layer[::-1]) * num_layers


def _sleep_in_parts(parts: Sequence[tuple[int, float]], resources: Sequence[threading.Lock], sleeper: Sleeper) -> None:
    for resource, seconds in parts:
        with resources[resource]:
            sleeper.sleep_until(time.perf_counter() + seconds)


def _mark(op: Op) -> float:
    """The value of a stage's tensors for a slice of a microbatch, to check messages; exact in float32."""
    return float(64 * (1024 * op.stage + op.microbatch) + op.slice)


def run_on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Call ``function(rank, *args)`` in `num_ranks` new processes that form a gloo world; returns the results in rank order.

    The function must be importable. Each rank has one torch thread.

    Raises:
        ExecutionError: a rank ended without a result; its traceback is on standard error.
    """
    # Here, not on rank 0: a port that is free when asked for may be taken when rank 0 has started.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for rank in range(num_ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(there, rank, num_ranks, store.port, function, args), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        results = _collect(pipes)
    except BaseException:
        for process in processes:
            process.kill()  # the other ranks wait for the one that failed
        raise
    finally:
        for process in processes:
            process.join()
    return results


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in results]):
            assert isinstance(ready, Connection)
            rank = pipes.index(ready)
            try:
                results[rank] = ready.recv()
            except EOFError:
                raise ExecutionError(f"rank {rank} ended without a result; see its traceback above") from None
    return [results[rank] for rank in range(len(pipes))]


def _serve(pipe: Connection, rank: int, num_ranks: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    with one_device_per_process():
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks, store=store)
        result = function(rank, *args)
        dist.destroy_process_group()
    pipe.send(result)
