"""Flags of experts and MTP layers: their meaning, and the errors before a job starts."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.moe import layer_pattern
from megatron.zerobubble.training.config.settings import Settings

P2 = "--pipeline-model-parallel-size 2 "
EXPERTS = P2 + "--num-experts 4 "
ROPE = "--position-embedding-type rope "
TOPK_1 = EXPERTS + "--moe-router-topk 1 "


def settings(flags: str, world_size: int = 4) -> Settings:
    model = "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --mock-data"
    return settings_from_argv(f"{model} --train-iters 10 --lr 1e-3 {flags}".split(), world_size=world_size)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("1", (1, 1, 1, 1)),
        ("3", (1, 0, 0, 1)),
        ("[0,1,1,0]", (0, 1, 1, 0)),
        ("[0] + [1] * 3", (0, 1, 1, 1)),
        ("([0,1])*2", (0, 1) * 2),
    ],
)
def test_which_layers_have_experts(text: str, pattern: tuple[int, ...]) -> None:
    assert layer_pattern(text, 4) == pattern


@pytest.mark.parametrize(
    "text",
    ["0", "[0,1]", "[0,0,0,0]", "[0,1,2,0]", "[1]*99999999", "__import__('os')", "x", "", "[1]*4+1", "[[1]]*4", "-1", "True"],
)
def test_a_malformed_layer_pattern(text: str) -> None:
    with pytest.raises(ConfigError, match="neither a number nor a pattern of 4 layers"):
        layer_pattern(text, 4)


@pytest.mark.claims(
    "Layers",
    "`--recompute-modules mlp` with biases, which megatron-core's recomputation takes for results; grouped GEMM of local "
    "layers, overlapped shared experts",
    "rejected",
)
@pytest.mark.claims(
    "Layers",
    "in our own trainer: multi-token prediction with sharded gradients, with learned positions, or on a stage of its own",
    "rejected",
    also=("training/test_arguments.py",),
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (P2 + "--moe-router-topk 1", "--moe-router-topk needs --num-experts"),
        (P2 + "--expert-model-parallel-size 2", "--expert-model-parallel-size needs --num-experts"),
        (EXPERTS + "--expert-model-parallel-size 3", "--num-experts 4 does not divide over --expert-model-parallel-size 3"),
        (EXPERTS + "--expert-model-parallel-size 4", "size 4 x --expert-tensor-parallel-size 1 does not divide the 2 rank"),
        (EXPERTS + "--moe-router-topk 5", "--moe-router-topk 5 is more than --num-experts 4"),
        (TOPK_1, "add --moe-router-pre-softmax"),
        (EXPERTS + "--moe-layer-freq [1,0]", "neither a number nor a pattern of 8 layers"),
        (EXPERTS + "--moe-router-load-balancing-type loss", "'loss' is unknown; choose from aux_loss, seq_aux_loss"),
        (EXPERTS + "--moe-router-load-balancing-type aux_loss seq_aux_loss", "coeff has 1 values .* 2 kinds; give one value for"),
        (EXPERTS + "--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2", "none adds no loss"),
        (EXPERTS + "--moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid"),
        (EXPERTS + "--moe-router-num-groups 2", "need each other"),
        (EXPERTS + "--moe-router-num-groups 3 --moe-router-group-topk 1", "3 must divide --num-experts 4"),
        (EXPERTS + "--moe-shared-expert-intermediate-size 32", "do not support biases: add --disable-bias-linear"),
        (EXPERTS + "--moe-grouped-gemm", "leave it out to run the experts one by one"),
        (
            EXPERTS + "--tensor-model-parallel-size 2",
            "--num-experts with --tensor-model-parallel-size 2 needs --sequence-parallel",
        ),
        (P2 + "--mtp-num-layers 1", "--mtp-num-layers does not support learned position embeddings"),
        (
            P2 + "--mtp-num-layers 1 --enable-zero-bubble --zero-bubble-shard-gradients 2 --use-distributed-optimizer "
            "--untie-embeddings-and-output-weights " + ROPE,
            "--zero-bubble-shard-gradients 2 cannot be combined with --mtp-num-layers, whose embedding all-reduces whole",
        ),
        (P2 + "--mtp-num-layers 0 " + ROPE, "--mtp-num-layers 0 must be greater than 0"),
        (
            P2 + "--mtp-num-layers 1 --recompute-granularity full --recompute-method block --recompute-num-layers 1 " + ROPE,
            "needs --recompute-method uniform and --recompute-num-layers 1",
        ),
        (
            P2 + "--recompute-granularity selective --recompute-modules mlp layernorm",
            "--recompute-modules layernorm needs --transformer-impl transformer_engine",
        ),
        (P2 + "--recompute-granularity selective --recompute-modules mlp", "--recompute-modules mlp needs --disable-bias-linear"),
        (P2 + "--recompute-modules mlp", "--recompute-modules needs --recompute-granularity selective"),
        (
            P2 + "--recompute-granularity selective --recompute-modules mpl",
            "'mpl' is unknown; choose from core_attn, mla_up_proj",
        ),
    ],
)
def test_flags_that_exclude_each_other(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(flags)
