"""Checks of batch, schedule, stages, plan, trace and watchdog, which need all groups of flags and the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.length_model import Work
from megatron.zerobubble.plan.costs.slicing import check_slice_lengths, slice_lengths, unlike_lengths
from megatron.zerobubble.plan.registry import plan_of, schedule_info
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.training.config.settings import Settings

__all__ = [
    "check_batch",
    "check_layers",
    "check_length",
    "check_plan",
    "check_schedule",
    "check_slices",
    "check_trace",
    "check_watchdog",
]

_MOST_MICROBATCHES = 16_384
"""Microbatches of an iteration for which a plan is made, which takes about a second."""


def check_schedule(settings: Settings) -> None:
    """Raise unless the schedule fits the pipeline size, the optimizer and interleaving."""
    zero_bubble, parallel = settings.zero_bubble, settings.parallel
    if zero_bubble.schedule == "stock":
        if zero_bubble.enable_optimizer_post_validation:
            raise ConfigError(
                "--enable-optimizer-post-validation needs a schedule of this package: add --enable-zero-bubble or "
                "--zero-bubble-schedule, or leave it out"
            )
        return
    flag = "--zero-bubble-v-schedule" if zero_bubble.zero_bubble_v_schedule else f"schedule {zero_bubble.schedule}"
    is_loop = schedule_info(zero_bubble.family(settings.num_chunks)).placement == "loop"
    if parallel.is_interleaved and not is_loop:
        raise ConfigError(
            f"{flag} cannot be combined with --num-layers-per-virtual-pipeline-stage or "
            "--num-virtual-stages-per-pipeline-rank, which choose the interleaved schedule; leave one of them out"
        )
    if settings.pipeline_size < 2:
        raise ConfigError(f"{flag} fills the pipeline bubble and needs --pipeline-model-parallel-size of at least 2, got 1")


def check_layers(settings: Settings) -> None:
    """Raise unless the layers divide over the stages."""
    given, ranks = settings.parallel.num_layers_per_virtual_pipeline_stage, settings.pipeline_size
    per_rank, over = divmod(settings.model.num_layers, ranks)
    if given is not None and over == 0 and per_rank % given and not settings.parallel.allow_padding_num_layers:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {given} does not divide the {per_rank} layers of a pipeline rank; "
            f"choose from {', '.join(str(n) for n in range(1, per_rank + 1) if per_rank % n == 0)}"
        )
    layers = settings.stage_layers(settings.placement)
    if given is not None and max(layers.per_stage) != given:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {given}: {settings.model.num_layers} layers on {ranks} pipeline ranks make "
            f"stages of {max(layers.per_stage)}; give that or less"
        )
    if settings.zero_bubble.zero_bubble_balance_stages and settings.zero_bubble.schedule == "stock":
        raise ConfigError(
            "--zero-bubble-balance-stages measures passes of this package's executor and needs a schedule of this package: add "
            "--enable-zero-bubble, or for megatron-core's own order --zero-bubble-schedule 1f1b"
        )


def check_batch(settings: Settings) -> None:
    """Raise unless the batch divides into microbatches that the schedule can run."""
    micro, data_parallel = settings.data.micro_batch_size, settings.data_parallel_size
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
    if microbatches % ranks:
        raise ConfigError(
            f"the interleaved schedule needs a number of microbatches divisible by the pipeline size {ranks}, got "
            f"{microbatches}; change --global-batch-size to {(microbatches // ranks + 1) * ranks * step}"
        )


def check_length(settings: Settings) -> None:
    """Raise unless the run has an iteration, and the warm-up of the learning rate ends before its decay does."""
    if settings.train_iters < 1:
        raise ConfigError(
            f"--train-samples {settings.run.train_samples} is less than a global batch, of {settings.global_batch_size} samples"
        )
    unit, name, size = "samples", "samples", 1
    if settings.run.train_iters is not None:
        unit, name, size = "iterations", "iters", settings.global_batch_size
    warmup, decay = settings.lr_warmup_samples / size, settings.lr_decay_samples // size
    if warmup >= decay:
        raise ConfigError(
            f"the learning rate warm-up of {warmup:.10g} {unit} must be shorter than the decay of {decay} "
            f"(--lr-decay-{name}, by default --train-{name})"
        )


def check_slices(settings: Settings) -> None:
    """Raise unless sequences divide into slices, and everything of the model goes with them."""
    num_slices = settings.zero_bubble.num_slices
    flag = f"--zero-bubble-slices {settings.zero_bubble.zero_bubble_slices or num_slices}"
    if num_slices == 1:
        return
    for name, why in _unsliced(settings):
        raise ConfigError(f"{flag} does not go with {name}: {why}; leave one of them out")
    shared = settings.parallel.tensor_model_parallel_size if settings.parallel.sequence_parallel else 1
    lengths, tokens = settings.zero_bubble.slice_lengths, settings.model.seq_length
    try:
        if settings.zero_bubble.chooses_slices:
            unlike_lengths(tokens, multiple=shared)
        elif sum(lengths) == tokens:
            check_slice_lengths(lengths, tokens, multiple=shared)
        else:
            slice_lengths(Work(per_token=1.0), tokens, num_slices, multiple=shared)
    except ConfigError as error:
        raise ConfigError(f"{flag} with --seq-length {tokens}: {error}") from None


def _unsliced(settings: Settings) -> Iterator[tuple[str, str]]:
    """(flag, why) of each flag that slices do not go with."""
    parallel, moe, model = settings.parallel, settings.moe, settings.model
    if parallel.context_parallel_size > 1:
        yield "--context-parallel-size above 1", "both cut sequences, and each rank would hold parts of a slice"
    if model.mtp_num_layers and settings.optim.calculate_per_token_loss:
        yield "--calculate-per-token-loss with --mtp-num-layers", "MTP losses would be weighted by the tokens of a slice"
    if settings.fp8.fp8_format is not None:
        yield "--fp8-format", "scales would follow from the magnitudes of a slice"
    kinds = dict(zip(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff, strict=False))
    if moe.num_experts is not None and kinds.get("global_aux_loss"):
        yield (
            "--moe-router-load-balancing-type global_aux_loss",
            "its counts are a mean over the calls so far, and a slice is one (or choose aux_loss or seq_aux_loss)",
        )


def check_plan(settings: Settings) -> None:
    """Generate the plan once, so that the planner's errors are reported before the job starts, and check a loaded one."""
    zero_bubble = settings.zero_bubble
    if zero_bubble.schedule == "stock":
        return
    spec = settings.schedule_spec
    limit = settings.plan_memory_limit
    options = None if limit is None else SearchOptions(memory_limit=limit, budget=0.0)
    plan_of(spec, settings.num_microbatches, options=options)
    if zero_bubble.plan is None:
        return
    flag, num_microbatches = f"--zero-bubble-load-plan {zero_bubble.zero_bubble_load_plan}", zero_bubble.plan.num_microbatches
    if num_microbatches != settings.num_microbatches:
        raise ConfigError(
            f"{flag}: the plan is for {num_microbatches} microbatches, this run has {settings.num_microbatches} "
            "(--global-batch-size over --micro-batch-size and the data-parallel size)"
        )
    relative = None if zero_bubble.memory_limit is None else zero_bubble.memory_limit.relative
    try:
        validate(zero_bubble.plan, memory_limit=relative, costs=zero_bubble.plan_costs)
    except PlanError as error:
        raise type(error)(f"{flag}: {error}") from None


def check_trace(settings: Settings) -> None:
    """Raise unless the iterations to trace are among those of the run."""
    zero_bubble = settings.zero_bubble
    if zero_bubble.zero_bubble_trace is None:
        return
    late = sorted(number for number in zero_bubble.trace_iterations if number > settings.train_iters)
    if late:
        length = f"--train-iters {settings.train_iters}"
        if settings.run.train_samples is not None:
            length = f"--train-samples {settings.run.train_samples}: {settings.train_iters} iterations"
        raise ConfigError(f"--zero-bubble-trace-iterations: {', '.join(map(str, late))} come after the last one ({length})")


def check_watchdog(settings: Settings) -> None:
    """Raise unless the watchdog acts before process groups time out."""
    given, minutes = settings.zero_bubble.zero_bubble_watchdog_seconds, settings.parallel.distributed_timeout_minutes
    if given is None or given == 0:
        return
    if given >= 60 * minutes:
        raise ConfigError(
            f"--zero-bubble-watchdog-seconds {given:g} must be less than --distributed-timeout-minutes {minutes}, after which "
            f"process groups time out anyway: at most {60 * minutes - 1}"
        )
