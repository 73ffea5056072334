"""Flags of multi-latent attention: their meaning, and the errors before a job starts."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.models.mcore_config import transformer_config

pytestmark = pytest.mark.claims(
    "Layers",
    "MLA with tensor parallelism without `--sequence-parallel`, grouped-query attention, `--hybrid-layer-pattern`, norms "
    "without `--q-lora-rank`",
    "rejected",
)

MLA = "--multi-latent-attention "


TP = "--tensor-model-parallel-size 2 "


def settings(flags: str) -> Settings:
    model = "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --mock-data"
    return settings_from_argv(f"{model} --train-iters 10 --lr 1e-3 {flags}".split(), world_size=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kv-lora-rank 16", "--kv-lora-rank needs --multi-latent-attention"),
        ("--rope-type yarn", "--rope-type needs --multi-latent-attention"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "mla_up_proj needs --multi-latent-attention"),
        (MLA + "--rope-type linear", "invalid choice: 'linear'"),
        (MLA + "--kv-lora-rank 0", "--kv-lora-rank 0 must be greater than 0"),
        (MLA + "--qk-pos-emb-head-dim 5", "--qk-pos-emb-head-dim 5 is odd"),
        (MLA + "--group-query-attention --num-query-groups 2", "does not go with --group-query-attention"),
        (MLA + "--rotary-interleaved", "does not go with --rotary-interleaved"),
        (MLA + "--rotary-seq-len-interpolation-factor 2", "give --rotary-scaling-factor"),
        (MLA + "--add-qkv-bias", "its projections have no bias"),
        (MLA + "--qk-layernorm", "give --q-lora-rank, or leave it out"),
        (MLA + TP, "needs --sequence-parallel: without it nothing sums the gradient of the key"),
        (
            MLA + TP + "--sequence-parallel --kv-lora-rank 15",
            "--kv-lora-rank plus --qk-pos-emb-head-dim 79 is not divisible by --tensor-model-parallel-size 2",
        ),
        (
            MLA + TP + "--sequence-parallel --q-lora-rank 15",
            "--q-lora-rank 15 is not divisible by --tensor-model-parallel-size 2",
        ),
    ],
)
def test_what_does_not_go_together(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(flags)


def test_defaults_are_megatron_lms() -> None:
    """Its parser's, which are not those of MLATransformerConfig: without --q-lora-rank queries have no low rank."""
    config = transformer_config(settings(MLA), on_gpu=False, layout=None)
    assert (config.multi_latent_attention, config.q_lora_rank, config.kv_lora_rank) == (True, None, 32)
    assert (config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.rope_type, config.rotary_scaling_factor, config.mscale, config.mscale_all_dim) == ("yarn", 1.0, 1.0, 0.0)
    assert (config.original_max_position_embeddings, config.beta_fast, config.beta_slow) == (4096, 32, 1)
    assert (config.normalization, config.apply_rope_fusion) == ("LayerNorm", False)


def test_every_flag_reaches_the_configuration() -> None:
    given = {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "rotary_base": 500,
        "rotary_percent": 0.5,
    }
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    config = transformer_config(
        settings(f"{MLA}{flags} --recompute-granularity selective --recompute-modules mla_up_proj core_attn"),
        on_gpu=False,
        layout=None,
    )
    assert {name: getattr(config, name) for name in given} == given
    assert config.recompute_modules == ["mla_up_proj", "core_attn"]
