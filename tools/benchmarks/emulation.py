"""Shared by the benchmarks: ranks as processes on this machine, and passes that sleep instead of computing.

With sleeping passes any number of ranks fits on a few cores. Everything else is real: the plan, the executor, its buffers and
waits, and the P2P messages on gloo.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.mcore.cpu.gloo_device import one_device_per_process
from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.executor import StageWork

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

    The time of a pass counts from its start, and includes making the tensor for the next stage.

    Args:
        costs: times of each stage's passes.
        num_elements: float32 elements of each message.
    """

    def __init__(self, costs: CostModel, *, num_elements: int = 64) -> None:
        self._num_elements = num_elements
        self._sleeper = Sleeper()
        parts = range(costs.num_slices)
        self._seconds = {
            (stage, kind, part): costs.duration_ms(stage, kind, slice=part) / 1000.0
            for stage in range(costs.num_stages)
            for kind in OpKind
            for part in parts
        }

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor:
        """Sleep for the time of F."""
        return self._run(op, activation, received_from=op.stage - 1)

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor:
        """Sleep for the time of B or BW."""
        return self._run(op, gradient, received_from=op.stage + 1)

    def weight_gradient(self, op: Op, last: bool) -> None:
        """Sleep for the time of W."""
        self._sleeper.sleep_until(time.perf_counter() + self._seconds[op.stage, op.kind, op.slice])

    def buffer(self, message: Message) -> Tensor:
        """Allocate a tensor to receive into."""
        return torch.empty(self._num_elements)

    def _run(self, op: Op, received: Tensor | None, received_from: int) -> Tensor:
        end = time.perf_counter() + self._seconds[op.stage, op.kind, op.slice]
        if received is not None and received[-1].item() != _mark(op._replace(stage=received_from)):
            raise ExecutionError(f"{op} was given a tensor that is not of {op._replace(stage=received_from).where}")
        result = torch.empty(self._num_elements).fill_(_mark(op))
        self._sleeper.sleep_until(end)
        return result


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
