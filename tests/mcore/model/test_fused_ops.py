"""MLPs whose linears Transformer Engine's op fuser runs, under schedules that split B and W: bit for bit the unpipelined model.

megatron-core's own modules build and call Transformer Engine's own operations, in their basic form: the kernels that fuse them
need Blackwell GPUs, and leave operands in the same queues (`ops/fused/grouped_mlp.py`, `_compute_grad_params`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from packaging.version import Version
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.config_checks import check_config
from megatron.zerobubble.mcore.ddp.frozen_weights import check_frozen
from megatron.zerobubble.mcore.model import fused_ops, kept_in_b
from megatron.zerobubble.mcore.model.transformer_engine import fused_operations
from megatron.zerobubble.mcore.model.wgrad_split import driven_modules, remove_split
from megatron.zerobubble.plan.registry import schedule_spec
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.optimizer.support import Scenario, compare
from tests.support.comparisons import assert_near
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER
from tests.support.transformer_engine import chosen_version
from tests.support.transformer_engine.gpt import EngineCase, EngineMoeCase, compare_engine, driven_queues

_FIELDS = TransformerConfig.__dataclass_fields__
pytestmark = [
    pytest.mark.skipif(
        Version(chosen_version()) < Version("2.15"), reason="operations do not defer weight gradients before 2.15"
    ),
    pytest.mark.claims(
        "Layers",
        "Transformer Engine's op fuser (`use_transformer_engine_op_fuser`): experts and shared experts defer as one module, "
        "dense MLPs keep their weight gradients in B; ZB-H1, ZB-H2, ZBV, FP8, overlapped reduction, post-validation",
        "works, bit for bit, on the operations' own Python; their fused kernels are **not run** (they need Blackwell GPUs)",
    ),
]
needs_experts = pytest.mark.skipif("use_transformer_engine_op_fuser" not in _FIELDS, reason="experts are fused from 0.18 on")
needs_shared = pytest.mark.skipif("use_grouped_gemm_for_shared_expert" not in _FIELDS, reason="shared ones from 0.19 on")

ZB_H2 = EngineMoeCase("zb-h2", 2, 4, num_layers=4, op_fuser=True)
ZBV = EngineMoeCase("zbv", 2, 4, num_chunks=2, num_layers=4, op_fuser=True, fuses=True)
BESIDE = EngineMoeCase("zb-h1", 2, 4, num_layers=4, op_fuser=True, fuses=True, expert_parallel=2, overlap=True)
SHARED = {"dtype": torch.bfloat16, "shared": True, "fp8": "tensorwise"}


def _compare(rank: int, case: Any) -> Any:
    """`compare_engine`, where shared experts take the recipe of the case: megatron-core gives them one that needs Blackwell.

    Beside an all-to-all a unit of any size is computed.
    """
    if not getattr(case, "shared", False):
        fill = WeightGradStore.fill
        with mock.patch.object(WeightGradStore, "fill", lambda store, most: fill(store, 1000 * most)):
            return compare_engine(rank, case)
    from megatron.core.transformer.moe.shared_experts import FusedSharedExpertMLP
    from transformer_engine.common.recipe import Float8CurrentScaling, Format

    recipe = Float8CurrentScaling(fp8_format=Format.E4M3)
    with mock.patch.object(FusedSharedExpertMLP, "_get_fused_grouped_swiglu_recipe", return_value=recipe):
        return compare_engine(rank, case)


@needs_experts
@pytest.mark.parametrize(
    "case",
    [
        ZBV,
        ZB_H2,
        replace(ZB_H2, dtype=torch.bfloat16, fp8="tensorwise", fuses=True),
        replace(ZBV, layer_freq=(0, 1, 0, 1), recompute="full"),
        pytest.param(replace(ZBV, **SHARED), marks=needs_shared),
        pytest.param(replace(ZB_H2, **SHARED), marks=needs_shared),
        replace(ZBV, overlap_grad_reduce=True, different_data=True, adam_eps=1.0),
        replace(BESIDE, overlap_grad_reduce=True, different_data=True, adam_eps=1.0),
    ],
    ids=str,
)
@pytest.mark.sampled(0.3)
def test_experts_defer_as_one_module(engine_ranks: RankPool, case: EngineMoeCase) -> None:
    """With overlapped reduction over two replicas in another order of sums: 4e-6."""
    early = 0
    for rank, (difference, counts, left) in enumerate(engine_ranks.run(_compare, case)):
        assert_near([difference], case, OTHER_ORDER if case.overlap_grad_reduce else 0.0)
        assert not left
        units = {"TEGroupedMLP", *["FusedSharedExpertMLP"] * case.shared}
        assert units <= counts.keys()
        assert not any("Grouped" in kind for kind in counts if not kind.startswith("TEGroupedMLP"))
        early += counts["early modules"]
        for kind in units:
            assert counts[kind] == counts[f"{kind} modules"] * case.num_microbatches * case.num_steps, (rank, counts)
    assert bool(early) is case.overlap


def _compare_dense(rank: int, case: EngineCase) -> tuple[Any, Any, list[str]]:
    records: list[logging.LogRecord] = []
    handler: Any = SimpleNamespace(level=0, handle=records.append)
    kept_in_b._log.addHandler(handler)
    try:
        difference, counts, left = compare_engine(rank, case)
    finally:
        kept_in_b._log.removeHandler(handler)
    assert not left
    return difference, counts, [record.getMessage() for record in records]


@pytest.mark.parametrize(
    "case",
    [
        EngineCase("zbv", 2, 4, num_chunks=2, num_layers=4, op_fuser=True, fuses=True),
        EngineCase("zb-h1", 2, 4, num_layers=4, op_fuser=True),
    ],
    ids=str,
)
@pytest.mark.sampled(0.5)
def test_dense_mlps_keep_their_weight_gradients_in_b(engine_ranks: RankPool, case: EngineCase) -> None:
    messages = []
    for difference, counts, logged in engine_ranks.run(_compare_dense, case):
        assert_near([difference], case)
        attention = ("TELayerNormColumnParallelLinear modules", "TERowParallelLinear modules")
        assert {counts[kind] for kind in attention} == {case.num_layers // case.num_ranks}
        messages += logged
    assert messages
    assert all("fused MLPs, with " in each for each in messages)


def _in_parts(rank: int) -> None:
    """What a unit does outside of schedules, and where it is kept in B."""
    case = replace(ZB_H2, num_layers=2, num_microbatches=2)
    trainer = case.trainer()
    unit = next(each for each in trainer.chunks[0].modules() if type(each).__name__ == "TEGroupedMLP")
    trainer.train()
    queues = driven_queues(unit)
    assert len(queues) == 2
    (driven,) = (each for each in driven_modules(trainer.chunks[0]) if each.is_of({id(unit)}))
    assert {each.dim() for each in driven.weights} == {2}
    hidden = torch.randn(4, 32, requires_grad=True)
    counts = torch.tensor([1, 0, 3, 0])
    output, _ = unit(hidden, counts, torch.rand(4))
    torch.autograd.grad(output.sum(), hidden)
    assert not any(map(len, queues)), "nobody wants the weight gradients of this backward pass"
    before = unit.linear_fc1.weight0.main_grad.clone()
    output, _ = unit(hidden, counts, torch.rand(4))
    output.sum().backward()
    assert not any(map(len, queues)), "outside of a B they are computed at once"
    assert not torch.equal(unit.linear_fc1.weight0.main_grad, before)
    unit.linear_fc1.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"experts.linear_fc1.weight0 was frozen .* and .*experts.linear_fc2.weight0 was not"):
        check_frozen(trainer.chunks)
    remove_split(trainer.chunks[0])
    assert not any(fused_operations(unit))
    assert "_make_fused_ops" not in vars(unit)
    trainer.close()


@needs_experts
def test_fused_experts_of_a_release_that_makes_them_otherwise_are_refused() -> None:
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    config, spec = SimpleNamespace(use_transformer_engine_op_fuser=True), schedule_spec("zb-h1", num_ranks=2, num_chunks=1)
    check_config(config, spec)
    with (
        mock.patch.object(TEGroupedMLP, "__init__", nn.Module.__init__),
        pytest.raises(ConfigError, match="op_fuser does not go"),
    ):
        check_config(config, spec)


@needs_experts
def test_a_unit_outside_of_schedules(engine_ranks: RankPool) -> None:
    engine_ranks.run(_in_parts)


def _compare_kept(rank: int, case: EngineMoeCase, is_old: bool) -> Any:
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    old = mock.patch.object(fused_ops, "is_te_min_version", return_value=False)
    with old if is_old else mock.patch.object(TEGroupedMLP, "wgrad_in_backward", True, create=True):
        return compare_engine(rank, case)


@needs_experts
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.sampled(0.5)
def test_a_unit_that_says_so_or_cannot_defer_keeps_its_weight_gradients_in_b(engine_ranks: RankPool, is_old: bool) -> None:
    for difference, counts, left in engine_ranks.run(_compare_kept, ZBV, is_old):
        assert_near([difference], ZBV)
        assert not left
        assert not any("Grouped" in kind for kind in counts)


@needs_experts
@pytest.mark.sampled(0.5)
def test_a_rollback_restores_the_scales_of_fused_operations(engine_ranks: RankPool) -> None:
    case = replace(ZB_H2, dtype=torch.bfloat16, fp8="delayed", clip_grad=1e3, fuses=True)
    scenario = Scenario("clipped, delayed scales", case, spikes={(3, 1): 1e4}, redone=(3,))
    for rank, (differences, redone, _) in enumerate(engine_ranks.run(compare, scenario)):
        assert differences == [], rank
        assert tuple(redone) == scenario.redone, rank
