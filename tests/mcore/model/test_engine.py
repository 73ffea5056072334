"""Transformer Engine's real Python under every schedule, against the same model without a pipeline: bit for bit.

Both sides run megatron-core's own layer specs and Transformer Engine's own modules on `tests.support.transformer_engine`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from torch import nn

from megatron.zerobubble.errors import SplitError
from megatron.zerobubble.mcore.model.transformer_engine import defer_to_w
from megatron.zerobubble.mcore.model.wgrad_split import split_weight_gradients
from megatron.zerobubble.mcore.stock_loop import patches
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.mcore.test_warm_up import _first_uses
from tests.optimizer.support import Scenario, compare
from tests.support.comparisons import assert_near
from tests.support.comparisons import compare as compare_cases
from tests.support.mtp import MtpCase, MtpTrainer
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER
from tests.support.transformer_engine import NEWEST, chosen_version
from tests.support.transformer_engine.gpt import EngineCase, EngineMlaCase, EngineMoeCase, EngineTrainer, compare_engine
from tests.support.unequal import UnequalCase, UnequalTrainer

pytestmark = pytest.mark.claims(
    "Long runs",
    "`tp_comm_overlap` with megatron-core's defaults: bulk wgrad, bulk dgrad and the row-parallel all-gather of backward are "
    "turned off, the rest stays on",
    "works, bit for bit, on a double whose buffers alias; **not run on a GPU**",
)


SCHEDULES = [
    EngineCase("zb-h1", 2, 4, fuses=True),
    EngineCase("zb-h1", 4, 6),
    EngineCase("zb-h2", 2, 4),
    EngineCase("zb-h2", 4, 6, fuses=True),
    EngineCase("zbv", 2, 4, num_chunks=2),
    EngineCase("zbv", 4, 6, num_chunks=2, fuses=True),
    EngineCase("v-half", 2, 4, num_chunks=2, fuses=True),
    EngineCase("v-half", 4, 6, num_chunks=2),
]


@pytest.mark.claims(
    "Layers",
    "Transformer Engine's own Python, 2.8.0 and 2.20.2, through megatron-core's layer specs (its compiled extension is "
    "answered by torch operations): ZB-H1, ZB-H2, ZBV, V-Half on 2 and 4 ranks, stock 1F1B; fused accumulation on and off, "
    "biases, RMSNorm, SwiGLU, GQA, bf16, tensor and sequence parallelism, recomputation (full, block, core_attn, mlp), "
    "per-token loss",
    "works, bit for bit; its kernels are **not run** (need CUDA)",
)
@pytest.mark.parametrize("case", SCHEDULES, ids=str)
@pytest.mark.sampled(0.12)
def test_same_bits_as_the_unpipelined_model(engine_ranks: RankPool, case: EngineCase) -> None:
    _assert_equal(engine_ranks, case)


ZBV = EngineCase("zbv", 2, 4, num_chunks=2, num_layers=4)
ZB_H2 = EngineCase("zb-h2", 2, 4, num_layers=4)
BF16 = torch.bfloat16

FEATURES = [
    replace(ZB_H2, llama=True, fuses=True),
    replace(ZBV, llama=True, dtype=BF16, fuses=True),
    replace(ZBV, dtype=BF16, reduce_in_fp32=False),
    replace(ZBV, tensor_parallel=2),
    replace(ZB_H2, tensor_parallel=2, sequence_parallel=True, fuses=True),
    replace(ZBV, tensor_parallel=2, sequence_parallel=True, llama=True),
    replace(ZBV, recompute="full", fuses=True),
    replace(ZB_H2, recompute="block"),
    replace(ZBV, recompute="selective"),
    replace(ZB_H2, recompute="core_attn mlp", llama=True, fuses=True),
    replace(ZBV, per_token_loss=True, fuses=True),
    EngineCase("stock", 2, 4, num_layers=4, fuses=True),
    EngineCase("1f1b", 2, 4, num_layers=4, fuses=True),
]


@pytest.mark.parametrize("case", FEATURES, ids=str)
@pytest.mark.sampled(0.07)
def test_same_bits_with(engine_ranks: RankPool, case: EngineCase) -> None:
    _assert_equal(engine_ranks, case)


REDUCED = [
    replace(ZBV, overlap_grad_reduce=True, different_data=True, fuses=True),
    replace(ZB_H2, overlap_grad_reduce=True, different_data=True),
    replace(ZB_H2, overlap_grad_reduce=True, overlap_param_gather=True, distributed_optimizer=True, fuses=True),
    replace(ZBV, tied=True, fuses=True),
]


@pytest.mark.claims(
    "Layers", "Transformer Engine's layers with overlapped reduction, the distributed optimizer, tied embeddings", "works, 4e-6"
)
@pytest.mark.parametrize("case", REDUCED, ids=str)
@pytest.mark.sampled(0.15)
def test_nearly_the_same_where_sums_are_taken_in_another_order(engine_ranks: RankPool, case: EngineCase) -> None:
    """Over two data-parallel replicas instead of four, in buckets; and of two tensors where embeddings are tied: 4e-6."""
    for difference, _, left in engine_ranks.run(compare_engine, replace(case, adam_eps=1.0)):
        assert_near([difference], case, OTHER_ORDER)
        assert not left


EXPERTS = [
    EngineMoeCase("zbv", 2, 4, num_chunks=2, num_layers=4, fuses=True),
    EngineMoeCase("zb-h2", 2, 4, num_layers=4, shared=True),
    EngineMoeCase("zb-h1", 2, 4, num_layers=4, expert_parallel=2, fuses=True, overlap=True),
    EngineMoeCase("zbv", 2, 4, num_chunks=2, num_layers=4, grouped=False),
    EngineMoeCase("v-half", 2, 4, num_chunks=2, num_layers=4, layer_freq=(0, 1, 0, 1), recompute="full", fuses=True),
]


@pytest.mark.claims(
    "Layers",
    "Transformer Engine's layers with experts in grouped linears or one by one, shared experts, dense layers in between; "
    "expert parallelism 2, 4e-6: an expert's sum is then over the tokens of two ranks; W beside all-to-alls",
    "works, bit for bit",
)
@pytest.mark.parametrize("case", EXPERTS, ids=str)
@pytest.mark.sampled(0.2)
def test_experts_in_grouped_linears(engine_ranks: RankPool, case: EngineMoeCase) -> None:
    """With expert parallelism an expert's GEMM sums over the tokens of two ranks, which the reference sums apart: 4e-6.

    Adam then gets a large epsilon: with the usual one it would blow a last bit of a tiny gradient up to a whole step.
    """
    if case.expert_parallel == 1:
        counts = _assert_equal(engine_ranks, case)
    else:
        counts = _assert_equal(engine_ranks, replace(case, adam_eps=1.0), OTHER_ORDER)
    assert bool(counts["early modules"]) is case.overlap
    grouped = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
    assert grouped <= set(counts) if case.grouped else "TEColumnParallelLinear" in counts


LATENT = [
    EngineMlaCase("zb-h2", 2, 4, num_layers=4, qk_layernorm=True, fuses=True),
    EngineMlaCase("zbv", 2, 4, num_chunks=2, num_layers=4, q_lora_rank=None, rope_type="rope"),
    EngineMlaCase("v-half", 2, 4, num_chunks=2, num_layers=4, recompute="full", fuses=True),
    EngineMlaCase("zb-h1", 4, 6, num_layers=4, dtype=BF16, fuses=True),
]


@pytest.mark.claims(
    "Layers",
    "MLA in Transformer Engine's layers, its own Python as above: ZB-H1 on 4 ranks in bf16, ZB-H2, ZBV, V-Half with full "
    "recomputation; fused accumulation",
    "works, bit for bit",
)
@pytest.mark.parametrize("case", LATENT, ids=str)
@pytest.mark.sampled(0.15)
def test_multi_latent_attention(engine_ranks: RankPool, case: EngineMlaCase) -> None:
    counts = _assert_equal(engine_ranks, case)
    assert counts.keys() >= {"TELinear", "TERowParallelLinear"}


@dataclass(frozen=True)
class UnequalEngineCase(UnequalCase, EngineCase):
    """With microbatches of lengths of their own."""


class _UnequalTrainer(UnequalTrainer, EngineTrainer, trains=UnequalEngineCase):
    case: UnequalEngineCase


@dataclass(frozen=True)
class MtpEngineCase(MtpCase, EngineCase):
    """With layers of multi-token prediction."""


class _MtpTrainer(MtpTrainer, EngineTrainer, trains=MtpEngineCase):
    case: MtpEngineCase

    def _config_changes(self) -> dict[str, Any]:
        return EngineTrainer._config_changes(self) | MtpTrainer._config_changes(self)


RING = pytest.mark.skipif(chosen_version() != NEWEST, reason=f"the double of fused attention has the signature of {NEWEST}")
SHARED = [
    EngineCase("zb-h1", 2, 4, num_layers=4, context_parallel=2, dtype=BF16, llama=True, fuses=True, adam_eps=1.0),
    replace(ZBV, context_parallel=2, dtype=BF16, per_token_loss=True, recompute="full", overlap_grad_reduce=True, adam_eps=1.0),
    UnequalEngineCase("zbv", 2, 6, num_chunks=2, num_layers=4, context_parallel=2, multiple=4, dtype=BF16, adam_eps=1.0),
]


@RING
@pytest.mark.claims(
    "Parallelism",
    "context parallelism 2 with Transformer Engine's layers, its own ring of keys and values in Python: ZB-H1, ZBV; grouped "
    "queries, full recomputation, per-token loss, overlapped reduction, microbatches of unequal length; its group is used "
    "before the first transfer; optimistic steps that are redone",
    "works, 4e-6 of the model without a pipeline on ranks that share sequences as well; its kernels are **not run**",
)
@pytest.mark.parametrize("case", SHARED, ids=str)
@pytest.mark.sampled(0.34)
def test_ranks_that_share_sequences(engine_ranks: RankPool, case: EngineCase) -> None:
    """Gradients are summed over two ranks instead of four: 4e-6."""
    for difference, _, left in engine_ranks.run(compare_engine, case):
        assert_near([difference], case, OTHER_ORDER)
        assert not left


@RING
@pytest.mark.claims(
    "Layers",
    "multi-token prediction in Transformer Engine's layers with context parallelism 2, ZB-H2",
    "works: losses of stock 1F1B bit for bit, gradients within 2^-8 (bf16)",
)
def test_mtp_layers_look_over_the_ends_of_parts_as_in_stock_1f1b(engine_ranks: RankPool) -> None:
    """Stock rounds the sum of the output layer's two gradients to bf16: a bit, 2^-8."""
    case = MtpEngineCase("zb-h2", 2, 4, num_layers=4, num_mtp_layers=1, context_parallel=2, dtype=BF16, num_steps=1)
    for rank, found in enumerate(engine_ranks.run(compare_cases, case, replace(case, schedule="stock"))):
        assert found.losses == 0.0, (rank, found)
        assert found.gradients <= 2**-8, (rank, found)


