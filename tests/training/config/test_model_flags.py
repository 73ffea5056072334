"""Flags of experts, MTP layers, multi-latent attention, FP8, Transformer Engine and gradients, and flags that are not ours: what
they become, and the errors before a job starts.
"""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest
from megatron.zerobubble.training.config import model as checks
from megatron.zerobubble.training.config.moe import layer_pattern
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.models.mcore_config import ddp_config, transformer_config

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.models import mcore_config
from tests.support.apex_double import APEX
from tests.training.test_arguments import BASE, settings

pytestmark = pytest.mark.claims(
    "Layers",
    "MLA with tensor parallelism without `--sequence-parallel`, grouped-query attention, norms without `--q-lora-rank`",
    "rejected",
)


P2 = "--pipeline-model-parallel-size 2 "
EXPERTS = P2 + "--num-experts 4 "
ROPE = "--position-embedding-type rope "
TOPK_1 = EXPERTS + "--moe-router-topk 1 "


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


MLA = "--multi-latent-attention "


TP = "--tensor-model-parallel-size 2 "


def test_defaults_are_megatron_lms() -> None:
    """Its parser's, which are not those of MLATransformerConfig: without --q-lora-rank queries have no low rank."""
    config = transformer_config(settings(MLA), on_gpu=False, layout=None)
    assert (config.multi_latent_attention, config.q_lora_rank, config.kv_lora_rank) == (True, None, 32)
    assert (config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim) == (128, 64, 128)
    assert config.rope_type == "rope", "Megatron-LM's is yarn, which scales to longer sequences"
    assert (config.normalization, config.apply_rope_fusion) == ("LayerNorm", False)


def test_every_flag_reaches_the_configuration() -> None:
    given = {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "rotary_base": 500,
    }
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    config = transformer_config(
        settings(f"{MLA}{flags} --recompute-granularity selective --recompute-modules mla_up_proj core_attn"),
        on_gpu=False,
        layout=None,
    )
    assert {name: getattr(config, name) for name in given} == given
    assert config.recompute_modules == ["mla_up_proj", "core_attn"]


