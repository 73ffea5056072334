"""Checks across groups of flags, before torch is loaded or a process group exists.

Each failure is an error of one line: what was given, what is allowed, what to do. Files are read; `validate_targets` tries
whether they could be written, and leaves nothing behind.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from packaging.version import Version

from megatron.zerobubble.errors import CheckpointError, ConfigError
from megatron.zerobubble.mcore.model.transformer_engine import OLDEST_TRANSFORMER_ENGINE
from megatron.zerobubble.plan.partition.hybrid_pattern import MAMBA
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.validate_data import check_data, check_documents
from megatron.zerobubble.training.validate_model import (
    check_attention,
    check_context_parallel,
    check_dropout,
    check_experts,
    check_fp8,
    check_hybrid,
    check_latent_attention,
    check_tensor_parallel,
)
from megatron.zerobubble.training.validate_schedule import (
    check_layers,
    check_plan,
    check_schedule,
    check_trace,
    check_watchdog,
)
from megatron.zerobubble.training.validate_targets import check_targets

__all__ = ["check_settings"]

_MOST_MICROBATCHES = 16_384
"""Microbatches of an iteration for which a plan is made, which takes about a second."""


def check_settings(settings: Settings, *, is_first: bool = True) -> None:
    """Raise unless a job with these settings can run.

    Args:
        settings: the flags.
        is_first: whether to do, too, what takes longer and one rank of a job does for all: read the whole index of each dataset,
            and try to write where the run will write.

    Raises:
        ConfigError: flags contradict each other, do not fit the number of ranks, or name a file that cannot be written.
        DataError: a dataset is missing or damaged, has a split without documents, or was made with another tokenizer or
            vocabulary.
        CheckpointError: the checkpoint to load does not exist.
    """
    _check_world(settings)
    check_schedule(settings)
    check_hybrid(settings)
    check_layers(settings)
    _check_batch(settings)
    check_plan(settings)
    check_attention(settings)
    check_dropout(settings)
    check_tensor_parallel(settings)
    check_context_parallel(settings)
    check_latent_attention(settings)
    check_experts(settings)
    check_fp8(settings)
    check_documents(settings)
    _check_installed(settings)
    _check_optimizer(settings)
    _check_gradients(settings)
    check_data(settings, reads_all=is_first)
    _check_checkpoint(settings)
    check_trace(settings)
    check_targets(settings, tries=is_first)
    check_watchdog(settings)


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


def _check_batch(settings: Settings) -> None:
    micro, data_parallel = settings.batch.micro_batch_size, settings.data_parallel_size
    step = micro * data_parallel
    if settings.global_batch_size % step:
        raise ConfigError(
            f"--global-batch-size {settings.global_batch_size} is not divisible by --micro-batch-size {micro} x "
            f"data-parallel size {data_parallel} = {step}; "
            f"{settings.global_batch_size // step * step + step} would be"
        )
    ranks, microbatches = settings.pipeline_size, settings.num_microbatches
    if microbatches > _MOST_MICROBATCHES and settings.zero_bubble.schedule != "stock":
        raise ConfigError(
            f"--global-batch-size {settings.global_batch_size} makes {microbatches:,} microbatches per iteration; plans have at "
            f"most {_MOST_MICROBATCHES:,}: give a smaller batch, or a larger --micro-batch-size"
        )
    if settings.zero_bubble.schedule != "stock" or settings.num_chunks == 1:
        return
    if ranks == 2 and not settings.parallel.overlap_p2p_communication:
        raise ConfigError(
            "the interleaved schedule on 2 pipeline ranks needs overlapped communication (without it megatron-core mixes up "
            "the two directions between them); leave out --no-overlap-p2p-communication"
        )
    if microbatches % ranks:
        raise ConfigError(
            f"the interleaved schedule needs a number of microbatches divisible by the pipeline size {ranks}, got "
            f"{microbatches}; change --global-batch-size to {(microbatches // ranks + 1) * ranks * step}"
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
    size = settings.global_batch_size
    warmup, decay = settings.lr_warmup_samples, settings.lr_decay_samples
    if warmup >= decay:
        raise ConfigError(
            f"the learning rate warm-up of {warmup / size:g} iterations must be shorter than the decay of {decay // size} "
            "(--lr-decay-iters, by default --train-iters)"
        )


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


def _check_checkpoint(settings: Settings) -> None:
    checkpoint = settings.checkpoint
    if checkpoint.load is None:
        return
    tracker = Path(checkpoint.load) / "latest_checkpointed_iteration.txt"
    resumes_itself = checkpoint.save is not None and Path(checkpoint.save) == Path(checkpoint.load)
    if checkpoint.ckpt_step is None and not tracker.is_file() and not resumes_itself:
        raise CheckpointError(
            f"--load {checkpoint.load}: there is no checkpoint ({tracker.name} is missing); "
            "leave --load out to start from newly initialized weights"
        )
