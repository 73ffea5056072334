"""Which layers of a `HybridModel` are on each rank under any placement.

megatron-core's `HybridModel` is built from a pattern, one letter per layer and ``|`` between stages. Its constructor takes
segment chunk * p + rank of it, which is the stage of linear and interleaved placements; under V chunk 1 of rank r is stage
2p-1-r. It passes the layers and the number of layers before them to the stack of layers that the caller's spec names. So this
module replaces the stack by a factory that builds it with the layers of its own stage. Layers keep their global index, and a
checkpoint does not depend on the placement.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import get_module
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.hybrid_pattern import HybridPattern

__all__ = ["StageStack", "check_hybrid", "place_stack"]

_log = logging.getLogger(__name__)


class StageStack:
    """Builds a stack with the layers of one stage. A factory: instances are those of `stack`.

    Args:
        stack: megatron-core's `HybridStack`, or a class with its constructor.
        layers: one letter per layer of the stage.
        first_layer: number of layers in all stages before.
        others: arguments of `stack`; the layers that its caller selected are ignored.
    """

    def __new__(cls, *args: Any, stack: type[Any], layers: str, first_layer: int, **others: Any) -> Any:
        others |= {"layer_type_list": list(layers), "pp_layer_offset": first_layer}
        return stack(*args, **others)


def check_hybrid(chunk: nn.Module, placement: Placement) -> None:
    """Check that a chunk of a `HybridModel` has nothing that `placement` does not support; of other models, does nothing.

    Raises:
        ConfigError: its pattern has MTP layers, and a rank several chunks.
    """
    pattern = getattr(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True), "hybrid_layer_pattern", None)
    if pattern is not None:
        HybridPattern.parse(pattern).check_mtp(placement)


def place_stack(stack: Any, pattern: str, placement: Placement, *, vp_stage: int | None) -> Any:
    """The spec of the layers of one stage of this rank, as the argument `hybrid_stack_spec` of `HybridModel`.

    Args:
        stack: ModuleSpec of the whole model's layers, such as megatron-core's `hybrid_stack_spec`. Not changed.
        pattern: the argument `hybrid_layer_pattern` of `HybridModel`, with one segment per stage.
        placement: stage -> rank.
        vp_stage: index of the stage among the rank's model chunks; None if the rank has one.

    Returns:
        `stack` itself where `HybridModel` selects the right segment; otherwise a copy that builds the layers of the stage.

    Raises:
        ConfigError: the pattern does not have one segment per stage, or has MTP layers and a rank several stages.
    """
    segments = HybridPattern.parse(pattern).over(placement)
    if placement.name in ("linear", "loop"):
        return stack
    stage = placement.rank_to_stages[parallel_state.get_pipeline_model_parallel_rank()][vp_stage or 0]
    layers, first_layer = segments.segments[stage], segments.first_layer(stage)
    _log.info("stage %d of %d has layers %r, after %d others", stage, placement.num_stages, layers, first_layer)
    params = {**(stack.params or {}), "stack": get_module(stack), "layers": layers, "first_layer": first_layer}
    return dataclasses.replace(stack, module=StageStack, params=params)
