"""Zero bubble in a training loop that is not ours: the flags, and the one line that installs what they say.

::

    import megatron.zerobubble

    megatron.zerobubble.add_zero_bubble_args(parser)            # a loop with Megatron's kind of parser, or
    megatron.zerobubble.install(parser.parse_args())            # megatron.zerobubble.install(schedule="zb-h1")
    ...                                                         # the loop, as it was

What a stock loop cannot give is refused by name: it zeroes gradients and moves the learning rate between the step and its
validation, so there are no early steps; nobody tells us of its optimizer, so there are no memory limits in bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.training.config.flags import add_group, flag_of
from megatron.zerobubble.training.config.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.training.initialize import read_launch

__all__ = ["add_zero_bubble_args", "install"]

_HONOURED = (
    *("enable_zero_bubble", "zero_bubble_max_pending_backward", "zero_bubble_v_schedule", "zero_bubble_schedule"),
    *("zero_bubble_v_schedule_mem_setup", "zero_bubble_memory_limit", "zero_bubble_load_plan"),
    *("zero_bubble_pipeline_timers_start_iter", "zero_bubble_pipeline_timers_end_iter", "zero_bubble_replan_interval"),
    "zero_bubble_planning_seconds",
)
"""Fields of `ZeroBubbleConfig` that mean something in a loop that is not ours."""

_WHY_NOT = {
    "enable_optimizer_post_validation": "a stock loop zeroes its gradients and moves the learning rate before the step is "
    "validated, and could then not take it again",
}


def add_zero_bubble_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `install` honours to `parser`, as a group of their own. They are those of pretrain_gpt.py."""
    add_group(parser, ZeroBubbleConfig, only=_HONOURED)


def install(
    args: argparse.Namespace | None = None,
    *,
    schedule: str | None = None,
    max_pending_backward: str | int | None = None,
    memory_limit: float | None = None,
    plan: str | None = None,
    optimizer_post_validation: bool = False,
) -> None:
    """Let a loop that is written for megatron.core run a zero-bubble schedule. Every rank must call it.

    Call it before the loop makes its TransformerConfig, and for schedules in a V before `initialize_model_parallel`. The loop
    builds as many model chunks a rank as the schedule has (two under V), as for megatron-core's interleaved schedule.

    Args:
        args: what a parser with `add_zero_bubble_args` parsed. If its flags choose no schedule, nothing is installed. Instead of
            the other arguments.
        schedule: zb-h1, zb-h2, zb, zbv, v-half, v-min, zb-interleaved ...; see --zero-bubble-schedule.
        max_pending_backward: instead of `schedule`: most microbatches between forward pass and weight gradient on a rank; "1p"
            and "2p" count in pipeline ranks.
        memory_limit: most activation memory on any rank, 1.0 is what 1F1B holds on the first one.
        plan: file of a plan to run.
        optimizer_post_validation: refused.

    Raises:
        CompatibilityError: the installed megatron-core is not one we know; says what differs.
        ConfigError: options that cannot be honoured, or others are installed.
        PlanError: the file holds no plan.
    """
    given: dict[str, Any] = {
        "zero_bubble_schedule": schedule,
        "zero_bubble_max_pending_backward": None if max_pending_backward is None else str(max_pending_backward),
        "zero_bubble_memory_limit": None if memory_limit is None else str(memory_limit),
        "zero_bubble_load_plan": plan,
        "enable_optimizer_post_validation": optimizer_post_validation,
    }
    if args is None:
        config = ZeroBubbleConfig(**given)
        if config.schedule == "stock" and schedule is None and not optimizer_post_validation:
            raise ConfigError("install was told nothing: give schedule, max_pending_backward, plan, or parsed flags")
    else:
        if any(value not in (None, False) for value in given.values()):
            raise ConfigError("install was given parsed flags and options of its own; give one of them")
        config = _from_flags(args)
    _refuse(config)
    if config.schedule != "stock":
        _install(config)


@dataclass(frozen=True)
class _SpecOf:
    """(pipeline ranks, chunks per rank) -> the schedule that the flags name. Equal for equal flags."""

    config: ZeroBubbleConfig

    def __call__(self, num_ranks: int, num_chunks: int) -> ScheduleSpec:
        limit = self.config.memory_limit
        return self.config.schedule_spec(
            num_ranks=num_ranks, num_chunks=num_chunks, memory_limit=None if limit is None else limit.relative
        )


def _from_flags(args: argparse.Namespace) -> ZeroBubbleConfig:
    fields = [field for field in dataclasses.fields(ZeroBubbleConfig) if hasattr(args, field.name)]
    if not fields:
        raise ConfigError("the parsed flags have none of ours: call megatron.zerobubble.add_zero_bubble_args(parser) first")
    return ZeroBubbleConfig(**{field.name: getattr(args, field.name) for field in fields})


def _refuse(config: ZeroBubbleConfig) -> None:
    for field in dataclasses.fields(config):
        if field.name not in _HONOURED and getattr(config, field.name) != field.default:
            why = _WHY_NOT.get(field.name, "it is a part of our own loop")
            raise ConfigError(
                f"{flag_of(field)} cannot be honoured in a loop that is not ours: {why}. Use pretrain_gpt.py for it"
            )
    if config.schedule == AUTO:
        raise ConfigError(
            f"schedule {AUTO} builds the model once to measure it, which a loop that is not ours cannot do: name a schedule, or "
            "let pretrain_gpt.py choose one"
        )
    if config.memory_limit is not None and not config.memory_limit.is_relative:
        raise ConfigError(
            f"--zero-bubble-memory-limit {config.zero_bubble_memory_limit}: in a loop that is not ours give a number, 1 is what "
            "1F1B's activations take; in bytes the limit would have to know the loop's optimizer"
        )


def _install(config: ZeroBubbleConfig) -> None:
    from megatron.zerobubble.mcore.replanner import Window
    from megatron.zerobubble.mcore.stock_loop.patches import install_options
    from megatron.zerobubble.mcore.stock_loop.stock_loop import StockLoopOptions

    timed = config.timed_iterations
    install_options(
        StockLoopOptions(
            schedule=config.schedule,
            spec_of=_SpecOf(config),
            timed=None if timed is None else Window(start=timed[0], end=timed[1], interval=config.zero_bubble_replan_interval),
            planning_seconds=config.zero_bubble_planning_seconds,
            has_single_queue=read_launch().has_single_queue,
        )
    )
