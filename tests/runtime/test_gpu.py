"""Links and executor with CUDA tensors, over NCCL with a card for each rank or one for all, and a host that runs ahead."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.zerobubble.plan.communication import Message, place_communication
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.runtime.executor import Executor, StageWork
from tests.runtime.delays import run_under_delays
from tests.runtime.support import NoLinks
from tests.support.programs import FAMILIES
from tests.support.ranks import RankPool

SCHEDULES = pytest.mark.parametrize("name", FAMILIES)


# -- NCCL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.claims(
    "Schedules",
    "every schedule on NCCL under random delays, on 2 and 4 ranks",
    "works, by ranks that shared an H200 ([what was run](benchmarks/gpu.md))",
)
@pytest.mark.gpu
@SCHEDULES
@pytest.mark.parametrize("nccl_ranks", [2, 4], indirect=True)
def test_random_delays_on_nccl(name: str, nccl_ranks: RankPool) -> None:
    """Both ends of a link issue its transfers in one order, whatever the ranks' hosts and streams are late with."""
    program = place_communication(build_plan(name, num_ranks=nccl_ranks.size, num_microbatches=12))
    assert nccl_ranks.run(run_under_delays, program, (1, 2, 3, 4)) == [""] * nccl_ranks.size


# -- overhead -----------------------------------------------------------------------------------------------------------


class BusyWork(StageWork):
    """Ops that keep the stream busy and not the host."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1, device="cuda")

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor:
        torch.cuda._sleep(2_000_000)
        return self.tensor

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor:
        return self.forward(op, gradient, last)

    def weight_gradient(self, op: Op, last: bool) -> None:
        torch.cuda._sleep(2_000_000)

    def buffer(self, message: Message) -> Tensor:
        return self.tensor


@pytest.mark.gpu
def test_the_gpu_never_waits_for_the_executor() -> None:
    """Passes of about a millisecond: when the host has given out all of them, the stream is still busy with the first ones."""
    program = place_communication(build_plan("zbv", num_ranks=4, num_microbatches=16))
    work = BusyWork()
    middle: list[torch.cuda.Event] = []

    class Noting(BusyWork):
        def weight_gradient(self, op: Op, last: bool) -> None:
            super().weight_gradient(op, last)
            if op.microbatch == 8 and not middle:
                middle.append(torch.cuda.Event())
                middle[0].record()

    for each in (work, Noting()):  # the first run loads the kernels
        torch.cuda.synchronize()
        Executor(program, 1, NoLinks(), each).run()
    assert not middle[0].query(), "the host was no faster than the stream"
    torch.cuda.synchronize()