@RING
def test_ranks_that_share_sequences_open_no_group_inside_passes(engine_ranks: RankPool) -> None:
    for order, at_start, inside in engine_ranks.run(_first_uses, replace(SHARED[0], schedule="zbv", num_chunks=2)):
        assert order[0] == "cp"
        assert inside
        assert inside <= at_start


FP8 = [
    replace(ZB_H2, dtype=BF16, fp8="hybrid", fp8_history=4, fuses=True),
    replace(ZBV, dtype=BF16, fp8="e4m3", fuses=True),
    replace(ZB_H2, dtype=BF16, fp8="hybrid", fp8_recipe="tensorwise", llama=True),
    replace(ZBV, dtype=BF16, fp8="e4m3", fp8_recipe="tensorwise", fuses=True, recompute="full"),
    replace(ZBV, dtype=BF16, fp8="hybrid", fp8_recipe="tensorwise", tensor_parallel=2),
]


@pytest.mark.claims(
    "Layers",
    "FP8 (`--fp8-format`, `--fp8-recipe delayed` and `tensorwise`): W reads the operands that F and B quantized",
    "works, bit for bit, with torch's float8 casts; FP8 GEMMs are **not run here** (operands are multiplied in float32)",
)
@pytest.mark.parametrize("case", FP8, ids=str)
@pytest.mark.sampled(0.2)
def test_quantized_operands(engine_ranks: RankPool, case: EngineCase) -> None:
    """W reads what F and B quantized, with their scales; that later microbatches have changed the scales makes no difference.

    Not with delayed scaling and recomputation: each recomputed forward advances the scales, in the order of the schedule.
    """
    if case.recompute is not None and Version(chosen_version()) < Version("2.20"):
        pytest.skip("Transformer Engine 2.8 fails in attention, without a pipeline, too")
    _assert_equal(engine_ranks, case)


