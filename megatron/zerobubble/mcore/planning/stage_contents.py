"""What the stages of a built model hold: the kind of each of their layers, and the number of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["StageContents"]


@dataclass(frozen=True, kw_only=True)
class StageContents:
    """Of every stage of a pipeline, in the order data flows. Counted in the modules, so it holds for any loop and any layout."""

    kinds: tuple[tuple[str, ...], ...]
    """The kind of each decoder layer, as a layer file names it."""
    weights: tuple[int, ...]
    """Number of weights on the stage's rank; tied word embeddings count on both of their stages."""

    @staticmethod
    def gather(chunks: Sequence[nn.Module], placement: Placement) -> StageContents:
        """All-gather over the pipeline. All ranks of the pipeline must call it.

        Args:
            chunks: this rank's model chunks, in the order of their stages.
            placement: stage -> rank.
        """
        own = [(_kinds(chunk), sum(weight.numel() for weight in chunk.parameters())) for chunk in chunks]
        everybody: list[Any] = [None] * placement.num_ranks
        dist.all_gather_object(everybody, own, group=parallel_state.get_pipeline_model_parallel_group())
        stages = [everybody[rank][placement.chunk_of(stage)] for stage, rank in enumerate(placement.stage_to_rank)]
        return StageContents(kinds=tuple(kinds for kinds, _ in stages), weights=tuple(count for _, count in stages))

    @property
    def layers(self) -> StageLayers:
        """The number of layers of each stage."""
        return StageLayers(per_stage=tuple(map(len, self.kinds)))

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer of the model; of a transformer whose layers are all alike `layer`.

        Empty if the chunks have no decoder with a list of layers, as a GPTModel or a HybridModel has.
        """
        kinds = tuple(kind for stage in self.kinds for kind in stage)
        return ("layer",) * len(kinds) if set(kinds) in ({"dense"}, {"moe_layer"}) else kinds


def _kinds(chunk: nn.Module) -> tuple[str, ...]:
    try:
        decoder = get_attr_wrapped_model(chunk, "decoder")
    except RuntimeError:
        return ()
    return tuple(map(_kind, getattr(decoder, "layers", ())))


def _kind(layer: Any) -> str:
    """mamba, attention, mlp or moe in a hybrid model, whose layers do one of these; moe_layer or dense in a transformer."""
    if hasattr(layer, "mixer"):
        return "mamba"
    has_attention, has_mlp = (
        not isinstance(getattr(layer, name, None), (IdentityOp, type(None))) for name in ("self_attention", "mlp")
    )
    has_experts = isinstance(getattr(layer, "mlp", None), BaseMoELayer)
    if not has_mlp:
        return "attention"
    if not has_attention:
        return "moe" if has_experts else "mlp"
    return "moe_layer" if has_experts else "dense"
