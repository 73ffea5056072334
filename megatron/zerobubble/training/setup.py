"""Sets up training on this rank: megatron-core's configuration, model chunks, schedule, optimizer.

The order matters: the schedule's placement decides which layers and embeddings are on a rank, linear layers must defer their
wgrad before DistributedDataParallel wraps the model, and the optimizer takes the wrapped chunks.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer

from megatron.zerobubble.flags.loop_options import Seeds
from megatron.zerobubble.mcore.build import ModelChunks, build_chunks
from megatron.zerobubble.mcore.engine import Engine
from megatron.zerobubble.mcore.model.stage_layout import pipeline_layout
from megatron.zerobubble.mcore.post_validation.optimizer import post_validation
from megatron.zerobubble.mcore.run_options import RunOptions
from megatron.zerobubble.mcore.state_memory import state_bytes
from megatron.zerobubble.optimizer.post_validation import PostValidation
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.initialize import Job, set_up_model_parallel
from megatron.zerobubble.training.models import mcore_config
from megatron.zerobubble.training.step import ForwardStepProvider, ModelProvider, ModelSetup, TrainingState

__all__ = ["build_training_state"]

_log = logging.getLogger(__name__)


def build_training_state(
    settings: Settings,
    job: Job,
    *,
    vocab_size: int,
    model_provider: ModelProvider,
    forward_step_provider: ForwardStepProvider,
) -> TrainingState:
    """Make the process groups, then this rank's model chunks, schedule and optimizer. All ranks must call this.

    Args:
        settings: checked flags; with a schedule other than `auto`.
        job: device and store of this rank.
        vocab_size: the tokenizer's vocabulary size, before padding.
        model_provider: builds the module of one stage.
        forward_step_provider: makes the function that runs one microbatch through one chunk.
    """
    set_up_model_parallel(settings)
    spec = settings.schedule_spec
    with job.host.on_host():
        setup = _model_setup(settings, job, vocab_size=vocab_size)
        built = build_chunks(
            partial(model_provider, setup),
            config=setup.config,
            ddp_config=mcore_config.ddp_config(settings),
            spec=spec,
            weights_seed=None if settings.run.init_by_rank else settings.run.seed,
        )
        optimizer = get_megatron_optimizer(mcore_config.optimizer_config(settings), built.chunks, use_gloo_process_groups=False)
        scheduler = mcore_config.scheduler(settings, optimizer)
    if settings.precision.fp16:
        setup.config.grad_scale_func = optimizer.scale_loss
    _count_parameters(built.chunks)
    return TrainingState(
        settings=settings,
        chunks=built.chunks,
        engine=_engine(settings, job, built, setup.config, optimizer),
        optimizer=optimizer,
        post_validation=None if spec.is_stock else _post_validation(settings, job, optimizer),
        scheduler=scheduler,
        forward_step=forward_step_provider(setup),
        device=job.host.device,
        on_host=job.host.on_host,
    )


def _model_setup(settings: Settings, job: Job, *, vocab_size: int) -> ModelSetup:
    placement = settings.schedule_spec.placement
    layout = pipeline_layout(settings.stage_layers(placement), placement, num_mtp_layers=settings.model.mtp_num_layers or 0)
    config = mcore_config.transformer_config(settings, on_gpu=not job.host.enabled, layout=layout)
    return ModelSetup(
        settings=settings,
        config=config,
        padded_vocab_size=settings.padded_vocab_size(vocab_size),
        device=job.host.device,
    )


def _timeout(settings: Settings) -> timedelta:
    return timedelta(minutes=settings.parallel.distributed_timeout_minutes)


def _post_validation(settings: Settings, job: Job, optimizer: Any) -> PostValidation:
    zero_bubble = settings.zero_bubble
    return post_validation(
        optimizer,
        optimistic=zero_bubble.enable_optimizer_post_validation,
        patience=zero_bubble.post_validation_patience,
        snapshot_on_host=zero_bubble.post_validation_snapshot == "host",
        waits=None if settings.watchdog_s is None else job.watch.waits,
    )


def _engine(settings: Settings, job: Job, built: ModelChunks, config: Any, optimizer: Any) -> Engine:
    run = settings.run
    engine = Engine(
        RunOptions(
            flags=settings.zero_bubble,
            seeds=Seeds(dropout=run.seed if run.layout_independent_dropout else None),
            search_seed=run.seed,
            timeout=_timeout(settings),
            ranks_on_host=job.launch.ranks_on_host,
            rank=job.launch.rank,
        ),
        settings.schedule_spec,
        built.chunks,
        store=built.store,
        config=config,
        num_microbatches=settings.num_microbatches,
        usual_tokens=settings.model.seq_length,
        state_bytes=partial(state_bytes, built.chunks, optimizer),
    )
    pipeline = torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    job.watch.begin_pipeline(pipeline)
    if settings.watchdog_s is not None:
        engine.schedule.hooks.watch = job.watch
    return engine


def _count_parameters(chunks: list[Any]) -> None:
    """Log the number of parameters of one data-parallel replica; tied weights count on every stage that holds them."""
    own = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    count = torch.tensor([own], dtype=torch.int64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(count, group=parallel_state.get_model_parallel_group())
    _log.info("model: %.2f million parameters", count.item() / 1e6)