@pytest.mark.claims(
    "Layers",
    "groups over which FP8 reduces magnitudes inside passes have been used before the first transfer",
    "works with gloo; **not run on a GPU**",
)
@pytest.mark.parametrize("case", [FP8[0], FP8[-1]], ids=str)
@pytest.mark.sampled(0.34)
def test_reductions_of_magnitudes_open_no_group_inside_passes(engine_ranks: RankPool, case: EngineCase) -> None:
    for _, at_start, inside in engine_ranks.run(_first_uses, case):
        assert inside
        assert inside <= at_start


OPTIMISTIC = [
    Scenario("clipped", replace(ZBV, dropout=0.1, clip_grad=1e3, fuses=True), spikes={(3, 1): 1e4}, redone=(3,)),
    pytest.param(
        Scenario(
            "clipped, shared sequences",
            replace(ZBV, context_parallel=2, dtype=BF16, clip_grad=1e3, fuses=True),
            spikes={(3, 1): 1e4},
            redone=(3,),
        ),
        marks=RING,
    ),
    Scenario(
        "clipped, delayed scales",
        replace(ZB_H2, dtype=BF16, fp8="hybrid", fp8_history=4, clip_grad=1e3, fuses=True),
        spikes={(3, 1): 1e4},
        redone=(3,),
    ),
    Scenario(
        "clipped, delayed scales, recomputed",
        replace(ZB_H2, dtype=BF16, fp8="hybrid", fp8_history=4, clip_grad=1e3, fuses=True, recompute="full"),
        spikes={(3, 1): 1e4},
        redone=(3,),
    ),
]


