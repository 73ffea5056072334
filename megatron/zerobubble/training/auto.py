"""--zero-bubble-schedule auto: profile the model, plan every schedule family with the profiled timings, choose the fastest.

A schedule decides which rank holds which layers, so it must be chosen before the model is built. The model is profiled in a
pipeline of its own, on the run's data, for a few iterations without optimizer steps, and that pipeline is torn down again. Rank 0
plans and broadcasts its choice. Then the run starts as if that schedule had been given by name, with fresh seeds and data.
"""

from __future__ import annotations

import gc
import logging
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.mcore.compat import destroy_model_parallel
from megatron.zerobubble.mcore.model.stage_layout import embedding_ranks
from megatron.zerobubble.mcore.replanner import Measured, budget_of, measured_costs
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.part_costs import PartCosts
from megatron.zerobubble.plan.planner import AUTO, AUTO_MEMORY_LIMIT, CostsOf, make_plan
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.profiling.profile import RankProfile
from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.samples import build_datasets, chunk_iterators, chunk_reads
from megatron.zerobubble.training.initialize import Job, set_up_model_parallel
from megatron.zerobubble.training.models.providers import ForwardStepProvider, ModelProvider
from megatron.zerobubble.training.setup import build_training_state
from megatron.zerobubble.training.step import TrainingState, run_passes

__all__ = ["choose_schedule", "costs_from"]

_log = logging.getLogger(__name__)

_ITERATIONS = 4
"""Profiled iterations: one warms up, in one memory is measured, the others are timed."""
_MOST_MICROBATCHES = 4


def choose_schedule(
    settings: Settings,
    job: Job,
    *,
    tokenizer: Any,
    model_provider: ModelProvider,
    forward_step_provider: ForwardStepProvider,
) -> Settings:
    """Profile the model and replace schedule `auto` in the settings by the fastest one. All ranks must call this.

    Args:
        settings: checked flags, with --zero-bubble-schedule auto.
        job: device and store of this rank.
        tokenizer: determines the vocabulary size and the data.
        model_provider: builds the module of one stage.
        forward_step_provider: makes the function that runs one microbatch through one chunk.

    Raises:
        ConfigError: with the measured memory, no schedule fits the memory limit.
    """
    probed = _probed(settings)
    set_up_model_parallel(probed, **embedding_ranks(probed.placement))
    training_state = build_training_state(
        probed,
        job,
        probed.schedule_spec,
        vocab_size=tokenizer.vocab_size,
        model_provider=model_provider,
        forward_step_provider=forward_step_provider,
    )
    profile = _profile(training_state, tokenizer, on_gpu=not job.host.enabled)
    own = Measured(profile=profile, link_ms=training_state.schedule.link_times())
    costs = measured_costs(own.gathered(), probed.placement)
    _tear_down(training_state)
    del training_state
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    answer: list[Any] = [_choice(costs, probed, settings) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ConfigError):
        raise answer[0]
    choice: _Choice = answer[0]
    return settings.with_schedule(choice.schedule, num_chunks=choice.num_chunks)


class _Choice(NamedTuple):
    """What `auto` chose."""

    schedule: str
    num_chunks: int
    """Model chunks per rank."""


def costs_from(costs: CostModel, measured: Settings, wanted: Settings) -> CostsOf:
    """Derive the costs of other placements of the same model from those of one placement.

    Args:
        costs: profiled costs of the stages of `measured`.
        measured: the settings that were profiled.
        wanted: the settings that divide the layers over the stages of other placements.

    Returns:
        placement -> costs. It raises PlanError for a placement over whose stages the layers cannot be divided.
    """
    layers = measured.stage_layers(measured.placement)
    parts = PartCosts.from_stages(costs, layers)

    def costs_of(placement: Placement) -> CostModel:
        if placement == measured.placement:
            return costs
        try:
            return parts.costs(wanted.stage_layers(placement))
        except ConfigError as error:
            raise PlanError(f"{placement.num_stages} stages: {error}") from None

    return costs_of


def _probed(settings: Settings) -> Settings:
    """The settings to profile: ZBV if there are enough layers, because its inner stages hold only layers even on two ranks."""
    limit = settings.plan_memory_limit
    for name in ("zbv", "zb"):
        probed = settings.with_schedule(name, memory_limit=None if limit is None else min(1.0, limit))
        try:
            probed.stage_layers(probed.placement)
        except ConfigError:
            continue
        return probed
    raise ConfigError(f"--num-layers {settings.num_layers} do not divide over {settings.pipeline_size} pipeline ranks")


def _profile(training_state: TrainingState, tokenizer: Any, *, on_gpu: bool) -> RankProfile:
    """Profile a few iterations without optimizer steps."""
    settings = training_state.settings
    num_microbatches = min(settings.num_microbatches, _MOST_MICROBATCHES)
    reads_by_chunk = [chunk_reads(chunk, settings) for chunk in training_state.chunks]
    datasets = build_datasets(settings, tokenizer, reads=any(reads_by_chunk))
    profiler = Profiler(training_state.device)
    for number in range(_ITERATIONS):
        for chunk in training_state.chunks:
            chunk.zero_grad_buffer()
        training_state.schedule.hooks.profiler = profiler if number > 0 else None
        first_batch = chunk_iterators(  # every iteration reads the same samples, so that a short dataset suffices
            datasets.train,
            settings,
            reads_by_chunk=reads_by_chunk,
            consumed=0,
            rank=parallel_state.get_data_parallel_rank(),
            on_gpu=on_gpu,
        )
        run_passes(training_state, first_batch, num_microbatches=num_microbatches, forward_only=False)
    return profiler.profile()


def _tear_down(training_state: TrainingState) -> None:
    training_state.schedule.close()
    if training_state.post_validation is not None:
        training_state.post_validation.close()
    destroy_model_parallel()


def _choice(costs: CostModel, probed: Settings, settings: Settings) -> _Choice | ConfigError:
    """Plan all schedule families with the costs profiled under `probed`; log the choice and the runner-up.

    Returns:
        The choice; or the error to raise on all ranks.
    """
    options = SearchOptions(
        memory_limit=settings.plan_memory_limit or AUTO_MEMORY_LIMIT,
        objective=Objective.with_optimizer(post_validation=settings.zero_bubble.enable_optimizer_post_validation),
        seed=settings.run.seed,
        budget=budget_of(settings.zero_bubble.zero_bubble_planning_seconds),
    )
    _log.info("profiled with schedule %s: %s", probed.zero_bubble.schedule, costs.times_text)
    try:
        result = make_plan(
            AUTO,
            num_ranks=settings.pipeline_size,
            num_microbatches=settings.num_microbatches,
            costs_of=costs_from(costs, probed, settings),
            options=options,
        )
    except ConfigError as error:
        return error
    except PlanError as error:
        return ConfigError(str(error))
    _log.info("%s", result.verdict(options.objective))
    return _Choice(result.name, result.num_chunks)
