"""What a recipe's configuration meets before a job trains: the checks of `megatron.zerobubble`, in their order.

It is the configuration that is checked. What only a model of it shows, such as a weight that nobody can defer, is not.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.virtual_stages import with_chunks
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.config_checks import check_config, turn_off
from megatron.zerobubble.mcore.run_options import RunOptions, fields_to_set
from megatron.zerobubble.mcore.stock_loop.graph_options import check_graph_options
from megatron.zerobubble.mcore.stock_loop.layers import DividedLayers, layout_text
from megatron.zerobubble.overlay import chunks_of
from megatron.zerobubble.plan.partition.hybrid_pattern import HybridPattern
from megatron.zerobubble.plan.partition.stage_layers import StageLayers, regrouped_text
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from tools.recipes.files import Recipe, values_of

__all__ = ["DEFAULTS", "SCHEDULES", "Verdict", "verdict"]

SCHEDULES = ("auto", "zb-h1", "zbv")
ACCEPTED, ADAPTED, REFUSED = "accepted", "adapted", "refused"
DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(TransformerConfig) if field.default is not dataclasses.MISSING
}
"""megatron-core's own values of the fields of its configuration. Lists that each configuration has for itself are left out."""
_WITH_STEP = "overlap_param_gather_with_optimizer_step"
_FSDP = ("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of a recipe under a schedule."""

    kind: str
    """accepted, adapted or refused."""
    lines: tuple[str, ...] = ()
    """What was adapted, one line each; or why it is refused, one line for each option."""
    options: tuple[str, ...] = ()
    """The options that are refused."""


def verdict(recipe: Recipe, schedule: str) -> Verdict:
    """Feed a recipe with a pipeline to the checks.

    Args:
        recipe: its pipeline has several ranks.
        schedule: one of `SCHEDULES`.
    """
    flags = ZeroBubbleConfig(zero_bubble_schedule=schedule)  # type: ignore[arg-type]
    chunks, lines = chunks_of(flags), []  # type: ignore[arg-type]
    values = dict(recipe.values)
    if recipe.words is not None and chunks is not None:
        words, line = with_chunks(recipe.words, chunks, schedule, always=True)
        values = values_of(words)
        lines += [line] if line else []
    config = SimpleNamespace(**(copy.deepcopy(DEFAULTS) | values))
    options = RunOptions(flags=flags)
    refusals = []
    try:
        spec, line = _placed(config, options, chunks)
        lines += [line] if line else []
    except (ConfigError, AssertionError, ValueError) as error:  # ours, and megatron-core's own
        return Verdict(kind=REFUSED, lines=(str(error),), options=(_option(str(error)),))
    refusals += [f"{name}: the chunks must be wrapped by DistributedDataParallel" for name in _FSDP if values.get(name)]
    turned_off: set[str] = set()
    _quietly(turn_off, config, turned_off)
    lines += [f"turned off: {', '.join(sorted(turned_off))}"] if turned_off else []
    refusals += _refusals(config, spec, options)
    if refusals:
        return Verdict(kind=REFUSED, lines=tuple(refusals), options=tuple(dict.fromkeys(map(_option, refusals))))
    return Verdict(kind=ADAPTED if lines else ACCEPTED, lines=tuple(lines))


def _placed(config: Any, options: RunOptions, chunks: int | None) -> tuple[ScheduleSpec, str | None]:
    """The schedule for the configuration's pipeline, whose chunks and layout are set as the refusal says if they do not fit.

    Args:
        config: changed: it gets the layout that megatron-core makes of its own.
        options: the schedule.
        chunks: per rank, that the schedule takes; None: any number.

    Returns:
        The schedule, and the line that says which fields to set.

    Raises:
        ConfigError: it does not go with the pipeline.
    """
    num_ranks, line = int(config.pipeline_model_parallel_size), None
    given = getattr(config, "hybrid_layer_pattern", None)
    layout = None if config.pipeline_model_parallel_layout is None else layout_text(config.pipeline_model_parallel_layout)
    if layout is not None:
        parsed = StageLayers.parse(layout)
        detected = parsed.num_stages // num_ranks
        config.virtual_pipeline_model_parallel_size = detected if detected > 1 else None
        mtp = StageLayers.mtp_layers(layout)
        config.num_layers = config.num_layers or parsed.num_layers  # of a model that was not loaded
        config.mtp_num_layers = config.mtp_num_layers or (mtp and mtp[1])
    has_other_chunks = chunks is not None and (config.virtual_pipeline_model_parallel_size or 1) != chunks
    if has_other_chunks:
        assert chunks is not None
        line = fields_to_set(num_ranks, chunks, layout)
        if chunks == 1 and getattr(config, _WITH_STEP, False):
            line += f", and {_WITH_STEP}=False, which takes several chunks"
        config.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
        layout = None if layout is None else regrouped_text(layout, num_ranks * chunks)
    spec = options.spec(num_ranks=num_ranks, num_chunks=config.virtual_pipeline_model_parallel_size, layout=layout)
    config.pipeline_model_parallel_layout = layout
    if given:
        pattern = HybridPattern.parse(given)
        if options.is_v:
            (pattern.regrouped(spec.placement.num_stages) if has_other_chunks else pattern).over(spec.placement)
    elif options.is_v and config.num_layers:
        _quietly(DividedLayers(lambda *_: spec).divide, config)
    elif layout is not None and not options.is_v:
        config.pipeline_model_parallel_layout = PipelineParallelLayerLayout.from_str(layout, num_ranks)
    return spec, line


def _refusals(config: Any, spec: ScheduleSpec, options: RunOptions) -> list[str]:
    """Why the configuration is refused, for each option: the next one shows when the one before is off."""
    found: list[str] = []
    while True:
        try:
            check_graph_options(config, options)
            check_config(config, spec)
        except ConfigError as error:
            name = _option(str(error))
            if found and name == _option(found[-1]):
                return found
            found.append(str(error))
            setattr(config, name, DEFAULTS.get(name))
        else:
            return found


def _option(message: str) -> str:
    """The option that a refusal begins with, or the whole of it."""
    found = re.match(r"(\w+)(=\S+)? (does not go with|with m|\S*: )|(\w+): ", message)
    return message if found is None else (found[1] or found[4])


def _quietly(function: Any, *arguments: Any) -> None:
    """Call a check without what it logs, which is in the verdict."""
    logging.disable(logging.WARNING)
    try:
        function(*arguments)
    finally:
        logging.disable(logging.NOTSET)