@pytest.mark.claims(
    "Layers",
    "Transformer Engine's layers with optimistic steps, also in FP8 with delayed scaling, whose scales a rollback restores",
    "works, bit for bit as synchronous",
)
@pytest.mark.parametrize("scenario", OPTIMISTIC, ids=str)
@pytest.mark.sampled(0.5, group="long loops")
def test_optimistic_steps_equal_synchronous_steps(engine_ranks: RankPool, scenario: Scenario) -> None:
    """A rollback also restores the scales, which forwards that are rerun would advance twice."""
    for rank, (differences, redone, _) in enumerate(engine_ranks.run(compare, scenario)):
        assert differences == [], rank
        assert tuple(redone) == scenario.redone, rank


class _UndelayedTrainer(EngineTrainer):
    def _models(self) -> list[Any]:
        """As of a class that is not megatron-core's, before whose constructor the config is not looked at again."""
        self.config.delay_wgrad_compute = False
        with mock.patch.object(patches, "defer_to_w"):
            return super()._models()


def _built_without(rank: int) -> str:
    with pytest.raises(SplitError) as caught:
        _UndelayedTrainer(EngineCase("zb-h1", 4, 4))
    return str(caught.value)


def test_a_module_built_without_delay_wgrad_compute_is_rejected(engine_ranks: RankPool) -> None:
    for message in engine_ranks.run(_built_without):
        assert "linear_qkv.weight" in message
        assert "built without delay_wgrad_compute: set config.delay_wgrad_compute = True after" in message


def _fused_without_apex(rank: int) -> None:
    from megatron.core.tensor_parallel import layers

    assert not layers._grad_accum_fusion_available
    trainer = EngineCase("zb-h1", 2, 2, num_layers=2, fuses=True).trainer()
    modules = [module for chunk in trainer.chunks for module in chunk.modules()]
    own = [module for module in modules if isinstance(module, layers.ColumnParallelLinear)]
    assert not any(module.gradient_accumulation_fusion for module in own), "their own backward would call apex"
    assert any(getattr(module, "fuse_wgrad_accumulation", False) for module in modules)
    assert not layers._grad_accum_fusion_available
    trainer.close()


@pytest.mark.claims(
    "Layers", "Transformer Engine's fused accumulation where apex is missing", "works, on the same Python; **not run on a GPU**"
)
def test_its_fused_accumulation_needs_no_apex(engine_ranks: RankPool) -> None:
    engine_ranks.run(_fused_without_apex)


