"""Checks across groups of flags, before torch is loaded or a process group exists.

Each failure is an error of one line: what was given, what is allowed, what to do. Files are read, never written.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from packaging.version import Version

from megatron.zerobubble.errors import CheckpointError, ConfigError, DataError, PlanError
from megatron.zerobubble.mcore.compat import has_hybrid_model
from megatron.zerobubble.mcore.model.transformer_engine import OLDEST_TRANSFORMER_ENGINE
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.partition.hybrid_pattern import EXPERTS, MAMBA
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import plan_of, schedule_info, schedule_spec
from megatron.zerobubble.plan.search.search import SearchOptions
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.training.config.moe import MoeConfig
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.config.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.training.data.corpus import documents_of_splits, read_corpus_info

__all__ = ["check_settings"]


def check_settings(settings: Settings) -> None:
    """Raise unless a job with these settings can run.

    Raises:
        ConfigError: flags contradict each other or do not fit the number of ranks.
        DataError: a dataset is missing, has a split without documents, or was made with another tokenizer or vocabulary.
        CheckpointError: the checkpoint to load does not exist.
    """
    _check_world(settings)
    _check_schedule(settings)
    _check_hybrid(settings)
    _check_layers(settings)
    _check_batch(settings)
    _check_plan(settings)
    _check_attention(settings)
    _check_tensor_parallel(settings)
    _check_context_parallel(settings)
    _check_latent_attention(settings)
    _check_experts(settings)
    _check_fp8(settings)
    _check_installed(settings)
    _check_optimizer(settings)
    _check_gradients(settings)
    _check_data(settings)
    _check_checkpoint(settings)
    _check_trace(settings)
    _check_watchdog(settings)


def _check_world(settings: Settings) -> None:
    parallel, size = settings.parallel, settings.model_parallel_size
    if settings.world_size % size:
        raise ConfigError(
            f"the job has {settings.world_size} rank(s), which is not divisible by --tensor-model-parallel-size "
            f"{parallel.tensor_model_parallel_size} x --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size}"
            + (f" x --context-parallel-size {parallel.context_parallel_size}" if parallel.context_parallel_size > 1 else "")
            + f" = {size}; start it with torchrun --nproc-per-node {size}, or a multiple of it"
        )


def _check_schedule(settings: Settings) -> None:
    zero_bubble, parallel = settings.zero_bubble, settings.parallel
    if zero_bubble.schedule == "stock":
        if zero_bubble.enable_optimizer_post_validation:
            raise ConfigError(
                "--enable-optimizer-post-validation needs a schedule of this package: add --enable-zero-bubble or "
                "--zero-bubble-schedule, or leave it out"
            )
        return
    if zero_bubble.post_validation_rollback == "inverse" and settings.optim.optimizer != "adam":
        raise ConfigError(
            f"--post-validation-rollback inverse can roll back Adam only, and --optimizer is {settings.optim.optimizer}: "
            "choose exact, or --optimizer adam"
        )
    flag = "--zero-bubble-v-schedule" if zero_bubble.zero_bubble_v_schedule else f"schedule {zero_bubble.schedule}"
    is_loop = zero_bubble.schedule != AUTO and schedule_info(zero_bubble.schedule).placement == "loop"
    if parallel.is_interleaved and not is_loop:
        raise ConfigError(
            f"{flag} cannot be combined with --num-layers-per-virtual-pipeline-stage or "
            "--num-virtual-stages-per-pipeline-rank, which choose the interleaved schedule; leave one of them out"
        )
    if settings.pipeline_size < 2:
        raise ConfigError(f"{flag} fills the pipeline bubble and needs --pipeline-model-parallel-size of at least 2, got 1")


def _check_hybrid(settings: Settings) -> None:
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
    if zero_bubble.schedule == AUTO or zero_bubble.zero_bubble_balance_stages:
        other = "--zero-bubble-schedule auto" if zero_bubble.schedule == AUTO else "--zero-bubble-balance-stages"
        raise ConfigError(f"{other} needs layers of one kind, which {flag} does not have; leave it out")


def _check_layers(settings: Settings) -> None:
    given, ranks = settings.parallel.num_layers_per_virtual_pipeline_stage, settings.pipeline_size
    per_rank, over = divmod(settings.num_layers, ranks)
    if given is not None and over == 0 and per_rank % given and not settings.parallel.allow_padding_num_layers:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {given} does not divide the {per_rank} layers of a pipeline rank; "
            f"choose from {', '.join(str(n) for n in range(1, per_rank + 1) if per_rank % n == 0)}"
        )
    layers = settings.stage_layers(settings.placement)
    if given is not None and max(layers.per_stage) != given:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {given}: {settings.num_layers} layers on {ranks} pipeline ranks make "
            f"stages of {max(layers.per_stage)}; give that or less"
        )
    if settings.zero_bubble.zero_bubble_balance_stages and settings.zero_bubble.schedule == "stock":
        raise ConfigError(
            "--zero-bubble-balance-stages measures passes of this package's executor and needs a schedule of this package: add "
            "--enable-zero-bubble, or for megatron-core's own order --zero-bubble-schedule 1f1b"
        )


def _check_batch(settings: Settings) -> None:
    micro, data_parallel = settings.batch.micro_batch_size, settings.data_parallel_size
    step = micro * data_parallel
    if settings.global_batch_size % step:
        raise ConfigError(
            f"--global-batch-size {settings.global_batch_size} is not divisible by --micro-batch-size {micro} x "
            f"data-parallel size {data_parallel} = {step}; "
            f"{settings.global_batch_size // step * step + step} would be"
        )
    _check_rampup(settings, step)
    ranks, microbatches = settings.pipeline_size, settings.num_microbatches
    if settings.zero_bubble.schedule != "stock" or settings.num_chunks == 1:
        return
    if ranks == 2 and not settings.parallel.overlap_p2p_communication:
        raise ConfigError(
            "the interleaved schedule on 2 pipeline ranks needs overlapped communication (without it megatron-core mixes up "
            "the two directions between them); leave out --no-overlap-p2p-communication"
        )
    if settings.batch.rampup_batch_size:
        raise ConfigError(
            "--rampup-batch-size: the interleaved schedule needs every number of microbatches divisible by the pipeline size; "
            "leave one of them out, or choose a schedule of this package"
        )
    if microbatches % ranks:
        raise ConfigError(
            f"the interleaved schedule needs a number of microbatches divisible by the pipeline size {ranks}, got "
            f"{microbatches}; change --global-batch-size to {(microbatches // ranks + 1) * ranks * step}"
        )


def _check_rampup(settings: Settings, step: int) -> None:
    """Check --rampup-batch-size. `step`: samples of one microbatch on all data-parallel ranks."""
    if not settings.batch.rampup_batch_size:
        return
    first, increment, _ = settings.batch.rampup_batch_size
    given, last = f"--rampup-batch-size {first} {increment}", settings.global_batch_size
    if first >= last:
        raise ConfigError(f"{given}: the first batch size must be less than --global-batch-size {last}")
    if (last - first) % increment:
        raise ConfigError(f"{given}: {increment} does not divide the {last - first} samples up to --global-batch-size {last}")
    if first % step or increment % step:
        raise ConfigError(
            f"{given}: both must be divisible by --micro-batch-size x data-parallel size = {step}; "
            f"{-(-first // step) * step} and {-(-increment // step) * step} would be"
        )


def _check_plan(settings: Settings) -> None:
    """Generate the plan once, so that the planner's errors are reported before the job starts."""
    zero_bubble = settings.zero_bubble
    if zero_bubble.schedule == "stock":
        return
    if zero_bubble.schedule == AUTO:
        spec = schedule_spec("zb", num_ranks=settings.pipeline_size, num_chunks=settings.num_chunks)
    else:
        spec = settings.schedule_spec
    limit = settings.plan_memory_limit
    options = None if limit is None else SearchOptions(memory_limit=limit, budget=0.0)
    generated = plan_of(spec, settings.num_microbatches, options=options)
    if zero_bubble.zero_bubble_save_plan is not None:
        _check_writable(
            "--zero-bubble-save-plan",
            zero_bubble.zero_bubble_save_plan,
            Path(zero_bubble.zero_bubble_save_plan).absolute().parent,
        )
    if zero_bubble.plan is not None:
        _check_loaded(zero_bubble, zero_bubble.plan, generated)


