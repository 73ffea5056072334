"""The small model of `moe`, as megatron-core's `HybridModel`: one letter of a pattern is one layer.

megatron-core has layer specs of this model for Transformer Engine only. The local ones are made here from its local layers of a
GPT, each divided in two: attention, and MLP or experts.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from megatron.zerobubble.mcore.compat import has_hybrid_model
from megatron.zerobubble.plan.partition.hybrid_pattern import HybridPattern
from megatron.zerobubble.training.models.layer_specs import LocalNorm, local_layer
from tests.support.gpt import SEQUENCE, VOCABULARY, Tensors
from tests.support.mamba import stand_ins
from tests.support.moe import MoeCase, MoeTrainer

HAS_HYBRID_MODEL = has_hybrid_model()
EXPERTS, MAMBA = "E", "M"
WHY_NOT = "this megatron-core has no HybridModel: 0.18 added it"


@dataclass(frozen=True)
class HybridCase(MoeCase):
    pattern: str = "*-*-*-*-"

    @property
    def stages(self) -> HybridPattern:
        """The pattern with one segment per stage."""
        return HybridPattern.parse(self.pattern).over(self.spec.placement)

    @property
    def unpipelined(self) -> HybridCase:
        unpipelined = super().unpipelined
        assert isinstance(unpipelined, HybridCase)
        return replace(unpipelined, pattern=self.stages.layers)


def case(schedule: str, num_ranks: int, num_microbatches: int, pattern: str, *, num_chunks: int = 1, **others: Any) -> HybridCase:
    """A case whose layers are those of the pattern."""
    made = HybridCase(schedule, num_ranks, num_microbatches, pattern=pattern, num_chunks=num_chunks, **others)
    return replace(made, num_layers=made.stages.num_layers, layout=made.stages.stage_layers.text)


class HybridTrainer(MoeTrainer, trains=HybridCase):
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

        return HybridModel(
            config=self.config,
            hybrid_stack_spec=hybrid_stack(self.config),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            hybrid_layer_pattern=self.case.stages.text,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=self.case.tied,
            position_embedding_type="rope" if self.case.llama else "learned_absolute",
            vp_stage=vp_stage,
        )


class LocalStack:
    """Builds megatron-core's `HybridStack` with a `LocalNorm` at the end. A factory: instances are those of `HybridStack`.

    `HybridStack` itself ends with a norm of Transformer Engine.
    """

    def __new__(cls, config: Any, *args: Any, post_process: bool = True, **others: Any) -> Any:
        from megatron.core.models.hybrid.hybrid_block import HybridStack

        stack = HybridStack(config, *args, post_process=post_process, post_layer_norm=False, **others)
        stack.post_layer_norm = True
        if post_process:
            stack.final_norm = LocalNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        return stack


def hybrid_stack(config: Any) -> Any:
    """The spec of the layers of a `HybridModel`: Transformer Engine's, or megatron-core's own with `LocalNorm`.

    Args:
        config: TransformerConfig of the model.
    """
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer.spec_utils import ModuleSpec

    if config.transformer_impl == "transformer_engine":
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return hybrid_stack_spec
    layers = {"attention_layer": _attention(config), "mlp_layer": _mlp(config), "mamba_layer": _mamba()}
    if config.num_moe_experts is not None:
        layers["moe_layer"] = _mlp(config, has_experts=True)
    return ModuleSpec(module=LocalStack, submodules=hybrid_block.HybridStackSubmodules(**layers))


def _attention(config: Any) -> Any:
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    return _half(config, mlp=IdentityOp, mlp_bda=IdentityFuncOp, pre_mlp_layernorm=IdentityOp)


def _mlp(config: Any, *, has_experts: bool = False) -> Any:
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    nothing = {"self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp, "input_layernorm": IdentityOp}
    return _half(config, has_experts=has_experts, **nothing)


def _half(config: Any, *, has_experts: bool = False, **without: Any) -> Any:
    """The spec of a local transformer layer of a GPT without some of its submodules."""
    layer = local_layer(config, has_experts=has_experts)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, **without))


def _mamba() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    layer = MambaLayerSubmodules(
        norm=LocalNorm,
        mixer=ModuleSpec(
            module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
        ),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},  # Transformer Engine's name, as in the other layers
    )
    return ModuleSpec(module=MambaLayer, submodules=layer)
