"""Process groups with collectives inside of the passes are used once before the first transfer between stages."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.zerobubble.mcore import zb_schedules
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from tests.support.gpt import Case
from tests.support.moe import MoeCase
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Long runs",
    "groups with collectives inside passes are used once before the first transfer: TP, SP, experts, overlapped gradients",
    "works with gloo, which opens nothing at first use; **not run on a GPU**",
)


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
    for chunk in trainer.chunks:
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