def _check_loaded(zero_bubble: ZeroBubbleConfig, plan: Plan, wanted: Plan) -> None:
    """Raise unless a plan from a file fits the ranks, placement and microbatches of `wanted`, the plan of the chosen schedule."""
    flag, limit = f"--zero-bubble-load-plan {zero_bubble.zero_bubble_load_plan}", zero_bubble.memory_limit
    if plan.num_ranks != wanted.num_ranks:
        raise ConfigError(
            f"{flag}: the plan is for {plan.num_ranks} pipeline ranks, --pipeline-model-parallel-size is {wanted.num_ranks}"
        )
    if plan.placement != wanted.placement:
        raise ConfigError(
            f"{flag}: the plan's stages are on ranks {_listed(plan)} ({plan.placement.name} placement), those of schedule "
            f"{wanted.schedule} on {_listed(wanted)} ({wanted.placement.name} placement); choose another schedule or plan"
        )
    if plan.num_microbatches != wanted.num_microbatches:
        raise ConfigError(
            f"{flag}: the plan is for {plan.num_microbatches} microbatches, this run has {wanted.num_microbatches} "
            "(--global-batch-size over --micro-batch-size and the data-parallel size)"
        )
    try:
        validate(plan, memory_limit=None if limit is None else limit.relative, costs=zero_bubble.plan_costs)
    except PlanError as error:
        raise type(error)(f"{flag}: {error}") from None


