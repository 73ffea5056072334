"""The layers of each stage under V, from any option by which megatron-core divides them.

Every option means what it means in megatron-core's interleaved schedule with the same chunks per rank: its stages, in the order
data flows, are the stages of one V, or of two (ZB-W). Only the ranks that have them differ, so that the first and the last stage
are on rank 0.

==========================================  ===================================================================================
`pipeline_model_parallel_layout`            the stages as given: a text, a list of lists, or megatron-core's own object
`account_for_embedding_in_pipeline_split`   the first stage has one layer fewer
`account_for_loss_in_pipeline_split`        the last stage has one layer fewer
`num_layers_in_first_pipeline_stage`        the first stage's share of them, half for two chunks, rounded down
`num_layers_in_last_pipeline_stage`         the last stage's share of them; other stages stay even
none                                        an equal number, or where that is impossible, stages that differ by one (`balanced`)
==========================================  ===================================================================================

megatron-core refuses a layout beside the other options, and asks the layout first. So they are off while it checks the
configuration, and then again what the loop has set: a configuration made from this one is divided anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.compat import has_hybrid_model
from megatron.zerobubble.mcore.model.stage_layout import StageLayout
from megatron.zerobubble.mcore.run_options import fields_to_set
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec

__all__ = ["DividedLayers", "layout_text"]

_log = logging.getLogger(__name__)

_LAYOUT = "pipeline_model_parallel_layout"
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
_OFF: dict[str, Any] = {_FIRST: None, _LAST: None, _EMBEDDING: False, _LOSS: False}
"""The options that megatron-core refuses beside a layout, and their value when off."""
_LETTERS = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m", LayerType.loss: "L"}


class DividedLayers:
    """Gives the configurations of a loop a layout for the V placement.

    Args:
        spec_of: (pipeline ranks, chunks per rank or None, the layout's text or None) -> the schedule. Raises ConfigError.
    """

    def __init__(self, spec_of: Callable[[int, int | None, str | None], ScheduleSpec]) -> None:
        self._spec_of = spec_of
        self._logged: set[str] = set()
        """Layouts that stages of unequal size got by default: a loop may make a configuration per microbatch."""

    def divide(self, config: Any) -> dict[str, Any]:
        """Set the layout of a new `config` before megatron-core checks it, and turn off the options that it replaces.

        Returns:
            Their values by name: set them again when the check is done.

        Raises:
            ConfigError: an option that cannot be followed; the message names it.
        """
        num_ranks, layout = config.pipeline_model_parallel_size, getattr(config, _LAYOUT)
        on = {name: getattr(config, name) for name, off in _OFF.items() if getattr(config, name) != off}
        if isinstance(layout, StageLayout) and layout.is_derived:
            layout = None
        if on and (layout is not None or len({name in (_FIRST, _LAST) for name in on}) > 1):
            return {}  # megatron-core's check, which comes next, says that they exclude each other
        num_chunks = config.virtual_pipeline_model_parallel_size
        if layout is None:
            spec = self._spec_of(num_ranks, num_chunks, None)
            layers, mtp_stage = self._divided(config, on, spec), None
        else:
            text = layout_text(layout)
            layers, mtp_stage = _parsed(text, config)
            if num_chunks is None and layers.num_stages > num_ranks and layers.num_stages % num_ranks == 0:
                num_chunks = layers.num_stages // num_ranks  # as megatron-core takes it from the layout
            spec = self._spec_of(num_ranks, num_chunks, text)
            if layers.num_stages != spec.placement.num_stages:
                raise ConfigError(
                    f"{_LAYOUT} {quoted(text)} has {layers.num_stages} stages, and schedule {spec.name} on {num_ranks} pipeline "
                    f"ranks needs {spec.placement.num_stages}, {spec.num_chunks} per rank in the order data flows: "
                    f"{fields_to_set(num_ranks, spec.num_chunks, text)}"
                )
        try:
            divided = StageLayout(
                layers,
                spec.placement,
                num_mtp_layers=config.mtp_num_layers or 0,
                mtp_stage=mtp_stage,
                is_derived=layout is None,
            )
        except ConfigError as error:
            raise ConfigError(f"{_LAYOUT}: {error}") from None
        setattr(config, _LAYOUT, divided)
        for name in on:
            setattr(config, name, _OFF[name])
        return on

    def _divided(self, config: Any, on: dict[str, Any], spec: ScheduleSpec) -> StageLayers:
        """The layers of each stage, by the options that are on."""
        num_layers, placement, mtp = config.num_layers, spec.placement, config.mtp_num_layers or 0
        if not on:
            why = "they do not divide evenly"
            try:
                layers = StageLayers.spread(num_layers, placement)
            except ConfigError as error:
                if num_layers < placement.num_stages - 2:
                    hint = "; a HybridModel needs a TransformerConfig with is_hybrid_model=True" if has_hybrid_model() else ""
                    raise ConfigError(f"num_layers={num_layers}: {error}{hint}") from None
                layers = StageLayers.balanced(num_layers, placement, last=mtp)
        elif _FIRST in on or _LAST in on:
            layers, why = _with_ends(num_layers, on, placement), _text(on)
        else:
            layers = StageLayers.balanced(num_layers, placement, first=_EMBEDDING in on, last=_LOSS in on)
            why = _text(on)
        empty = [stage for stage, count in enumerate(layers.per_stage[1:-1], start=1) if not count]
        if empty:
            raise ConfigError(
                f"{why if on else f'num_layers={num_layers}'}: {num_layers} layers leave stage {empty[0]} of "
                f"{placement.num_stages} ({placement.name} placement) without one; use fewer pipeline ranks, or give {_LAYOUT}"
            )
        if not layers.is_even and layers.text not in self._logged and not (dist.is_initialized() and dist.get_rank()):
            self._logged.add(layers.text)
            mtp_text = f", and {mtp} MTP layer(s) on the last" if mtp else ""
            _log.warning(
                "schedule %s divides %d layers over %d stages as %s%s (%s); give %s, stages in the order data flows, for others",
                *(spec.name, num_layers, placement.num_stages, layers.text, mtp_text, why, _LAYOUT),
            )
        return layers


def _with_ends(num_layers: int, on: dict[str, Any], placement: Placement) -> StageLayers:
    """The first and the last stage with their share of what is given, and the others as even as whole layers allow."""
    given, num_chunks = {}, placement.num_chunks
    for name, count in on.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name}={count!r}: give a number of layers above 0, or the layers of each stage by {_LAYOUT}")
        given[name] = count // num_chunks  # the end of the model is the lighter part of an odd number
    rest, ends = num_layers - sum(given.values()), len(given)
    if rest < placement.num_stages - ends:
        raise ConfigError(
            f"{_text(on)}: {num_layers} layers leave {max(rest, 0)} for the other {placement.num_stages - ends} stages, which "
            "need one each; give less"
        )
    each, over = divmod(rest, placement.num_stages - ends)
    first, last = given.get(_FIRST), given.get(_LAST)
    middle = [each + (stage < over) for stage in range(placement.num_stages - ends)]
    return StageLayers(per_stage=(*([] if first is None else [first]), *middle, *([] if last is None else [last])))


def _parsed(text: str, config: Any) -> tuple[StageLayers, int | None]:
    """The layers of a layout's stages, checked against the model, and the stage of its MTP layers unless that is the last."""
    try:
        layers, mtp = StageLayers.parse(text), StageLayers.mtp_layers(text)
    except ConfigError as error:
        raise ConfigError(f"{_LAYOUT}: {error}") from None
    for name, given, wanted in (
        ("num_layers", layers.num_layers, config.num_layers),
        ("mtp_num_layers", None if mtp is None else mtp[1], config.mtp_num_layers),
    ):
        if given is not None and given != (wanted or 0):
            raise ConfigError(f"{_LAYOUT} {quoted(text)} has {given} of the model's {name}={wanted}; they must be equal")
    return layers, None if mtp is None or mtp[0] == layers.num_stages - 1 else mtp[0]


def layout_text(layout: Any) -> str:
    """The text of a layout in any form that megatron-core takes."""
    if isinstance(layout, str):
        return layout
    if isinstance(layout, StageLayout):
        return layout.text
    if isinstance(layout, PipelineParallelLayerLayout):  # by rank and chunk: stage = chunk * ranks + rank
        chunks, ranks = layout.virtual_pipeline_model_parallel_size, layout.pipeline_model_parallel_size
        layout = [layout.layout[rank][chunk] for chunk in range(chunks) for rank in range(ranks)]
    if not isinstance(layout, list) or not all(isinstance(stage, list) for stage in layout):
        raise ConfigError(f"{_LAYOUT} is {quoted(layout)}; give a text such as 'Et|tt|tt|tL', or a list of one list per stage")
    return "|".join("".join(map(_letter, stage)) for stage in layout)


def _letter(part: Any) -> str:
    kind = LayerType.__members__.get(part.strip().lower()) if isinstance(part, str) else part
    if kind not in _LETTERS:
        names = ", ".join(each.name for each in _LETTERS)
        raise ConfigError(f"{_LAYOUT} has a stage with {quoted(part)}; the parts of a stage are {names}")
    return _LETTERS[kind]


def _text(on: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in on.items())
