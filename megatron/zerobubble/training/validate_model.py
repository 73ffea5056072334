"""Checks of the model's layers and how they are sharded, across groups of flags. `validate.check_settings` calls them."""

from __future__ import annotations

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.compat import has_hybrid_model
from megatron.zerobubble.plan.partition.hybrid_pattern import EXPERTS, MAMBA
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.training.config.moe import MoeConfig
from megatron.zerobubble.training.config.settings import Settings

__all__ = [
    "check_attention",
    "check_context_parallel",
    "check_dropout",
    "check_experts",
    "check_fp8",
    "check_hybrid",
    "check_latent_attention",
    "check_tensor_parallel",
]


def check_hybrid(settings: Settings) -> None:
    """Check --hybrid-layer-pattern with the other groups. Its number of stages is checked with those of other layouts."""
    pattern, parallel, zero_bubble = settings.model.hybrid_layer_pattern, settings.parallel, settings.zero_bubble
    if pattern is None:
        return
    flag = f"--hybrid-layer-pattern {pattern!r}"
    if not has_hybrid_model():
        raise ConfigError(f"{flag} needs megatron-core >= 0.18, which has HybridModel; the installed one does not")
    others = {
        "--pipeline-model-parallel-layout": parallel.pipeline_model_parallel_layout is not None,
        "--num-layers-per-virtual-pipeline-stage": parallel.num_layers_per_virtual_pipeline_stage is not None,
        "--num-virtual-stages-per-pipeline-rank": parallel.num_virtual_stages_per_pipeline_rank is not None,
        "--allow-padding-num-layers": parallel.allow_padding_num_layers,
    }
    for other, is_given in others.items():
        if is_given:
            raise ConfigError(f"{flag} divides the layers into stages where it has a |; leave out {other}")
    if settings.moe.moe_layer_freq != MoeConfig.moe_layer_freq:
        raise ConfigError(f"{flag} has an {EXPERTS} for every layer with experts; leave out --moe-layer-freq")
    if (EXPERTS in pattern) != (settings.moe.num_experts is not None):
        raise ConfigError(f"{flag}: {EXPERTS} (a layer with experts) and --num-experts need each other")
    if zero_bubble.schedule == AUTO:
        raise ConfigError(f"--zero-bubble-schedule auto needs layers of one kind, which {flag} does not have; leave it out")


def check_dropout(settings: Settings) -> None:
    """Raise if --layout-independent-dropout cannot make masks independent of the layout: each rank would draw its own."""
    model, parallel = settings.model, settings.parallel
    if not settings.run.layout_independent_dropout:
        return
    if model.attention_dropout > 0 and parallel.tensor_model_parallel_size > 1:
        raise ConfigError(
            "--layout-independent-dropout with tensor parallelism needs --attention-dropout 0: each rank has other heads, and "
            "draws masks of its own for them"
        )
    if model.hidden_dropout > 0 and (parallel.sequence_parallel or parallel.context_parallel_size > 1):
        other = (
            "--sequence-parallel" if parallel.sequence_parallel else f"--context-parallel-size {parallel.context_parallel_size}"
        )
        raise ConfigError(
            f"--layout-independent-dropout with {other} needs --hidden-dropout 0 and --attention-dropout 0: each rank has other "
            "tokens, and draws masks of its own for them"
        )


def check_attention(settings: Settings) -> None:
    """Raise unless torch has the kernels of --attention-backend on this device."""
    model = settings.model
    _check_rotary(settings)
    if model.attention_backend == "local" and settings.zero_bubble.zero_bubble_torch_attention:
        raise ConfigError(
            "--attention-backend local is megatron-core's own attention, and --zero-bubble-torch-attention replaces it: leave "
            "one of them out"
        )
    if settings.parallel.distributed_backend != "gloo" or model.transformer_impl != "local":
        return
    if model.attention_backend == "fused":
        raise ConfigError(
            "--attention-backend fused needs CUDA, and --distributed-backend is gloo: choose auto, flash, unfused or local"
        )
    if model.attention_backend == "flash" and model.attention_dropout > 0:
        raise ConfigError(
            f"--attention-backend flash with --attention-dropout {model.attention_dropout} needs CUDA, and --distributed-backend "
            "is gloo: give --attention-dropout 0, or choose auto"
        )