ROPE = "--position-embedding-type rope"
ENGINE = "--transformer-impl transformer_engine --pipeline-model-parallel-size 4 --enable-zero-bubble --bf16"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine as if it were installed."""
    found = SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: object()), metadata=importlib.metadata)
    monkeypatch.setattr(checks, "importlib", found)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.20.2")


def parse(flags: str) -> Settings:
    return settings(f"{ENGINE} {flags}", world_size=4)


@pytest.mark.usefixtures("engine")
def test_without_a_format_megatron_cores_defaults_stay() -> None:
    assert parse("").fp8.model_options() == {}


@pytest.mark.claims(
    "Layers",
    "`--fp8-recipe mxfp8`, `blockwise`, `custom`; experts in FP8",
    "the flags arrive at megatron-core; **not run here**",
)
@pytest.mark.usefixtures("engine")
def test_what_the_flags_become() -> None:
    options = parse("--fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max").fp8.model_options()
    history = {"fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
    assert options == {"fp8": "hybrid", "fp8_recipe": "delayed", **history}
    from megatron.core.transformer import TransformerConfig

    assert set(options) <= set(TransformerConfig.__dataclass_fields__)


@pytest.mark.claims(
    "Layers",
    "FP8 flags that contradict each other; Transformer Engine missing, too old, or with `--distributed-backend gloo`",
    "rejected",
    also=("training/config/test_model_flags.py",),
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{ENGINE} --fp8-recipe tensorwise", "--fp8-recipe needs --fp8-format e4m3 or hybrid"),
        (
            f"{ENGINE} --fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-history-len 2",
            "--fp8-amax-history-len has no effect",
        ),
        (f"{ENGINE} --fp8-format hybrid --fp8-amax-history-len 0", "--fp8-amax-history-len 0 must be greater than 0"),
        (
            f"{ENGINE} --fp8-format hybrid --recompute-granularity selective --recompute-modules layernorm",
            "with --fp8-recipe delayed",
        ),
        ("--fp8-format hybrid --bf16", "--fp8-format hybrid needs --transformer-impl transformer_engine, not local"),
        ("--fp8-format hybrid --transformer-impl transformer_engine", "--fp8-format hybrid needs --bf16 or --fp16"),
    ],
)
@pytest.mark.usefixtures("engine")
def test_what_does_not_go_together_in_fp8(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(flags, world_size=4)


def test_they_reach_megatron_core_and_the_schedule() -> None:
    assert not ddp_config(settings("--bf16 --grad-reduce-in-bf16")).grad_reduce_in_fp32
    assert ddp_config(settings("--bf16")).grad_reduce_in_fp32
    assert ddp_config(settings("--accumulate-allreduce-grads-in-fp32")).grad_reduce_in_fp32


FLAG = "--transformer-impl transformer_engine --pipeline-model-parallel-size 4"


def test_it_has_to_be_installed() -> None:
    with pytest.raises(ConfigError, match=r"which is not installed: pip install 'transformer-engine\[pytorch\]>=2\.8\.0'"):
        settings(FLAG, world_size=4)


@pytest.mark.parametrize(
    ("version", "more", "message"),
    [
        ("2.7.0", "--enable-zero-bubble", r"version 2\.7\.0 is installed, .* schedule zb-h1 needs 2\.8\.0 or later"),
        ("2.8.0", "--enable-zero-bubble", None),
        ("2.8.0", "--enable-zero-bubble --distributed-backend gloo", "needs CUDA, and --distributed-backend is gloo"),
        ("2.2.0", "", None),
        ("2.10.0", "--zero-bubble-schedule zb-h2", None),
    ],
)
def test_it_has_to_fit(monkeypatch: pytest.MonkeyPatch, version: str, more: str, message: str | None) -> None:
    found = SimpleNamespace(find_spec=lambda _: object())
    monkeypatch.setattr(checks, "importlib", SimpleNamespace(util=found, metadata=SimpleNamespace(version=lambda _: version)))
    if message is None:
        settings(f"{FLAG} {more}", world_size=4)
    else:
        with pytest.raises(ConfigError, match=message):
            settings(f"{FLAG} {more}", world_size=4)


@pytest.mark.parametrize(
    ("flags", "apex", "fused"),
    [
        (FLAG, False, True),
        (f"{FLAG} --no-gradient-accumulation-fusion", True, False),
        ("--transformer-impl local", False, False),
        ("--transformer-impl local", True, True),
    ],
)
def test_its_fused_accumulation_needs_no_apex(monkeypatch: pytest.MonkeyPatch, flags: str, apex: bool, fused: bool) -> None:
    monkeypatch.setattr(
        checks, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: object()), metadata=importlib.metadata)
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.8.0")
    parsed = settings(flags, world_size=4)
    monkeypatch.setattr(mcore_config, "_is_installed", lambda package: apex or package != APEX)
    assert mcore_config._kernels(parsed.model, on_gpu=True)["gradient_accumulation_fusion"] is fused
    assert mcore_config._kernels(parsed.model, on_gpu=False)["gradient_accumulation_fusion"] is False


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("flags", "is_latent", "fused"),
    [(f"{ENGINE} {ROPE}", False, True), (ENGINE, False, False), (f"{ENGINE} {ROPE}", True, False), (ROPE, False, False)],
    ids=["rope", "learned", "latent", "local"],
)
def test_on_gpus_transformer_engine_rotates_in_one_kernel(flags: str, is_latent: bool, fused: bool) -> None:
    model = settings(flags, world_size=4).model
    assert mcore_config._kernels(model, on_gpu=True, is_latent=is_latent)["apply_rope_fusion"] is fused
    assert mcore_config._kernels(model, on_gpu=False)["apply_rope_fusion"] is False


NO_LENGTH = BASE.replace("--train-iters 10 ", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-iters 1 --lerning-rate 3", r"unrecognized arguments: --lerning-rate, which needs megatron-core .* \(--help"),
        ("--train-iters 1 --num-layer 3", "did you mean --num-layers"),
        ("--train-iters 1 --global-batchsize=3", "did you mean --global-batch-size"),
        ("--train-iters 1 --sft", "unrecognized arguments: --sft, which needs .* pretrain_gpt.py is Megatron-LM's own loop"),
        ("--train-iters 1 stray", "unrecognized arguments: stray"),
        ("", "the length of the run is missing: give --train-iters or --train-samples"),
        ("--train-iters 3 --lr-warmup-iters 3", "warm-up of 3 iterations must be shorter than the decay of 3"),
    ],
)
def test_flags_that_are_not_taken_or_missing(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings(flags, base=NO_LENGTH)
    assert "\n" not in str(caught.value)


@pytest.mark.claims(
    "Layers",
    "`--recompute-modules mlp` with biases, which megatron-core's recomputation takes for results; grouped GEMM of local "
    "layers, overlapped shared experts",
    "rejected",
)
@pytest.mark.claims(
    "Layers",
    "in our own trainer: multi-token prediction with learned positions, or on a stage of its own",
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
        (TOPK_1, "give --moe-router-score-function sigmoid"),
        (EXPERTS + "--moe-layer-freq [1,0]", "neither a number nor a pattern of 8 layers"),
        (EXPERTS + "--moe-router-load-balancing-type loss", "'loss' is unknown; choose from aux_loss, seq_aux_loss"),
        (EXPERTS + "--moe-router-load-balancing-type aux_loss seq_aux_loss", "coeff has 1 values .* 2 kinds; give one value for"),
        (EXPERTS + "--moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid"),
        (EXPERTS + "--moe-router-num-groups 2", "need each other"),
        (EXPERTS + "--moe-router-num-groups 3 --moe-router-group-topk 1", "3 must divide --num-experts 4"),
        (EXPERTS + "--moe-shared-expert-intermediate-size 32", "do not support biases: add --disable-bias-linear"),
        (EXPERTS + "--moe-grouped-gemm", "leave it out to run the experts one by one"),
        (EXPERTS + "--tensor-model-parallel-size 2", "--num-experts with --tensor-model-parallel-size 2 needs"),
        (P2 + "--mtp-num-layers 1", "--mtp-num-layers does not support learned position embeddings"),
        (P2 + "--mtp-num-layers 0 " + ROPE, "--mtp-num-layers 0 must be greater than 0"),
        (
            P2 + "--mtp-num-layers 1 --recompute-granularity full --recompute-method block --recompute-num-layers 1 " + ROPE,
            "needs --recompute-method uniform and --recompute-num-layers 1",
        ),
        (P2 + "--recompute-granularity selective --recompute-modules layernorm", "--recompute-modules layernorm needs"),
        (P2 + "--recompute-granularity selective --recompute-modules mlp", "--recompute-modules mlp needs --disable-bias-linear"),
        (P2 + "--recompute-modules mlp", "--recompute-modules needs --recompute-granularity selective"),
        (P2 + "--recompute-granularity selective --recompute-modules mpl", "'mpl' is unknown; choose from core_attn"),
        ("--kv-lora-rank 16", "--kv-lora-rank needs --multi-latent-attention"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "mla_up_proj needs --multi-latent-attention"),
        (MLA + "--kv-lora-rank 0", "--kv-lora-rank 0 must be greater than 0"),
        (MLA + "--qk-pos-emb-head-dim 5", "--qk-pos-emb-head-dim 5 is odd"),
        (MLA + "--group-query-attention --num-query-groups 2", "does not go with --group-query-attention"),
        (MLA + "--qk-layernorm", "give --q-lora-rank, or leave it out"),
        (MLA + TP, "needs --sequence-parallel: without it nothing sums the gradient of the key"),
        (MLA + TP + "--sequence-parallel --kv-lora-rank 15", "--kv-lora-rank plus --qk-pos-emb-head-dim 79 is not divisible by"),
        (MLA + TP + "--sequence-parallel --q-lora-rank 15", "--q-lora-rank 15 is not divisible by --tensor-model-parallel-size"),
    ],
)
def test_flags_that_exclude_each_other(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(flags)
