"""Whether every rank called `install` with the same options, plan and packages. Compared before a model's first pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron.zerobubble.mcore.agreement import Given, check_same, text_digest, turn, versions
from megatron.zerobubble.mcore.stock_loop.options import StockLoopOptions
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec

__all__ = ["check_same_options"]

_OF_SPEC = ("max_pending_backward", "memory_limit", "placement")
_REMEDY = "call megatron.zerobubble.install with the same options on every rank, and install the same packages on every host"


def check_same_options(options: StockLoopOptions, spec: ScheduleSpec) -> None:
    """Compare the options of all ranks of the world, which must all call this.

    Args:
        options: of `install`.
        spec: the schedule that they choose for this pipeline.

    Raises:
        ConfigError: they differ; the same line on every rank.
    """
    values = {field.name: Given(_text(getattr(options, field.name))) for field in dataclasses.fields(options)}
    del values["spec_of"]  # `spec` is its result
    values |= {field.name: Given(str(getattr(spec, field.name))) for field in dataclasses.fields(spec) if field.name in _OF_SPEC}
    if options.memory_limit is not None:
        values["memory_limit"] = Given(f"{options.memory_limit.total_bytes or 'auto'}")  # a host may run fewer ranks
    plan = None if spec.loaded_plan is None else text_digest(spec.loaded_plan.to_json())
    values["plan"] = Given("none" if plan is None else f"a file ({plan[:8]})", plan)
    check_same(turn("options"), values | versions(), rank=dist.get_rank(), ranks=range(dist.get_world_size()), remedy=_REMEDY)


def _text(value: Any) -> str:
    return _name(value) if callable(value) else str(value)


def _name(function: Callable[..., Any]) -> str:
    """The qualified name of a function, or of the class of a callable object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
