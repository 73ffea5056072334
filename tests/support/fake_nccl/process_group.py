"""`torch.distributed` process groups over communicators of the fake NCCL.

As `ProcessGroupNCCL`: a call issues work and returns, `Work.wait` makes the compute stream wait for it, `is_completed` asks. The
backend keeps no tensor alive, neither for a transfer nor for its `Work`: whoever calls must keep it until `wait`, as with
TORCH_NCCL_AVOID_RECORD_STREAMS before torch 2.8, the strictest of what users run.

Communicators are made at first use: one per group for its collectives, one per pair of ranks and group for sends and receives,
both directions together. An eager group makes one communicator when it is made, and uses it for everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.fake_nccl import collectives
from tests.support.fake_nccl.communicators import Carry, Communicator, Kernel
from tests.support.fake_nccl.device import Device
from tests.support.fake_nccl.engine import Engine, here

BACKEND, HOST_BACKEND = "fake_nccl", "fake_gloo"


class Fabric:
    """All communicators of a run.

    Args:
        engine: of the run.
        eager: whether groups make their communicator when they are made.
    """

    def __init__(self, engine: Engine, *, eager: bool) -> None:
        self.engine, self.eager = engine, eager
        self.communicators: dict[tuple[Any, ...], Communicator] = {}

    def communicator(
        self, key: tuple[Any, ...], name: str, ranks: Sequence[int], place: int, device: Device, *, on_host: bool
    ) -> Communicator:
        """This rank's end is made where there is none."""
        found = self.communicators.get(key)
        if found is None:
            found = self.communicators[key] = Communicator(self.engine, name, ranks, on_host=on_host)
        if place not in found.ends:
            found.join(place, device)
        return found


class FakeWork(dist.Work):
    """Operations under way."""

    def __init__(self, device: Device, kernels: Sequence[Kernel], *, blocks: bool = False, on_host: bool = False) -> None:
        super().__init__()
        self._device, self._kernels, self._blocks, self._on_host = device, kernels, blocks, on_host

    def wait(self, timeout: Any = None) -> bool:
        """The compute stream waits (and the host with it, see `device`); a barrier makes the host wait, too."""
        for kernel in self._kernels:
            if self._on_host:
                self._host_waits(kernel)
                continue
            if kernel.kind == "send" and not kernel.end.is_reached:
                self._device.stalls.append(kernel.text)
            self._device.wait(kernel.end)
            if self._blocks:
                self._host_waits(kernel)
        return True

    def _host_waits(self, kernel: Kernel) -> None:
        self._device.engine.block_until(lambda: kernel.end.is_reached, lambda: kernel.text)
        self._device.host().join(kernel.end.clock)

    def is_completed(self) -> bool:
        return all(kernel.end.is_reached for kernel in self._kernels)


