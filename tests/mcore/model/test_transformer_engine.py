"""A GPT whose linears are doubles of Transformer Engine's, through real schedules and megatron-core's DDP.

Transformer Engine itself needs CUDA and has not been run here: these tests show that whatever keeps its contract, as
`tests/support/te_double.py` writes it down, gets the right gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

from megatron.zerobubble.errors import SplitError
from tests.support.gpt import SEQUENCE, VOCABULARY, Case, Trainer, _largest, unpipelined
from tests.support.ranks import RankPool
from tests.support.te_double import TransformerEngineContractDouble, TransformerEngineContractDoubleParallel

Found = tuple[float, str, float, str, set[int]]


class _DoubledTrainer(Trainer):
    """Attention and MLP of doubles; the head stays megatron-core's own."""

    """`fuses`: with fused accumulation, which megatron-core refuses to its own head: apex is missing here."""

    fuses = False
    delays = True

    def _config(self) -> TransformerConfig:
        config = super()._config()
        config.transformer_impl = "transformer_engine"
        config.gradient_accumulation_fusion = self.fuses  # apex is missing here, and Transformer Engine does not need it
        return config

    def _provide(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
        self.config.delay_wgrad_compute &= self.delays
        spec = get_gpt_layer_local_spec()
        attention, mlp = (_submodules(getattr(spec.submodules, name)) for name in ("self_attention", "mlp"))
        attention.linear_qkv = attention.linear_proj = TransformerEngineContractDoubleParallel
        mlp.linear_fc1 = mlp.linear_fc2 = TransformerEngineContractDoubleParallel
        return GPTModel(
            config=self.config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=self.case.tied,
            vp_stage=vp_stage,
        )


def _submodules(spec: Any) -> Any:
    """Of a part of a layer: a ModuleSpec, or from megatron-core 0.18 on for the MLP a functools.partial."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


class _FusingTrainer(_DoubledTrainer):
    fuses = True


class _UndelayedTrainer(_DoubledTrainer):
    delays = False


def _compare(rank: int, case: Case, fuses: bool) -> Found:
    """How far a model of doubles is from the unpipelined one of megatron-core's linears; and how often each double computed."""
    assert not layers._grad_accum_fusion_available
    initial, expected = unpipelined(case.unpipelined)
    trainer = (_FusingTrainer if fuses else _DoubledTrainer)(case, initial)
    actual = trainer.train()
    counts = {
        module.num_computed
        for chunk in trainer.built.chunks
        for module in chunk.modules()
        if isinstance(module, TransformerEngineContractDouble)
    }
    own = [module for chunk in trainer.built.chunks for module in chunk.modules() if isinstance(module, ColumnParallelLinear)]
    assert not any(module.gradient_accumulation_fusion for module in own), "their own backward would call apex"
    assert not layers._grad_accum_fusion_available
    trainer.close()
    return *_largest(actual.gradients, expected.gradients), *_largest(actual.weights, expected.weights), counts


@pytest.mark.parametrize("fuses", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        (Case("zb-h2", 4, 6), 0.0),
        (Case("zbv", 2, 4, num_chunks=2, recompute="full"), 0.0),
        # DDP averages over two replicas: a sum of halves, in its own order. It asserts that each gradient is ready once, and
        # there.
        (Case("zbv", 2, 4, num_chunks=2, overlap_grad_reduce=True), 1e-6),
    ],
    ids=str,
)
@pytest.mark.sampled(0.34)
def test_same_as_the_unpipelined_model(four_ranks: RankPool, case: Case, tolerance: float, fuses: bool) -> None:
    for gradients, gradient, weights, weight, counts in four_ranks.run(_compare, case, fuses):
        assert gradients <= tolerance, gradient
        assert weights <= 50 * tolerance, weight  # Adam divides by gradients near 0
        assert counts == {case.num_microbatches * case.num_steps}


def _built_without(rank: int) -> str:
    with pytest.raises(SplitError) as caught:
        _UndelayedTrainer(Case("zb-h1", 4, 4))
    return str(caught.value)


def test_a_module_built_without_delay_wgrad_compute_is_rejected(four_ranks: RankPool) -> None:
    for message in four_ranks.run(_built_without):
        assert "linear_qkv.weight" in message
        assert "built without delay_wgrad_compute: set config.delay_wgrad_compute = True after" in message
