"""The small model of `moe`, as megatron-core's `HybridModel`: one letter of a pattern is one layer."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.zerobubble.mcore.compat import has_hybrid_model
from megatron.zerobubble.mcore.model.hybrid_layers import place_stack
from megatron.zerobubble.plan.partition.hybrid_pattern import EXPERTS, MAMBA, HybridPattern
from megatron.zerobubble.training.models.hybrid_model import hybrid_stack
from tests.support.gpt import SEQUENCE, VOCABULARY, Case, Tensors, Trainer
from tests.support.mamba import stand_ins
from tests.support.moe import MoeCase, MoeTrainer

HAS_HYBRID_MODEL = has_hybrid_model()
WHY_NOT = "this megatron-core has no HybridModel: 0.18 added it"


@dataclass(frozen=True)
class HybridCase(MoeCase):
    """One comparison of a model that is built from a pattern."""

    pattern: str = "*-*-*-*-"

    def __str__(self) -> str:
        return "-".join([str(self._as_gpt()), self.pattern])

    def _as_gpt(self) -> Case:
        """What names the case besides the pattern, which implies the layout."""
        names = (each.name for each in fields(Case))
        return Case(**{name: getattr(self, name) for name in names} | {"layout": None})

    @property
    def stages(self) -> HybridPattern:
        """The pattern with one segment per stage."""
        return HybridPattern.parse(self.pattern).over(self.spec.placement)

    @property
    def unpipelined(self) -> HybridCase:
        """The same training without a pipeline."""
        unpipelined = super().unpipelined
        assert isinstance(unpipelined, HybridCase)
        return replace(unpipelined, pattern=self.stages.layers)

    def trainer(self, initial: Tensors | None = None) -> Trainer:
        return HybridTrainer(self, initial)


def case(schedule: str, num_ranks: int, num_microbatches: int, pattern: str, *, num_chunks: int = 1, **others: Any) -> HybridCase:
    """A case whose layers are those of the pattern."""
    made = HybridCase(schedule, num_ranks, num_microbatches, pattern=pattern, num_chunks=num_chunks, **others)
    return replace(made, num_layers=made.stages.num_layers, layout=made.stages.stage_layers.text)


class HybridTrainer(MoeTrainer):
    """Trains a `HybridCase`."""

    case: HybridCase

    def __init__(self, case: HybridCase, initial: Tensors | None = None, **options: Any) -> None:
        self.kernels = ExitStack()
        if MAMBA in case.pattern:
            self.kernels.enter_context(stand_ins())
        super().__init__(case, initial, **options)

    def close(self) -> None:
        self.kernels.close()
        super().close()

    def _config_changes(self) -> dict[str, Any]:
        layers = self.case.stages.layers
        changes = super()._config_changes() if EXPERTS in layers else {}
        if MAMBA in layers:
            changes |= {"mamba_state_dim": 8, "mamba_head_dim": 16, "mamba_num_groups": 2}
        return changes | {"pipeline_model_parallel_layout": None, "is_hybrid_model": True}

    def _provide(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        pattern = self.case.stages.text
        return HybridModel(
            config=self.config,
            hybrid_stack_spec=place_stack(hybrid_stack(self.config), pattern, self.case.spec.placement, vp_stage=vp_stage),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            hybrid_layer_pattern=pattern,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=self.case.tied,
            position_embedding_type="rope" if self.case.llama else "learned_absolute",
            vp_stage=vp_stage,
        )
