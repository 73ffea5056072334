"""FLOPs of a model, from its flags, against torch's count of the GEMMs that the model runs and against published formulas."""

from __future__ import annotations

import dataclasses
import os
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.zerobubble.mcore.compat import define_missing_te_gemm, destroy_model_parallel
from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.estimate.flops import flops_per_sample, iteration_flops
from megatron.zerobubble.training.initialize import set_up_model_parallel

with quiet_third_parties():
    from megatron.zerobubble.training.models.gpt import model_provider
    from megatron.zerobubble.training.models.mcore_config import transformer_config
    from megatron.zerobubble.training.step import ModelSetup

pytestmark = pytest.mark.claims(
    "Long runs",
    "progress lines read by a parser of Megatron-LM's; FLOPs of dense, GQA, SwiGLU, MoE, MLA and MTP models against torch's "
    "count of the GEMMs that they run; dry runs",
    "works",
    also=("training/estimate/test_dry_run.py", "training/config/test_model_flags.py", "training/metrics"),
)

BASE = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --lr 1e-3 --train-iters 1 "
    "--mock-data --make-vocab-size-divisible-by 48 --attention-backend local --hidden-dropout 0 --attention-dropout 0 "
)
VOCABULARY = 40
ROPE = "--position-embedding-type rope "


def settings(flags: str = "", *, world_size: int = 1) -> Settings:
    return settings_from_argv((BASE + flags).split(), world_size=world_size)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 2 --kv-channels 12",
        "--ffn-hidden-size 24 --untie-embeddings-and-output-weights --recompute-granularity selective",
        "--num-experts 4 --moe-layer-freq [0,1,1] --moe-router-topk 3 --moe-ffn-hidden-size 20 --swiglu "
        "--disable-bias-linear --moe-shared-expert-intermediate-size 28 --moe-shared-expert-gate",
        ROPE + "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 10",
        ROPE + "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 6 --qk-pos-emb-head-dim 4",
        ROPE + "--mtp-num-layers 2",
    ],
)
@pytest.mark.usefixtures("world_of_one")
def test_the_formula_counts_the_gemms_that_the_model_runs(flags: str) -> None:
    """torch counts the products of its forward and backward passes. megatron-core's own attention computes all scores, and the
    formula half of them; the scores that recomputation adds are not the model's."""
    asked = settings(flags)
    counted = _counted_by_torch(asked)
    ours = flops_per_sample(asked, vocab_size=VOCABULARY)
    scores = 2.0 * ours.scores * (4 / 3 if asked.model.recompute_granularity else 1)
    assert counted == ours.linears + scores + ours.head


def _counted_by_torch(asked: Settings) -> float:
    """FLOPs of one sample through the whole model."""
    with (
        mock.patch.dict(os.environ),
        HostDevice() as host,
        host.on_host(),
    ):
        for name in [name for name in os.environ if name.startswith("NVTE_")]:
            del os.environ[name]  # megatron-core set it where another test built a model
        define_missing_te_gemm()
        set_up_model_parallel(asked)
        try:
            setup = ModelSetup(
                settings=asked,
                config=transformer_config(asked, on_gpu=False, layout=None),
                padded_vocab_size=asked.padded_vocab_size(VOCABULARY),
                device=torch.device("cpu"),
            )
            model = model_provider(setup, True, True, None)
            tokens = torch.zeros(1, asked.model.seq_length, dtype=torch.int64)
            mask = torch.ones(1, 1, asked.model.seq_length, asked.model.seq_length).triu(1).bool()
            with FlopCounterMode(display=False) as counter:
                model(tokens, tokens, mask, labels=tokens, loss_mask=torch.ones(tokens.shape)).sum().backward()
        finally:
            destroy_model_parallel()
    return float(counter.get_total_flops())


def test_a_dense_gpt_is_the_published_formula_with_half_the_scores() -> None:
    """Formula 3 of arXiv 2104.04473, without recomputation."""
    model = settings("--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --global-batch-size 8")
    layers, hidden, sequence, vocabulary = 24, 1024, 2048, 50304
    published = 72 * 8 * sequence * layers * hidden**2 * (1 + sequence / (12 * hidden) + vocabulary / (12 * layers * hidden))
    assert iteration_flops(model, vocab_size=50257) == pytest.approx(published, rel=1e-12)


def test_a_gpt_in_hybrid_letters_has_the_same_flops() -> None:
    plain = settings()
    hybrid = dataclasses.replace(plain, model=dataclasses.replace(plain.model, num_layers=None, hybrid_layer_pattern="*-*|-*-"))
    assert flops_per_sample(hybrid, vocab_size=VOCABULARY) == flops_per_sample(plain, vocab_size=VOCABULARY)


def test_a_mamba_layer_is_its_projections_and_its_recurrence() -> None:
    """The widths of megatron-core's MambaMixer: e = 2h channels, 8 groups of 128 states, heads of 64 channels."""
    plain = settings()
    hybrid = dataclasses.replace(plain, model=dataclasses.replace(plain.model, num_layers=None, hybrid_layer_pattern="M"))
    hidden, inner, states = 32, 64, 8 * 128
    projections = hidden * (2 * inner + 2 * states + 1) + inner * hidden
    flops = flops_per_sample(hybrid, vocab_size=VOCABULARY)
    assert flops.linears == 6 * 16 * (projections + 4 * (inner + 2 * states) + 3 * inner * 128)
    assert flops.scores == 0


def test_flops_of_an_iteration_do_not_depend_on_the_number_of_ranks() -> None:
    """The vocabulary is padded to a multiple of the tensor-parallel size; otherwise ranks change nothing."""
    wide = settings("--tensor-model-parallel-size 2 --global-batch-size 8", world_size=4)
    flops = flops_per_sample(wide, vocab_size=50)
    assert iteration_flops(wide, vocab_size=50) == 8 * flops.total
    assert flops.head == 3 * 2 * 16 * 32 * 96
