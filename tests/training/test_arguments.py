"""The flags of the reference trainer: Megatron-LM's spellings become fields of megatron-core, and a bad one is one line."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import torch
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.enums import AttnBackend

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.arguments import parse_arguments
from megatron.zerobubble.training.configs import Configs

BASE = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --lr 1e-3 --train-iters 10 "


def parsed(flags: str = "", *, world_size: int = 4, base: str = BASE + "--mock-data ") -> Configs:
    return parse_arguments(shlex.split(base + flags), world_size=world_size, on_cpu=True)


def test_sizes_follow_from_the_number_of_ranks() -> None:
    found = parsed("--pipeline-model-parallel-size 2 --global-batch-size 16").args
    assert (found.data_parallel_size, found.num_microbatches, found.num_chunks) == (2, 4, 1)
    assert parsed("--tensor-model-parallel-size 2").args.global_batch_size == 4


FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "--num-experts 4 --moe-layer-freq [0]+[1]*7": ("model", {"num_moe_experts": 4, "moe_layer_freq": [0, *[1] * 7]}),
    "--num-experts 4 --moe-layer-freq 2": ("model", {"moe_layer_freq": [1, 0] * 4}),
    "--disable-bias-linear --norm-epsilon 1e-6": ("model", {"add_bias_linear": False, "layernorm_epsilon": 1e-6}),
    "--group-query-attention --num-query-groups 2": ("model", {"num_query_groups": 2}),
    "--num-query-groups 2": ("model", {"num_query_groups": 4}),
    "--swiglu": ("model", {"gated_linear_unit": True, "ffn_hidden_size": 128, "activation_func": torch.nn.functional.silu}),
    "--attention-backend flash": ("model", {"attention_backend": AttnBackend.flash}),
    "--recompute-activations --recompute-modules core_attn mlp": (
        "model",
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ),
    "--num-experts 4 --moe-aux-loss-coeff 0.1": ("model", {"moe_aux_loss_coeff": 0.1}),
    "--bf16": ("model", {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}),
    "--no-bias-gelu-fusion": ("model", {"bias_activation_fusion": False}),
    "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2": (
        "model",
        {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False},
    ),
    "--bf16 ": ("ddp", {"grad_reduce_in_fp32": True}),
    "--use-distributed-optimizer": ("ddp", {"use_distributed_optimizer": True}),
    "--overlap-grad-reduce --no-overlap-grad-reduce": ("ddp", {"overlap_grad_reduce": False}),
    "--clip-grad 0.5 --adam-beta2 0.95 --weight-decay 0.1": ("optimizer", {"clip_grad": 0.5, "adam_beta2": 0.95, "lr": 1e-3}),
    "--fp16 --initial-loss-scale 1024": ("optimizer", {"fp16": True, "initial_loss_scale": 1024.0}),
    "--tokenizer-type NullTokenizer --vocab-size 99": ("tokenizer", {"known_vocab_size": 99}),
}


@pytest.mark.parametrize("flags", FIELDS)
def test_a_flag_is_a_field_of_megatron_core(flags: str) -> None:
    group, fields = FIELDS[flags]
    found = getattr(parsed(flags), group)
    assert {name: getattr(found, name) for name in fields} == fields


def test_multi_latent_attention_has_its_own_fields() -> None:
    found = parsed("--multi-latent-attention --q-lora-rank 32 --rope-type rope").model
    assert isinstance(found, MLATransformerConfig)
    assert (found.q_lora_rank, found.rope_type) == (32, "rope")


REFUSED = {
    "--bogus --num-layer 3 --foo=7": r"--num-layer \(did you mean --num-layers\?\), --bogus, --foo, which need megatron",
    "--hidden-size x": "argument --hidden-size: invalid int value: 'x'",
    "--seq-length 0": "--seq-length 0 must be greater than 0",
    "--lr nan": "argument --lr: nan is not a finite number",
    "--init-method-std inf": "argument --init-method-std: inf is not a finite number",
    "--eval-iters -1": "--eval-iters -1 must not be negative",
    "--tensor-model-parallel-size 3": "4 ranks do not divide by the .* sizes, together 3",
    "--global-batch-size 9": r"--global-batch-size 9 must be a multiple of --micro-batch-size 2 x 4 data-parallel ranks = 8",
    "--hidden-size 66 --num-attention-heads 6 --tensor-model-parallel-size 4": "megatron-core refuses these flags: num_attention",
    "--recompute-granularity full": "megatron-core refuses these flags: ",
    "--fp16 --bf16": "megatron-core refuses these flags: ",
    "--moe-layer-freq open('x')": r"is neither a number nor a list such as \[0\]\+\[1\]\*3",
    "--attention-backend best": "argument --attention-backend: invalid choice: 'best'",
    "--data-path x": "give either --data-path PREFIX .* or --mock-data",
    "--min-lr 1": "--min-lr 1.0 is larger than --lr 0.001",
    "--lr-warmup-fraction 1": "the warm-up of 10 iterations must be shorter than the decay of 10",
    "--save-interval 3": "--save-interval needs --save DIR",
    "--ckpt-step 3": "--ckpt-step needs --load DIR",
    "--tokenizer-type NullTokenizer": "--tokenizer-type NullTokenizer needs --vocab-size",
    "--pipeline-model-parallel-layout Et*3|t*5|L --pipeline-model-parallel-size 2": "has 3 stages, no multiple of 2",
    "--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2": "--num-layers 8 is no multiple of",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_bad_flag_is_one_line(flags: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[flags]) as refused:
        parsed(flags)
    assert "\n" not in str(refused.value)


def test_what_is_missing_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="the following arguments are required: --num-layers, --lr, --train-iters"):
        parsed(base="--hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --mock-data")


@pytest.mark.parametrize("flag", ["--num-layers", "--zero-bubble-v-schedule", "--moe-router-topk", "--save"])
def test_help_has_all_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    assert flag in capsys.readouterr().out