def _check_rotary(settings: Settings) -> None:
    """Raise unless rotary position embeddings can rotate the channels of a head in pairs. MLA has channels of its own."""
    model = settings.model
    if model.position_embedding_type != "rope" or settings.mla.multi_latent_attention:
        return
    rotated = int(model.head_width * model.rotary_percent)
    if rotated % 2 or rotated == 0:
        given = (
            f"--kv-channels {model.kv_channels}"
            if model.kv_channels is not None
            else (f"--hidden-size {model.hidden_size} / --num-attention-heads {model.num_attention_heads}")
        )
        share = "" if model.rotary_percent == 1.0 else f" x --rotary-percent {model.rotary_percent}"
        raise ConfigError(
            f"{given}{share} = {rotated} rotated channels per attention head; --position-embedding-type rope rotates pairs and "
            "needs an even number, 2 or more"
        )


def check_tensor_parallel(settings: Settings) -> None:
    """Raise unless heads, widths and the vocabulary divide over the tensor-parallel ranks."""
    model, size = settings.model, settings.parallel.tensor_model_parallel_size
    needs = {"--num-attention-heads": model.num_attention_heads}
    if settings.mla.multi_latent_attention and model.transformer_impl == "local":
        needs["--kv-lora-rank plus --qk-pos-emb-head-dim"] = settings.mla.kv_lora_rank + settings.mla.qk_pos_emb_head_dim
        if settings.mla.q_lora_rank is not None:
            needs["--q-lora-rank"] = settings.mla.q_lora_rank
    if model.group_query_attention:
        needs["--num-query-groups"] = model.num_query_groups
    if model.ffn_hidden_size is not None:
        needs["--ffn-hidden-size"] = model.ffn_hidden_size
    if settings.parallel.sequence_parallel:
        needs["--seq-length"] = model.seq_length
    for flag, value in needs.items():
        if value % size:
            raise ConfigError(f"{flag} {value} is not divisible by --tensor-model-parallel-size {size}")


def check_context_parallel(settings: Settings) -> None:
    """Raise unless sequences divide over the context-parallel ranks and every layer can shard them."""
    parallel, model = settings.parallel, settings.model
    size, kinds = parallel.context_parallel_size, parallel.cp_comm_type
    if size == 1:
        return
    flag = f"--context-parallel-size {size}"
    if model.seq_length % (2 * size):
        near = model.seq_length // (2 * size) * 2 * size or 2 * size
        raise ConfigError(
            f"--seq-length {model.seq_length} is not divisible by 2 x {flag} = {2 * size}: each rank holds two slices of equal "
            f"length; {near} would be"
        )
    tensor = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and model.seq_length // size % tensor:
        raise ConfigError(
            f"--seq-length {model.seq_length} over {flag} is {model.seq_length // size} tokens per rank, which "
            f"--sequence-parallel cannot divide over --tensor-model-parallel-size {tensor}"
        )
    if MAMBA in (model.hybrid_layer_pattern or ""):
        raise ConfigError(
            f"{flag} shards sequences, and Mamba layers ({MAMBA} in --hybrid-layer-pattern) need whole ones: leave one out"
        )
    if len(kinds) not in (0, 1, settings.num_layers):
        raise ConfigError(f"--cp-comm-type has {len(kinds)} values; give one, or one for each of {settings.num_layers} layers")
    if model.attention_backend == "local":
        raise ConfigError(f"{flag}: --attention-backend local needs whole sequences; choose auto, flash, fused or unfused")
    others = sorted(set(kinds) - {"all_gather"})
    if model.transformer_impl == "local" and others:
        raise ConfigError(
            f"--cp-comm-type {others[0]} is Transformer Engine's: with --transformer-impl local keys and values are "
            "all-gathered; give all_gather, or leave it out"
        )


