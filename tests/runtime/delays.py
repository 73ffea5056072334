"""Whole iterations over a pool's own process groups, in which everything is late at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.errors import TransferError
from megatron.zerobubble.plan.communication import Message, Program
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.runtime.executor import BatchedExecutor, Executor
from megatron.zerobubble.runtime.p2p import Handle, P2PLinks, ProcessGroupLinks
from tests.runtime.support import PATIENCE_S, LabelWork
from tests.support.plans import receive_buffers

MAX_SLEEP_S = 2e-3
"""Of an op, and of a call that starts a transfer."""


class Late:
    """torch's own call, late. On the CPU it is made on the thread that issues transfers, so that a rank's ops go on."""

    def __init__(self, call: Callable[..., Any], seed: int) -> None:
        self._call, self._random = call, random.Random(seed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self._random.random() * MAX_SLEEP_S)
        return self._call(*args, **kwargs)


class WaitingLinks:
    """Links that wait for every send where it is issued: what rule 3 forbids."""

    def __init__(self, links: P2PLinks) -> None:
        self._links = links

    def send(self, message: Message, tensor: Tensor) -> Handle:
        self._links.send(message, tensor).wait()
        return mock.Mock()

    def receive(self, message: Message, buffer: Tensor) -> Handle:
        return self._links.receive(message, buffer)


def links_over_the_world(
    rank: int, placement: Placement, *, timeout: timedelta | None = None, **options: Any
) -> ProcessGroupLinks:
    """The links of one pipeline that is the whole world, between tensors of the pool's device; `timeout` is that of transfers."""
    options = {"device": torch.device(torch.cuda.current_device())} | options
    with mock.patch.object(dist, "new_group", partial(dist.new_group, timeout=timeout)):
        return ProcessGroupLinks(placement, pipeline=range(dist.get_world_size()), rank=rank, **options)


def run_under_delays(rank: int, program: Program, seeds: tuple[int, ...], batched: bool = False) -> str:
    """An iteration of a program for each seed; what went wrong on this rank, or nothing.

    A rank on which something went wrong hangs up. What others wait for from it fails then, and they hang up, too: nobody sits
    out the patience because of what somebody else has seen.

    Args:
        rank: in the world, which is the pipeline.
        program: what is run.
        seeds: of the delays.
        batched: whether transfers are batched.
    """
    links = links_over_the_world(rank, program.plan.placement, timeout=timedelta(seconds=PATIENCE_S), batched=batched)
    dist.barrier()  # no rank hangs up while another one is still opening its links
    wrong = ""
    for seed in seeds:
        wrong = _iterate(rank, program, links, seed, batched)
        if wrong:
            break
    links.close()
    return wrong


def _iterate(rank: int, program: Program, links: P2PLinks, seed: int, batched: bool) -> str:
    """One iteration. Nothing is left of it when it returns: transfers under way would keep the links' sockets open."""
    device = torch.device(torch.cuda.current_device())
    work = LabelWork(program, max_sleep_s=MAX_SLEEP_S, seed=10 * seed + rank, device=device)
    executor = (BatchedExecutor if batched else Executor)(program, rank, links, work)
    names = ("batch_isend_irecv",) if batched else ("isend", "irecv")
    late = {name: Late(getattr(dist, name), 100 * seed + rank) for name in names}
    try:
        with mock.patch.multiple(dist, **late):
            executor.run()
        work.settle()
    except (TransferError, AssertionError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    assert work.ops == list(program.plan.ops[rank])
    assert work.buffers_alive == 0
    assert work.most_buffers_alive == receive_buffers(program)[rank]
    assert not executor._receiving
    assert not executor._sending
    assert not executor._local
    return ""
