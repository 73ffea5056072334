"""Which layers and embeddings are on each rank under any placement.

megatron-core asks `config.pipeline_model_parallel_layout` for the number of layers and the first layer's index of each
(pipeline rank, chunk). Its own layout numbers stages in a loop: stage = chunk * p + rank. `StageLayout` numbers them by any
`Placement`, so that under V chunk 1 of rank r is stage 2p-1-r. Layers keep their global index, so a checkpoint does not
depend on the placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


class StageLayout(PipelineParallelLayerLayout):
    """A megatron-core layer layout with the stages of any `Placement`.

    Args:
        layers: number of decoder layers of each stage; stages may differ.
        placement: stage -> rank, with the same number of stages on every rank.
        num_mtp_layers: MTP layers (multi-token prediction), all on one stage.
        mtp_stage: the stage of the MTP layers, which is the last of its rank; None: the last of the model.
        is_derived: whether other options, or none, led to these layers, which a configuration with other ones replaces.

    Raises:
        ConfigError: `layers` and `placement` differ in the number of stages, ranks differ in theirs, or the MTP layers are on a
            stage that megatron-core does not build them on.
    """

    def __init__(
        self,
        layers: StageLayers,
        placement: Placement,
        *,
        num_mtp_layers: int = 0,
        mtp_stage: int | None = None,
        is_derived: bool = False,
    ) -> None:
        if layers.num_stages != placement.num_stages:
            raise ConfigError(f"layout {layers.text!r} has {layers.num_stages} stages, the schedule {placement.num_stages}")
        if placement.num_stages % placement.num_ranks:
            raise ConfigError(f"{placement.num_stages} stages cannot be spread evenly over {placement.num_ranks} ranks")
        stages = [["decoder"] * count for count in layers.per_stage]
        stages[0].insert(0, "embedding")
        if mtp_stage is not None and placement.chunk_of(mtp_stage) != placement.num_chunks - 1:
            raise ConfigError(
                f"MTP layers (m) on stage {mtp_stage} of {placement.num_stages} ({placement.name} placement): megatron-core has "
                f"them in the last chunk of a rank, which is one of the stages {placement.num_stages - placement.num_ranks} to "
                f"{placement.num_stages - 1}"
            )
        stages[-1 if mtp_stage is None else mtp_stage] += ["mtp"] * num_mtp_layers
        stages[-1] += ["loss"]
        num_chunks = placement.num_chunks
        by_chunk = [
            stages[placement.rank_to_stages[rank][chunk]] for chunk in range(num_chunks) for rank in range(placement.num_ranks)
        ]
        super().__init__(by_chunk, placement.num_ranks)
        # Not the placement: frameworks copy a configuration attribute by attribute before they send it, and it is frozen.
        self.stage_to_rank, self.is_derived = placement.stage_to_rank, is_derived
        self.text = layers.text if mtp_stage is None else "|".join("".join(_LETTERS[part] for part in stage) for stage in stages)
        """The layout text, without the MTP layers unless `mtp_stage` was given."""
        self.flatten_layout = [LayerType[name] for stage in stages for name in stage]

    @property
    def placement(self) -> Placement:
        """Stage -> rank."""
        return Placement(self.stage_to_rank)

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Number of layers of `layer_type` in all stages before chunk `vp_stage` of rank `pp_rank` (default: this rank)."""
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        placement = self.placement
        before = placement.stage_to_rank[: placement.rank_to_stages[rank][vp_stage or 0]]
        places = ((rank, placement.chunk_of(stage)) for stage, rank in enumerate(before))
        return sum(self.layout[rank][chunk].count(layer_type) for rank, chunk in places)


def output_lengths(config: Any, placement: Placement) -> tuple[int, ...]:
    """How long the output of each stage is, in sequences of its microbatch.

    1, but from a stage with MTP layers on 1 + their number: it appends their output to its own along the sequence, and the last
    stage computes a loss of each part.

    Args:
        config: TransformerConfig of the model.
        placement: stage -> rank.
    """
    layout = config.pipeline_model_parallel_layout
    if layout is None:  # then MTP layers are on the last stage, which sends nothing
        return (1,) * placement.num_stages
    length, lengths = 1, []
    for stage, rank in enumerate(placement.stage_to_rank):
        length += layout.layout[rank][placement.chunk_of(stage)].count(LayerType.mtp)
        lengths.append(length)
    return tuple(lengths)


def embedding_ranks(placement: Placement, pipeline: Sequence[int]) -> list[int]:
    """The ranks of a pipeline that have the embedding or the output layer, for `initialize_model_parallel`."""
    return [pipeline[rank] for rank in sorted({placement.stage_to_rank[0], placement.stage_to_rank[-1]})]
