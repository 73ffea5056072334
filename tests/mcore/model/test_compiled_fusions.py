"""Activations and residuals compiled by torch, the default on GPUs: B and W give the gradients of the full backward, to the bit.

Compiled by inductor for the CPU: the ranks of other tests start with compilation off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._dynamo

from megatron.zerobubble.plan.ir import OpKind
from tests.support.after_each_op import after_each_op
from tests.support.comparisons import Difference, assert_near, compare
from tests.support.gpt import Case, Trainer
from tests.support.pending import pending_bytes
from tests.support.ranks import RankPool


@dataclass(frozen=True)
class FusedCase(Case):
    is_fused: bool = True


class FusedTrainer(Trainer, trains=FusedCase):
    case: FusedCase

    def _config_changes(self) -> dict[str, Any]:
        return {"bias_activation_fusion": self.case.is_fused, "bias_dropout_fusion": self.case.is_fused}


def _held_after_b(rank: int, case: FusedCase) -> list[int]:
    """Bytes that the store holds behind each B."""
    trainer = case.trainer()
    held: list[int] = []
    after_each_op(trainer.schedule, lambda work, op: held.append(pending_bytes(work._store)) if op.kind is OpKind.B else None)
    trainer.forward_backward(0)
    trainer.close()
    return held


def _trained(rank: int, case: FusedCase) -> tuple[Difference, int]:
    """The difference to the unpipelined model, and how many functions were compiled."""
    counted = torch._dynamo.utils.counters["frames"]
    num_compiled = counted["ok"]
    return compare(rank, case), counted["ok"] - num_compiled


@pytest.mark.claims("Layers", "activations and residuals compiled by torch, the default on GPUs", "works, bit for bit")
@pytest.mark.parametrize("llama", [True, False], ids=["Llama", "GPT"])
@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_split_layer_has_the_bits_of_a_whole_one(compiling_ranks: RankPool, llama: bool) -> None:
    """Between B and W the store holds as much as without compilation: each linear's input and output gradient once."""
    case = FusedCase("zb-h1", 2, 3, num_layers=4, llama=llama)
    for difference, num_compiled in compiling_ranks.run(_trained, case):
        assert_near([difference], case)
        assert num_compiled > 0
    held = compiling_ranks.run(_held_after_b, case)
    assert held == compiling_ranks.run(_held_after_b, replace(case, is_fused=False)) != [[0] * 3] * 2