def _listed(plan: Plan) -> str:
    return ", ".join(map(str, plan.placement.stage_to_rank))


def _check_writable(flag: str, given: str, folder: Path) -> None:
    """Raise unless the directory `folder`, where `flag` writes at the end of the run, is writable."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{flag} {given}: {folder} is not a writable directory")


def _check_attention(settings: Settings) -> None:
    """Raise unless torch has the kernels of --attention-backend on this device."""
    model = settings.model
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


def _check_tensor_parallel(settings: Settings) -> None:
    gather = settings.zero_bubble.zero_bubble_wgrad_gather
    if gather is not None and (settings.zero_bubble.schedule == "stock" or not settings.parallel.sequence_parallel):
        raise ConfigError(
            f"--zero-bubble-wgrad-gather {gather} chooses what W gathers along the sequence: it needs --sequence-parallel and a "
            "schedule of this package (--enable-zero-bubble); leave it out, or add those"
        )
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


def _check_context_parallel(settings: Settings) -> None:
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


def _check_latent_attention(settings: Settings) -> None:
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


def _check_experts(settings: Settings) -> None:
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
    if settings.zero_bubble.schedule == AUTO and len(set(pattern)) > 1:
        raise ConfigError(
            "--zero-bubble-schedule auto needs layers of one kind, and --moe-layer-freq makes two; choose a schedule by name"
        )


def _check_fp8(settings: Settings) -> None:
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


def _check_installed(settings: Settings) -> None:
    wanted = {}
    if settings.model.transformer_impl == "transformer_engine":
        remedy = (
            f"pip install 'transformer-engine[pytorch]>={OLDEST_TRANSFORMER_ENGINE}' on a machine with CUDA, or leave it out to "
            "use megatron-core's layers"
        )
        wanted["transformer_engine"] = ("--transformer-impl transformer_engine", remedy)
    if MAMBA in (settings.model.hybrid_layer_pattern or ""):
        wanted["mamba_ssm"] = ("M in --hybrid-layer-pattern", "pip install mamba-ssm causal-conv1d einops")
    if settings.logging.tensorboard_dir is not None:
        wanted["tensorboard"] = ("--tensorboard-dir", "pip install tensorboard")
    if settings.checkpoint.save is not None:
        wanted["psutil"] = ("--save", "pip install psutil (megatron-core's checkpoint writer needs it)")
    for package, (flag, remedy) in wanted.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{flag} needs the package {package}, which is not installed: {remedy}")
    if settings.model.transformer_impl == "transformer_engine":
        _check_transformer_engine(settings)
    settings.tokenizer.check()


def _check_transformer_engine(settings: Settings) -> None:
    """Raise unless the installed Transformer Engine supports the backend and the schedule."""
    if settings.parallel.distributed_backend == "gloo":
        raise ConfigError(
            "--transformer-impl transformer_engine needs CUDA, and --distributed-backend is gloo: leave one of them out"
        )
    installed = Version(importlib.metadata.version("transformer_engine"))
    if settings.zero_bubble.schedule != "stock" and installed < OLDEST_TRANSFORMER_ENGINE:
        raise ConfigError(
            f"--transformer-impl transformer_engine: version {installed} is installed, whose deferred weight gradients "
            f"DDP cannot follow; schedule {settings.zero_bubble.schedule} needs {OLDEST_TRANSFORMER_ENGINE} or later "
            f"(pip install 'transformer-engine[pytorch]>={OLDEST_TRANSFORMER_ENGINE}'), or leave it out"
        )


def _check_optimizer(settings: Settings) -> None:
    if settings.optim.optimizer == "sgd" and settings.parallel.use_distributed_optimizer:
        raise ConfigError("--use-distributed-optimizer shards Adam's state; leave it out with --optimizer sgd")
    warmup, decay = settings.lr_warmup_iters, settings.lr_decay_iters
    if warmup >= decay:
        raise ConfigError(
            f"the learning rate warm-up of {warmup:g} iterations must be shorter than the decay of {decay} "
            "(--lr-decay-iters, by default --train-iters)"
        )
    annealing = settings.optim.lr_wsd_decay_iters
    if settings.optim.lr_decay_style == "WSD" and annealing is not None and annealing > decay:
        raise ConfigError(f"--lr-wsd-decay-iters {annealing} is longer than the decay of {decay} iterations")


def _check_gradients(settings: Settings) -> None:
    """Check the data-parallel gradient reduction and --zero-bubble-shard-gradients."""
    parallel, model, size = settings.parallel, settings.model, settings.zero_bubble.zero_bubble_shard_gradients
    if parallel.ddp_bucket_size is not None and not parallel.overlap_grad_reduce and size is None:
        raise ConfigError("--ddp-bucket-size needs --overlap-grad-reduce")
    if parallel.ddp_average_in_collective and settings.optim.calculate_per_token_loss:
        raise ConfigError(
            "--ddp-average-in-collective averages over ranks and --calculate-per-token-loss over tokens; leave one of them out"
        )
    if size is None:
        return
    problems = {
        "needs --use-distributed-optimizer, which steps on shards": not parallel.use_distributed_optimizer,
        f"shards over data-parallel ranks, and there is {settings.gradient_reduction_size}": settings.gradient_reduction_size < 2,
        "needs --untie-embeddings-and-output-weights: tied weights all-reduce whole gradients over two stages": (
            not model.untie_embeddings_and_output_weights
        ),
        "cannot be combined with --mtp-num-layers, whose embedding all-reduces whole gradients over two stages": bool(
            model.mtp_num_layers
        ),
        "cannot be combined with --sequence-parallel, which all-reduces normalization gradients after the reduction": (
            parallel.sequence_parallel
        ),
        "cannot be combined with --qk-layernorm and tensor parallelism, which all-reduce its gradients after the reduction": (
            model.qk_layernorm and parallel.tensor_model_parallel_size > 1
        ),
    }
    for problem, is_given in problems.items():
        if is_given:
            raise ConfigError(f"--zero-bubble-shard-gradients {size} {problem}")


def _check_data(settings: Settings) -> None:
    if settings.data.mock_data:
        return
    sources, run = settings.data.sources, settings.run
    if sources.divided is not None:
        for prefix in sources.divided.prefixes:
            _check_dataset(settings, prefix)
            _check_splits(settings, prefix)
        return
    train, valid, _ = sources.per_split
    if train is None and not run.skip_train:
        raise ConfigError("no data to train on: give --train-data-path, or --skip-train to evaluate only")
    if valid is None and run.eval_iters > 0:
        raise ConfigError("no data to validate on: give --valid-data-path, or --eval-iters 0")
    for blend in sources.per_split:
        for prefix in () if blend is None else blend.prefixes:
            _check_dataset(settings, prefix)
            if sum(documents_of_splits(prefix, (1.0,))) == 0:
                raise DataError(f"{prefix} has no documents; leave it out")


def _check_dataset(settings: Settings, prefix: str) -> None:
    """Raise unless a dataset is there and was made with the tokenizer of the run."""
    for suffix in (".idx", ".bin"):
        if not Path(prefix + suffix).is_file():
            raise DataError(
                f"--data-path {prefix}: {prefix}{suffix} does not exist; give the prefix of a dataset made by "
                "tools/preprocess_data.py, without .bin or .idx"
            )
    info = read_corpus_info(prefix)
    if info is not None:
        info.check_matches(settings.tokenizer.tokenizer_type, settings.tokenizer.known_vocab_size)


def _check_splits(settings: Settings, prefix: str) -> None:
    """Raise if a split that the run reads has no documents: megatron-core would search for its samples forever."""
    data, run = settings.data, settings.run
    counts = documents_of_splits(prefix, data.split_weights)

    def check(name: str, count: int, is_read: bool, remedy: str) -> None:
        if is_read and count == 0:
            raise DataError(
                f"--split {data.split_text!r} leaves none of the {sum(counts)} document(s) of {prefix} for {name}; give a larger "
                f"share, such as --split 90,10,0, {remedy}or more documents"
            )

    training, validation, _ = counts
    check("training", training, not run.skip_train or data.split_weights[0] > 0.0, "a share of 0, " if run.skip_train else "")
    check("validation", validation, run.eval_iters > 0, "--eval-iters 0, ")


def _check_checkpoint(settings: Settings) -> None:
    checkpoint = settings.checkpoint
    if checkpoint.load is None:
        return
    tracker = Path(checkpoint.load) / "latest_checkpointed_iteration.txt"
    resumes_itself = checkpoint.save is not None and Path(checkpoint.save) == Path(checkpoint.load)
    may_be_empty = resumes_itself and not checkpoint.exit_on_missing_checkpoint
    if checkpoint.ckpt_step is None and not tracker.is_file() and not may_be_empty:
        remedy = "--exit-on-missing-checkpoint" if resumes_itself else "--load"
        raise CheckpointError(
            f"--load {checkpoint.load}: there is no checkpoint ({tracker.name} is missing); "
            f"leave {remedy} out to start from newly initialized weights"
        )


def _check_trace(settings: Settings) -> None:
    """Raise now if the trace could not be written at the end of the run."""
    zero_bubble = settings.zero_bubble
    if zero_bubble.zero_bubble_trace is None:
        return
    late = sorted(number for number in zero_bubble.trace_iterations if number > settings.run.train_iters)
    if late:
        raise ConfigError(
            f"--zero-bubble-trace-iterations: {', '.join(map(str, late))} come after the last one "
            f"(--train-iters {settings.run.train_iters})"
        )
    folder = Path(zero_bubble.zero_bubble_trace).absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    _check_writable("--zero-bubble-trace", zero_bubble.zero_bubble_trace, existing)


def _check_watchdog(settings: Settings) -> None:
    given, minutes = settings.zero_bubble.zero_bubble_watchdog_seconds, settings.parallel.distributed_timeout_minutes
    if given is None or given == 0:
        return
    if settings.zero_bubble.schedule == "stock":
        raise ConfigError(
            f"--zero-bubble-watchdog-seconds {given:g} watches this package's executor and needs a schedule of this package: add "
            "--enable-zero-bubble, or for megatron-core's own order --zero-bubble-schedule 1f1b"
        )
    if given >= 60 * minutes:
        raise ConfigError(
            f"--zero-bubble-watchdog-seconds {given:g} must be less than --distributed-timeout-minutes {minutes}, after which "
            f"process groups time out anyway: at most {60 * minutes - 1}"
        )