def check_latent_attention(settings: Settings) -> None:
    """Raise for flags that multi-latent attention does not have."""
    mla, model = settings.mla, settings.model
    if not mla.multi_latent_attention:
        if "mla_up_proj" in model.recompute_modules:
            raise ConfigError("--recompute-modules mla_up_proj needs --multi-latent-attention")
        return
    problems = {
        "--group-query-attention: its heads share a latent vector instead of keys and values": model.group_query_attention,
        "--rotary-interleaved, which it does by itself": model.rotary_interleaved,
        "--rotary-seq-len-interpolation-factor; give --rotary-scaling-factor": (
            model.rotary_seq_len_interpolation_factor is not None
        ),
        "--add-qkv-bias: its projections have no bias": model.add_qkv_bias,
        "--hybrid-layer-pattern": model.hybrid_layer_pattern is not None,
    }
    for problem, is_given in problems.items():
        if is_given:
            raise ConfigError(f"--multi-latent-attention does not go with {problem}")
    size = settings.parallel.tensor_model_parallel_size
    if size > 1 and not settings.parallel.sequence_parallel:
        raise ConfigError(
            f"--multi-latent-attention with --tensor-model-parallel-size {size} needs --sequence-parallel: without it nothing "
            "sums the gradient of the key that all heads share over the tensor-parallel ranks"
        )
    if model.qk_layernorm and mla.q_lora_rank is None and model.transformer_impl == "local":
        raise ConfigError(
            "--qk-layernorm with --multi-latent-attention normalizes low-rank queries: give --q-lora-rank, or leave it out"
        )


def check_experts(settings: Settings) -> None:
    """Raise unless the experts divide over the ranks and their options go together."""
    moe, size = settings.moe, settings.parallel.tensor_model_parallel_size
    if moe.num_experts is None:
        return
    pattern = settings.moe_layer_pattern
    ranks, shared = settings.world_size // settings.pipeline_size, settings.expert_tensor_parallel_size
    if ranks % (shared * moe.expert_model_parallel_size):
        raise ConfigError(
            f"--expert-model-parallel-size {moe.expert_model_parallel_size} x --expert-tensor-parallel-size {shared} does not "
            f"divide the {ranks} rank(s) that hold the same layers; change one of them, or the number of ranks"
        )
    if size > 1 and not settings.parallel.sequence_parallel:
        raise ConfigError(f"--num-experts with --tensor-model-parallel-size {size} needs --sequence-parallel")
    if settings.model.add_bias_linear and (moe.moe_shared_expert_intermediate_size is not None or shared > 1):
        raise ConfigError(
            "--moe-shared-expert-intermediate-size and tensor-parallel experts do not support biases: add --disable-bias-linear"
        )
    if moe.moe_grouped_gemm and settings.model.transformer_impl == "local":
        raise ConfigError(
            "--moe-grouped-gemm with --transformer-impl local is one weight for all experts, whose wgrad cannot be deferred: "
            "leave it out to run the experts one by one, or use --transformer-impl transformer_engine"
        )
    if moe.moe_token_dispatcher_type == "flex" and shared * moe.expert_model_parallel_size == 1:
        raise ConfigError(
            "--moe-token-dispatcher-type flex sends tokens between ranks, and every rank has all experts: give "
            "--expert-model-parallel-size, or choose alltoall"
        )
    if settings.zero_bubble.schedule == AUTO and len(set(pattern)) > 1:
        raise ConfigError(
            "--zero-bubble-schedule auto needs layers of one kind, and --moe-layer-freq makes two; choose a schedule by name"
        )


def check_fp8(settings: Settings) -> None:
    """Raise unless layers and precision allow GEMMs in FP8."""
    fp8, model = settings.fp8, settings.model
    if fp8.fp8_format is None:
        return
    flag = f"--fp8-format {fp8.fp8_format}"
    if model.transformer_impl != "transformer_engine":
        raise ConfigError(f"{flag} needs --transformer-impl transformer_engine, not {model.transformer_impl}")
    if not (settings.precision.bf16 or settings.precision.fp16):
        raise ConfigError(f"{flag} needs --bf16 or --fp16: FP8 GEMMs add up to 16-bit results")
    if fp8.fp8_param_gather and not settings.parallel.use_distributed_optimizer:
        raise ConfigError("--fp8-param-gather needs --use-distributed-optimizer")
    if fp8.fp8_recipe == "delayed":
        for module in sorted({"moe_act", "layernorm"} & set(model.recompute_modules)):
            raise ConfigError(
                f"--recompute-modules {module} does not go with --fp8-recipe delayed, whose scales would advance twice: leave it "
                "out, or choose tensorwise"
            )
    most = settings.num_layers // settings.pipeline_size
    ends = max(fp8.num_layers_at_start_in_bf16, fp8.num_layers_at_end_in_bf16)
    if fp8.first_last_layers_bf16 and ends > most:
        raise ConfigError(
            f"--first-last-layers-bf16 with {ends} layers at one end: at most the {most} layer(s) of a pipeline rank stay in bf16"
        )
