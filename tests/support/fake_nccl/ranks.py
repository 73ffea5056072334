"""Ranks as threads of this process, with a device each and process groups of the fake NCCL."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from megatron.zerobubble.runtime import p2p
from tests.support.fake_nccl.device import Device
from tests.support.fake_nccl.engine import Engine, HostThread, here
from tests.support.fake_nccl.process_group import BACKEND, Fabric, new_group, register


class _Store(dist.Store):
    """torch wants one to make groups; nothing is ever waited for in it."""


class InlineIssuer:
    """In place of the thread that issues transfers of CPU tensors: on CUDA the caller's thread does. So a rank has one thread."""

    def __init__(self, device: torch.device) -> None:
        """No thread to start."""

    def __call__(self, begin: Callable[[], dist.Work]) -> dist.Work:
        return begin()

    def close(self) -> None:
        """Nothing to end."""


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    seed: int = 0,
    backend: str = BACKEND,
    eager: bool = False,
    single_queue: bool = False,
    resumed: Callable[[HostThread], None] | None = None,
) -> list[Any]:
    """Call `function(rank, *args)` on every rank; returns the results in rank order.

    Args:
        size: of the world.
        function: what each rank does; it may use `torch.distributed` and `Device.current()`.
        args: of the function.
        seed: of the order in which hosts and devices go on.
        backend: of the world.
        eager: whether groups make their communicator when they are made (`device_id` given), or when it is first used.
        single_queue: whether the streams of a rank share one hardware queue.
        resumed: called with a thread before it goes on.

    Raises:
        StuckError: nobody can go on.
        OrderError: two conflicting accesses to memory are not ordered.
        Exception: what a rank raised.
    """
    register()
    engine = Engine(seed, resumed)
    fabric = Fabric(engine, eager=eager)
    results: list[Any] = [None] * size
    devices = [Device(engine, rank, single_queue=single_queue) for rank in range(size)]

    def run(rank: int) -> None:
        here().state.update(device=devices[rank], fabric=fabric)
        dist.init_process_group(backend, store=_Store(), rank=rank, world_size=size)
        results[rank] = function(rank, *args)
        devices[rank].synchronize("its device, at the end")
        dist.destroy_process_group()

    with _one_process_as_many():
        for rank in range(size):
            engine.spawn(f"the host of rank {rank}", rank, lambda rank=rank: run(rank))  # type: ignore[misc]
        engine.run()
    return results


@contextmanager
def _one_process_as_many() -> Iterator[None]:
    """torch keeps its groups per process: here each thread has its own, and they are not entered in the registry of names."""
    with (
        mock.patch.multiple(
            distributed_c10d,
            _world=ThreadLocalWorld(),
            _register_process_group=lambda *_: None,
            _unregister_process_group=lambda *_: None,
        ),
        mock.patch.object(sys, "excepthook", sys.excepthook),  # which torch replaces
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(p2p, "Issuer", InlineIssuer),
    ):
        yield
