"""Whether every rank called `install` with the same options, plan and packages. Compared before a model's first pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron.zerobubble.mcore.agreement import Given, check_same, text_digest, turn, versions
from megatron.zerobubble.mcore.run_options import RunOptions
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec

__all__ = ["check_same_options"]

_OWN = ("schedule", "cut", "checkpoints_by_parameter")
_OF_FLAGS = (
    *("timed_iterations", "zero_bubble_replan_interval", "zero_bubble_planning_seconds", "zero_bubble_p2p_max_ctas"),
    *("zero_bubble_torch_attention", "enable_optimizer_post_validation", "post_validation_patience"),
    *("zero_bubble_trace_iterations", "zero_bubble_balance_stages", "zero_bubble_watchdog_seconds"),
    *("zero_bubble_slice_positions", "zero_bubble_overlap_moe"),
    *("post_validation_snapshot", "zero_bubble_batch_p2p_comm"),
)
_OF_SPEC = ("max_pending_backward", "memory_limit", "placement", "num_slices")
_REMEDY = "call megatron.zerobubble.install with the same options on every rank, and install the same packages on every host"


def check_same_options(options: RunOptions, spec: ScheduleSpec) -> None:
    """Compare the options of all ranks of the world, which must all call this.

    Args:
        options: of `install`.
        spec: the schedule that they choose for this pipeline.

    Raises:
        ConfigError: they differ; the same line on every rank.
    """
    parts: tuple[tuple[Any, tuple[str, ...]], ...] = ((options, _OWN), (options.flags, _OF_FLAGS), (spec, _OF_SPEC))
    values = {name: Given(_text(getattr(part, name))) for part, names in parts for name in names}
    values |= {f"{name} of Seeds": Given(str(seed)) for name, seed in vars(options.seeds).items()}
    lengths = options.lengths
    values["tokens of MicrobatchLengths"] = Given("none" if lengths is None else _text(lengths.tokens))
    values["reorder of MicrobatchLengths"] = Given("none" if lengths is None else str(lengths.reorder))
    limit = options.flags.memory_limit
    if limit is not None and options.flags.limits_bytes:
        values["memory_limit"] = Given(f"{limit.total_bytes or 'auto'}")
    values["trace"] = Given("none" if options.flags.zero_bubble_trace is None else "a directory")
    plan = None if spec.loaded_plan is None else text_digest(spec.loaded_plan.to_json())
    values["plan"] = Given("none" if plan is None else f"a file ({plan[:8]})", plan)
    check_same(turn("options"), values | versions(), rank=dist.get_rank(), ranks=range(dist.get_world_size()), remedy=_REMEDY)


def _text(value: Any) -> str:
    return _name(value) if callable(value) else str(value)


def _name(function: Callable[..., Any]) -> str:
    """The qualified name of a function, or of the class of a callable object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
