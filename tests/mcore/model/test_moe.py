"""Experts under our schedules against the unpipelined model: the same losses, gradients and weights after three steps.

Bit for bit where one rank holds all experts: a token's way, and the order of every sum, are those of the unpipelined model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Op, OpKind
from tests.support.deep_ep import Buffer, deep_ep
from tests.support.gpt import Difference, compare
from tests.support.moe import ZB_H2, ZBV, MoeCase, MoeTrainer
from tests.support.ranks import RankPool

FEATURES: list[dict[str, Any]] = [
    {"dispatcher": "allgather", "shared": True},
    {"shared": True, "z_loss_coeff": 0.01, "per_token_loss": True},
    {"balancing": ("seq_aux_loss", "global_aux_loss"), "aux_loss_coeff": (0.1, 0.05), "expert_bias": True},
    {"layer_freq": (1, 0, 0, 1), "dtype": torch.float16},
    {"recompute": "full", "llama": True, "expert_bias": True},
    {"recompute": "moe", "shared": True, "z_loss_coeff": 0.01},
    {"recompute": "shared_experts", "shared": True, "dtype": torch.bfloat16},
    # 24 tokens for 32 experts: in every microbatch some get none, and others drop what is over their capacity.
    {"num_experts": 32, "topk": 1, "pre_softmax": True, "capacity_factor": 1.0},
]


@pytest.mark.claims(
    "Layers",
    "mixture of experts, one by one (`SequentialMLP`): all-to-all and all-gather, shared experts, auxiliary losses, z-loss, "
    "expert bias, capacity, dense layers in between, fp16, recomputation",
    "works, bit for bit",
)
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(features))
@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=lambda case: case.schedule)
@pytest.mark.sampled(0.16)
def test_same_bits_as_the_unpipelined_model(four_ranks: RankPool, base: MoeCase, features: dict[str, Any]) -> None:
    _assert_equal(four_ranks.run(compare, replace(base, **features)))


SIZES: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True, "layer_freq": (1, 1, 0, 1), "num_steps": 2}
TENSOR_PARALLEL: list[dict[str, Any]] = [
    {"dispatcher": "alltoall", "z_loss_coeff": 0.01},
    {"dispatcher": "allgather", "shared": True, "recompute": "full"},
    {"dispatcher": "alltoall", "expert_parallel": 2, "expert_tensor_parallel": 1, "shared": True},
]


@pytest.mark.claims(
    "Layers",
    "experts on tensor-parallel ranks with `--sequence-parallel` (each expert shared, or half of the experts on each)",
    "works, bit for bit",
)
@pytest.mark.parametrize("features", TENSOR_PARALLEL, ids=lambda features: "-".join(features))
@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=lambda case: case.schedule)
@pytest.mark.sampled(0.16)
def test_same_bits_on_tensor_parallel_ranks(four_ranks: RankPool, base: MoeCase, features: dict[str, Any]) -> None:
    """Each expert is shared by the two ranks, or each has half of the experts; tokens are exchanged between them in F and B."""
    _assert_equal(four_ranks.run(compare, replace(base, **SIZES, **features)))


@pytest.mark.claims("Layers", "expert parallelism 2, both dispatchers", "works, 1e-6")
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=lambda case: case.schedule)
@pytest.mark.sampled(0.5)
def test_expert_parallel(four_ranks: RankPool, base: MoeCase, dispatcher: str) -> None:
    """Two replicas with different data, and half of the experts each. The reference has four, so that the mean over the replicas
    is summed in another order: 1e-6. Adam gets a large epsilon, as in `test_data_parallel_2`."""
    case = replace(base, expert_parallel=2, dispatcher=dispatcher, different_data=True, adam_eps=1.0, shared=True)
    _assert_close(four_ranks.run(compare, case))


def _compare_flex(rank: int, case: MoeCase, reference: MoeCase) -> Difference:
    with deep_ep():
        difference = compare(rank, case, reference)
        assert Buffer.num_calls > 0
        return difference


@pytest.mark.claims(
    "Layers",
    "the flex dispatcher with DeepEP (`moe_token_dispatcher_type` flex), whose buffer is a double: ZBV and ZB-H2 with "
    "expert parallelism 2, with recomputation",
    "works, 1e-6 of the all-to-all dispatcher; **DeepEP, HybridEP and NCCL EP never run** ([what their sources "
    "say](adr/0013-mixture-of-experts.md))",
)
@pytest.mark.parametrize("features", [{}, {"recompute": "full"}], ids=["", "recompute"])
@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=lambda case: case.schedule)
@pytest.mark.sampled(0.5)
def test_the_flex_dispatcher_trains_as_the_all_to_all_one(four_ranks: RankPool, base: MoeCase, features: dict[str, Any]) -> None:
    """Without a pipeline there are four replicas instead of two, and experts get their tokens in another order: 1e-6."""
    case = replace(base, expert_parallel=2, dispatcher="flex", different_data=True, adam_eps=1.0, shared=True, **features)
    _assert_close(four_ranks.run(_compare_flex, case, replace(case.unpipelined, dispatcher="alltoall")))


def _gradients_by_op(rank: int, case: MoeCase) -> list[tuple[OpKind, bool, bool]]:
    """After every op: its kind, and whether the gradients of routers and of experts have grown in it."""
    trainer = MoeTrainer(case)
    parameters = dict(trainer.parameters())
    seen = []
    before = {"router": 0.0, "experts": 0.0}

    def total(kind: str) -> float:
        return sum(float(p.main_grad.abs().sum()) for name, p in parameters.items() if f".mlp.{kind}." in name)

    def observe(_: Any, op: Op) -> None:
        now = {kind: total(kind) for kind in before}
        seen.append((op.kind, now["router"] != before["router"], now["experts"] != before["experts"]))
        before.update(now)

    trainer.schedule.hooks.observe = observe
    trainer.zero_gradients()
    trainer.forward_backward(0)
    trainer.close()
    return seen


def test_gradients_of_experts_come_in_w_and_those_of_routers_in_b(four_ranks: RankPool) -> None:
    for seen in four_ranks.run(_gradients_by_op, replace(ZBV, expert_parallel=2, shared=True)):
        assert set(seen) == {(OpKind.F, False, False), (OpKind.B, True, False), (OpKind.W, False, True)}


def _refusal(rank: int, case: MoeCase) -> str:
    with pytest.raises(ConfigError) as caught:
        MoeTrainer(case)
    return str(caught.value)


def test_shared_experts_on_a_stream_of_their_own_are_refused(four_ranks: RankPool) -> None:
    for message in four_ranks.run(_refusal, replace(ZBV, shared=True, shared_overlap=True)):
        assert message.startswith("moe_shared_expert_overlap does not go with schedule 'zbv'")


def _assert_equal(differences: list[Difference]) -> None:
    for rank, difference in enumerate(differences):
        assert difference.losses == 0.0, (rank, difference)
        assert difference.gradients == 0.0, (rank, difference)
        assert difference.weights == 0.0, (rank, difference)


def _assert_close(differences: list[Difference]) -> None:
    for rank, difference in enumerate(differences):
        assert difference.losses < 1e-5, (rank, difference)
        assert difference.gradients < 1e-6, (rank, difference)
        assert difference.weights < 1e-6, (rank, difference)