class FakeNccl(dist.ProcessGroup):
    """A process group.

    Args:
        rank: of this process in the group.
        size: of the group.
        name: unique.
        ranks: its global ranks.
    """

    ON_HOST = False

    def __init__(self, rank: int, size: int, name: str, ranks: Sequence[int]) -> None:
        super().__init__(rank, size)
        self._place, self._ranks, self._name = rank, tuple(ranks), name
        self._fabric: Fabric = here().state["fabric"]
        self._device = Device.current()
        self._num_calls = 0
        if self._fabric.eager and size > 1 and not self.ON_HOST:
            self._of_the_group()

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return HOST_BACKEND if self.ON_HOST else BACKEND

    def shutdown(self) -> None:
        """As in torch: destroying a group waits for nothing."""

    # -- communicators ------------------------------------------------------------------------------------------------------

    def _of_the_group(self) -> Communicator:
        name = f"communicator {self._name} of ranks {list(self._ranks)}"
        return self._fabric.communicator((self._name,), name, self._ranks, self._place, self._device, on_host=self.ON_HOST)

    def _of_the_pair(self, peer: int) -> tuple[Communicator, int, int]:
        """The communicator, and the places of this rank and the other one in it."""
        if self._fabric.eager and not self.ON_HOST:
            return self._of_the_group(), self._place, peer
        pair = sorted((self._place, peer))
        ranks = [self._ranks[place] for place in pair]
        name = f"communicator {self._name} between ranks {ranks[0]} and {ranks[1]}"
        place = pair.index(self._place)
        key = (self._name, *pair)
        found = self._fabric.communicator(key, name, ranks, place, self._device, on_host=self.ON_HOST)
        return found, place, 1 - place

    # -- sends and receives -------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> FakeWork:
        communicator, place, peer = self._of_the_pair(dst)
        text = f"send {self._count()} of {communicator.name} to rank {self._ranks[dst]}"
        return FakeWork(self._device, [communicator.issue(place, "send", text, tensors, [], peer=peer)], on_host=self.ON_HOST)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> FakeWork:
        communicator, place, peer = self._of_the_pair(src)
        text = f"receive {self._count()} of {communicator.name} from rank {self._ranks[src]}"
        return FakeWork(self._device, [communicator.issue(place, "receive", text, [], tensors, peer=peer)], on_host=self.ON_HOST)

    def _count(self) -> int:
        self._num_calls += 1
        return self._num_calls

    # -- collectives --------------------------------------------------------------------------------------------------------

    def _collective(
        self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], carry: Carry, *, blocks: bool = False
    ) -> FakeWork:
        if self.size() == 1:
            carry([inputs], [outputs])
            self._device.compute(f"{kind} of one rank", reads=inputs, writes=outputs)
            return FakeWork(self._device, [])
        communicator = self._of_the_group()
        communicator.connect(self._place, kind, [*inputs, *outputs])
        text = f"{kind} {self._count()} of {communicator.name}"
        kernel = communicator.issue(self._place, kind, text, inputs, outputs, carry=carry)
        return FakeWork(self._device, [kernel], blocks=blocks, on_host=self.ON_HOST)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> FakeWork:
        return self._collective("all-reduce", tensors, tensors, collectives.all_reduce(_operation(opts)))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> FakeWork:
        return self._collective("broadcast", tensors, tensors, collectives.broadcast(opts.rootRank))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> FakeWork:
        return self._collective("all-gather", inputs, outputs[0], collectives.all_gather)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> FakeWork:
        return self._collective("all-gather", [given], [output], collectives.all_gather_single)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> FakeWork:
        return self._collective("all-gather", inputs, outputs, collectives.all_gather_single)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> FakeWork:
        return self._collective("reduce-scatter", [given], [output], collectives.reduce_scatter_single(_operation(opts)))

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> FakeWork:
        return self._collective("reduce-scatter", inputs, outputs, collectives.reduce_scatter_single(_operation(opts)))

    _allgather_base = all_gather_single  # torch before 2.13
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> FakeWork:
        """As in torch, where a barrier of NCCL is an all-reduce for which the host waits."""
        token = torch.zeros(1)
        work = self._collective("barrier", [token], [token], collectives.all_reduce("SUM"), blocks=True)
        work.wait()
        return work


def _operation(opts: Any) -> str:
    return "SUM" if opts is None else str(opts.reduceOp.op if hasattr(opts.reduceOp, "op") else opts.reduceOp).rpartition(".")[2]


class FakeGloo(FakeNccl):
    """Groups for host memory, as gloo's: the host waits for them, and no device does. A send is over when it is received."""

    ON_HOST = True


def _create(kind: type[FakeNccl], options: Any, _: Any) -> FakeNccl:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return kind(options.group_rank, options.group_size, options.group_id, ranks)


def register() -> None:
    for name, kind in ((BACKEND, FakeNccl), (HOST_BACKEND, FakeGloo)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, partial(_create, kind), extended_api=True, devices=["cpu"])


def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, **options: Any) -> Any:
    """As `torch.distributed.new_group`, with the double where gloo is asked for."""
    return dist.distributed_c10d.new_group(ranks, timeout, HOST_BACKEND if backend == "gloo" else backend, **options)