def _assert_equal(pool: RankPool, case: EngineCase | EngineMoeCase, tolerance: float = 0.0) -> dict[str, int]:
    """Compare; return how often each kind of module computed weight gradients on the last rank."""
    counts: dict[str, int] = {}
    for rank, (difference, counts, left) in enumerate(pool.run(compare_engine, case)):
        assert_near([difference], case, tolerance)
        assert not left
        kinds = [kind for kind in counts if not kind.endswith(" modules")]
        assert case.schedule == "stock" or "TELayerNormColumnParallelLinear" in kinds
        for kind in kinds:
            assert counts[kind] == counts[f"{kind} modules"] * case.num_microbatches * case.num_steps, (rank, counts)
    return counts


def _compare(rank: int, case: EngineCase) -> tuple[Any, list[str]]:
    from tests.support.transformer_engine import userbuffers

    records: list[logging.LogRecord] = []
    handler = SimpleNamespace(level=0, handle=records.append)
    logger = logging.getLogger("megatron.zerobubble.mcore.model.transformer_engine")
    logger.addHandler(handler)  # type: ignore[arg-type]
    try:
        with userbuffers.initialized():
            difference, _, left = compare_engine(rank, case)
    finally:
        logger.removeHandler(handler)  # type: ignore[arg-type]
    assert not left
    return difference, [record.getMessage() for record in records]


@pytest.mark.parametrize(
    "case", [EngineCase("zb-h1", 2, 4, num_layers=4, tensor_parallel=2, sequence_parallel=True, userbuffers=True)]
)
def test_a_model_with_the_defaults_of_megatron_core_trains_as_without_userbuffers(
    engine_ranks: RankPool, case: EngineCase
) -> None:
    """Which turn every overlap on: those that cannot go with W are turned off, and the log says which."""
    results = engine_ranks.run(_compare, case)
    for difference, _ in results:
        assert difference.unequal == ()
        assert difference.weights == 0
    (message,), *others = (messages for _, messages in results)
    assert not any(others), "one rank logs it"
    assert "tp_comm_overlap" in message
    assert all(name in message for name in ("bulk_wgrad", "bulk_dgrad", "overlap_ag"))


def test_bulk_wgrad_is_turned_off_before_the_model_is_built() -> None:
    config = SimpleNamespace(tp_comm_overlap=True, tp_comm_bulk_wgrad=True, tp_comm_bulk_dgrad=True, delay_wgrad_compute=False)
    defer_to_w(config)
    assert config.delay_wgrad_compute
    assert not config.tp_comm_bulk_wgrad
    assert config.tp_comm_bulk_dgrad, "modules have it turned off when they are split"
    without = SimpleNamespace(tp_comm_overlap=False, tp_comm_bulk_wgrad=True)
    defer_to_w(without)
    assert without.tp_comm_bulk_wgrad


def test_an_overlap_that_a_loop_turns_on_after_the_config_is_made_is_seen_where_the_model_is_built() -> None:
    """As frameworks do that keep overlaps in a config of their own."""
    built = []

    def original(_self: object, config: Any) -> None:
        built.append((config.delay_wgrad_compute, config.tp_comm_bulk_wgrad))

    loop: Any = SimpleNamespace(options=SimpleNamespace(is_v=False), turned_off=set())
    construct: Any = patches._building(loop, original)
    for ranks in (2, 1):
        options = {"tp_comm_overlap": True, "tp_comm_bulk_wgrad": True, "delay_wgrad_compute": False}
        construct(object(), SimpleNamespace(pipeline_model_parallel_size=ranks, **options))
    assert built == [(True, False), (False, True)]


class _Deferring(nn.Linear):
    """Speaks the contract of deferred weight gradients, and has an overlap that is not known here."""

    def __init__(self, **overlaps: bool) -> None:
        super().__init__(4, 4, bias=False)
        self.weight.skip_backward_post_hook = True  # type: ignore[assignment]
        vars(self).update(overlaps)

    def backward_dw(self) -> None:
        """Compute the gradient of the oldest entry of its queue."""

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        """Call `hook` after it."""


@pytest.mark.parametrize("name", ["ub_bulk_wgrad", "ub_overlap_of_a_later_release"])
def test_a_built_module_with_an_overlap_that_w_cannot_have_is_named(name: str) -> None:
    chunk = nn.ModuleDict({"good": _Deferring(ub_overlap_rs_dgrad=True), "bad": _Deferring(**{name: True})})
    with pytest.raises(SplitError, match=rf"bad \(.*_Deferring\) was built with {name}"):
        split_weight_gradients(chunk, WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate)))
