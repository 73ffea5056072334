"""Experts, MTP layers and `HybridModel` under our schedules against the unpipelined model: losses, gradients and weights.

Bit for bit where one rank holds all experts: a token's way, and the order of every sum, are those of the unpipelined model. The
embedding of MTP layers is a second copy of the first one, and the output layer is used once more for every layer: gradients of
these are sums in another order, so there the tolerance is 4e-6, and Adam's epsilon is large, as for tied embeddings. In float16
the reference rounds its sums to 11 bits, and weights may differ by twice their last one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron.zerobubble.mcore.cpu.streams import InertStream, _CudaWithoutStreams
from megatron.zerobubble.plan.ir import OpKind
from tests.support.after_each_op import after_each_op
from tests.support.comparisons import assert_near, assert_same_bits, compare, grown_by_op
from tests.support.hybrid import HAS_HYBRID_MODEL, WHY_NOT, HybridCase, case
from tests.support.moe import ZB_H2, ZBV, MoeCase
from tests.support.mtp import ZB_H2 as MTP_ZB_H2
from tests.support.mtp import ZBV as MTP_ZBV
from tests.support.mtp import MtpCase
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER

pytestmark = pytest.mark.claims(
    "Layers",
    "multi-token prediction (`--mtp-num-layers`), linear and V: tied and untied embeddings, overlapped reduction, distributed"
    " optimizer, per-token loss, tensor and sequence parallelism, uneven stages, fp16 with recomputation",
    "works, 4e-6 (embedding and head are sums in another order; fp16 1e-3)",
)


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
# Each expert is shared by the two ranks, or each has half of the experts; tokens are exchanged between them in F and B.
TENSOR_PARALLEL: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True, "layer_freq": (1, 1, 0, 1), "num_steps": 2}
FEATURES += [
    TENSOR_PARALLEL | {"dispatcher": "alltoall", "z_loss_coeff": 0.01},
    TENSOR_PARALLEL | {"dispatcher": "allgather", "shared": True, "recompute": "full"},
    TENSOR_PARALLEL | {"dispatcher": "alltoall", "expert_parallel": 2, "expert_tensor_parallel": 1, "shared": True},
]
# Two replicas with different data, and half of the experts each. The reference has four, so that the mean over the replicas is
# summed in another order. Adam gets a large epsilon: with the usual one it would blow a last-bit difference of a tiny gradient up
# to a whole step.
EXPERT_PARALLEL: dict[str, Any] = {"expert_parallel": 2, "different_data": True, "adam_eps": 1.0, "shared": True}
FEATURES += [
    EXPERT_PARALLEL | {"dispatcher": "alltoall"},
    EXPERT_PARALLEL | {"dispatcher": "allgather"},
    EXPERT_PARALLEL | {"dispatcher": "alltoall", "shared_overlap": True},
]


@pytest.mark.claims(
    "Layers",
    "mixture of experts, one by one (`SequentialMLP`): all-to-all and all-gather, shared experts, auxiliary losses, z-loss, "
    "expert bias, capacity, dense layers in between, fp16, recomputation",
    "works, bit for bit",
)
@pytest.mark.claims(
    "Layers",
    "experts on tensor-parallel ranks with `--sequence-parallel` (each expert shared, or half of the experts on each)",
    "works, bit for bit",
)
@pytest.mark.claims("Layers", "expert parallelism 2, both dispatchers", "works, 4e-6")
@pytest.mark.parametrize("case", [replace(base, **features) for features in FEATURES for base in (ZBV, ZB_H2)], ids=str)
@pytest.mark.sampled(0.25)
def test_experts_train_as_in_the_unpipelined_model(four_ranks: RankPool, case: MoeCase) -> None:
    assert_near(four_ranks.run(compare, case), case, OTHER_ORDER if case.adam_eps == 1.0 else 0.0)


def test_gradients_of_experts_come_in_w_and_those_of_routers_in_b(four_ranks: RankPool) -> None:
    for grown in four_ranks.run(grown_by_op, replace(ZBV, expert_parallel=2, shared=True)):
        seen = {(op, *(any(f".mlp.{kind}." in name for name in names) for kind in ("router", "experts"))) for op, names in grown}
        assert seen == {("F", False, False), ("B", True, False), ("W", False, True)}


def _held_by_dispatchers(rank: int, case: MoeCase) -> tuple[int, set[str]]:
    """How many dispatchers a rank has, and their tensors with a graph behind any op."""
    trainer, held = case.trainer(), set()
    dispatchers = [each.token_dispatcher for chunk in trainer.chunks for each in chunk.modules() if isinstance(each, MoELayer)]

    def show(work: Any, op: Any) -> None:
        for dispatcher in dispatchers:
            for name, value in vars(dispatcher).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    held.add(f"{name} after {op.kind.name}")

    after_each_op(trainer.schedule, show)
    trainer.forward_backward(0)
    trainer.close()
    return len(dispatchers), held


@pytest.mark.parametrize("recompute", [None, "moe"])
def test_dispatchers_keep_no_graph_between_ops(four_ranks: RankPool, recompute: str | None) -> None:
    for count, held in four_ranks.run(_held_by_dispatchers, replace(ZBV, recompute=recompute)):
        assert (count, held) == (2, set())


class _Recorded(InertStream):
    """A stream that knows for what it waits."""

    events: ClassVar[list[str]] = []

    def __init__(self, name: str = "side", **_: object) -> None:
        self.name = name

    def wait_stream(self, stream: object) -> None:
        self.events.append(f"{self.name} waits for {getattr(stream, 'name', 'passes')}")


def _waits_of_w(rank: int, case: MoeCase) -> list[list[str]]:
    """What waits for what in each W of a rank, on a double of streams."""
    with (
        mock.patch.object(SharedExpertMLP, "stream", None),
        mock.patch.object(_CudaWithoutStreams, "Stream", _Recorded),
        mock.patch.object(torch.cuda, "Stream", _Recorded),
        mock.patch.object(torch.cuda, "current_stream", return_value=_Recorded("passes")),
    ):
        trainer = case.trainer()
        found: list[list[str]] = []

        def after(work: Any, op: Any) -> None:
            if op.kind is OpKind.W:
                found.append([*_Recorded.events])
            _Recorded.events.clear()

        after_each_op(trainer.schedule, after)
        trainer.forward_backward(0)
        trainer.close()
    return found


@pytest.mark.claims(
    "Layers",
    "shared experts beside the dispatcher (`moe_shared_expert_overlap`): W runs after their stream's work, and before what comes "
    "next on it",
    "works, 4e-6; the order of streams on a double; **not run on a GPU**",
)
def test_w_waits_for_shared_experts_and_they_for_w(four_ranks: RankPool) -> None:
    case = replace(ZBV, expert_parallel=2, dispatcher="alltoall", shared=True, shared_overlap=True)
    for waits in four_ranks.run(_waits_of_w, case):
        assert len(waits) == 2 * case.num_microbatches
        for each in waits:
            half = len(each) // 2
            assert half >= 1
            assert each == ["passes waits for side"] * half + ["side waits for passes"] * half


SUMS = {"embedding.word_embeddings.weight", "output_layer.weight"}
MTP_FEATURES: list[dict[str, Any]] = [
    {},
    {"tied": True},
    {"tied": True, "overlap_grad_reduce": True, "distributed_optimizer": True, "different_data": True},
    {"per_token_loss": True, "num_mtp_layers": 1, "llama": True},
    {"dtype": torch.float16, "recompute": "full", "tied": True},
    {"tensor_parallel": 2, "sequence_parallel": True, "tied": True},
]


CASES = [
    *(replace(base, **features) for features in MTP_FEATURES for base in (MTP_ZBV, MTP_ZB_H2)),
    replace(MTP_ZBV, layout="E|tt|tt|L", llama=True),  # nothing but MTP layers and the loss on the last stage
    replace(MTP_ZB_H2, layout="Et|tttL", llama=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.1)
def test_mtp_layers_train_as_in_the_unpipelined_model(four_ranks: RankPool, case: MtpCase) -> None:
    _assert_mtp(four_ranks, case)


@pytest.mark.slow
def test_stock_1f1b_does_not_wait_for_the_unused_output_weight(four_ranks: RankPool) -> None:
    _assert_mtp(four_ranks, replace(MTP_ZB_H2, schedule="stock", tied=True, overlap_grad_reduce=True, num_steps=2))


def _assert_mtp(ranks: RankPool, case: MtpCase) -> None:
    tolerance, of_weights = (OTHER_ORDER, OTHER_ORDER) if case.dtype is torch.float32 else (1e-3, 2e-3)
    differences = ranks.run(compare, case)
    for rank, difference in enumerate(differences):
        assert difference.losses < max(10 * OTHER_ORDER, tolerance), (rank, difference)
        assert difference.weights < of_weights, (rank, difference)
        if not case.distributed_optimizer:  # a rank has only its share of the sums then
            assert difference.gradients < tolerance, (rank, difference)
            assert case.dtype is not torch.float32 or SUMS.issuperset(difference.unequal), (rank, difference)
    has_mtp = [any(name.startswith("mtp.layers.") for name in difference.names) for difference in differences]
    last = case.spec.placement.stage_to_rank[-1]
    assert has_mtp == [rank // (4 // case.num_ranks) == last for rank in range(4)], "they are on the stage of the loss"


needs_hybrid = pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=WHY_NOT)
SCHEDULES = [
    *(("zb-h1", 1), ("zb-h2", 1), ("1f1b", 1), ("zb", 1)),
    *(("zbv", 2), ("v-half", 2), ("v-min", 2), ("zb-interleaved", 2)),
]


def _grid() -> list[HybridCase]:
    """Every schedule, on two ranks with stages of different numbers and kinds of layers, and on four with even ones."""
    cases = []
    for schedule, num_chunks in SCHEDULES:
        uneven = "*-*E-|E*" if num_chunks == 1 else "*-*|E-|*|-"
        cases.append(case(schedule, 2, 5, uneven, num_chunks=num_chunks))
        cases.append(case(schedule, 4, 6, "*-*E*-*-", num_chunks=num_chunks))
    return cases


@needs_hybrid
@pytest.mark.claims(
    "Layers",
    "`HybridModel` (megatron-core 0.18.2 and 0.19.2), patterns of `*`, `-` and `E`: 1F1B, ZB-H1, ZB-H2, ZB, zero-bubble "
    "interleaved, ZBV, V-Half, V-Min; stages of different numbers and kinds of layers, or of none at the ends; expert, tensor"
    " and sequence parallelism, bf16, fp16, recomputation, per-token loss",
    "works, bit for bit; tied embeddings 4e-6",
)
@pytest.mark.parametrize("case", _grid(), ids=str)
@pytest.mark.sampled(0.2)
def test_every_schedule_of_a_hybrid_model_has_the_bits_of_the_unpipelined_one(four_ranks: RankPool, case: HybridCase) -> None:
    assert_same_bits(four_ranks.run(compare, case), case)


HYBRID_ZBV = case("zbv", 2, 4, "*-*|E-|*|-*", num_chunks=2)
HYBRID_ZB_H1 = case("zb-h1", 2, 4, "*-*E|*-")

HYBRID_FEATURES: list[dict[str, Any]] = [
    {"llama": True},
    {"tensor_parallel": 2, "sequence_parallel": True},
    {"per_token_loss": True},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    # An expert's GEMM sums over the tokens of two ranks, which the reference sums apart, and the gradient of tied embeddings is
    # the sum of two tensors here, and one running sum over microbatches in the reference.
    {"expert_parallel": 2, "adam_eps": 1.0},
    {"tied": True, "adam_eps": 1.0},
    {"tied": True, "adam_eps": 1.0, "distributed_optimizer": True},
]
HYBRIDS = [replace(base, **features) for features in HYBRID_FEATURES for base in (HYBRID_ZBV, HYBRID_ZB_H1)]
# Stages without layers at the ends.
HYBRIDS += [case("zbv", 2, 4, "|*-|*-*E|", num_chunks=2), case("zb-h1", 2, 4, "|*-*E")]


@needs_hybrid
@pytest.mark.parametrize("case", HYBRIDS, ids=str)
@pytest.mark.sampled(0.27)
def test_a_hybrid_model_trains_as_the_unpipelined_one_with(four_ranks: RankPool, case: HybridCase) -> None:
    differences = four_ranks.run(compare, case)
    if case.adam_eps == 1.0:
        assert_near(differences, case, OTHER_ORDER)
    else:
        assert_same_bits(differences, case)


@needs_hybrid
@pytest.mark.claims(
    "Layers",
    "`HybridModel` with Mamba layers (`M`), whose kernels are replaced by plain torch: `in_proj` and `out_proj` are split, "
    "the rest stays in B",
    "works, bit for bit; the kernels are **not run** (need CUDA)",
)
@pytest.mark.parametrize(
    "case",
    [case("zbv", 2, 4, "M*|M-|M|-M", num_chunks=2), case("zb-h2", 2, 4, "M*M-|M")],
    ids=str,
)
def test_mamba_mixers_with_stand_ins_for_their_kernels(four_ranks: RankPool, case: HybridCase) -> None:
    """`tests.support.mamba` states what this does not cover: the kernels."""
    assert_same_bits(four_ranks.run(compare, case), case)


@needs_hybrid
def test_of_a_mamba_mixer_the_two_projections_are_split(four_ranks: RankPool) -> None:
    mamba = case("zb-h1", 2, 2, "M|M")
    for rank, (split, others) in enumerate(four_ranks.run(_split_of_mixer, mamba)):
        assert split == ["in_proj.weight", "out_proj.weight"], rank
        assert {name.split(".")[0].split("_")[0] for name in others} == {"conv1d", "dt", "A", "D", "norm"}, rank


def _split_of_mixer(rank: int, case: HybridCase) -> tuple[list[str], list[str]]:
    trainer = case.trainer()
    mixer = next(each for chunk in trainer.chunks for name, each in chunk.named_modules() if name.endswith("mixer"))
    names = {True: [], False: []}  # type: dict[bool, list[str]]
    for name, parameter in mixer.named_parameters():
        names[hasattr(parameter, "skip_backward_post_hook")].append(name)
    trainer.close()
    return sorted(names[True]), names[False]
