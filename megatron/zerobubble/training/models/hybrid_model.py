"""The `HybridModel` that `--hybrid-layer-pattern` trains: its stages and its layers.

megatron-core has layer specs of this model for Transformer Engine only. The local ones are made here from its local layers of a
GPT, each divided in two: attention, and MLP or experts. megatron-core is imported inside the functions, because not every
release has this model.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.zerobubble.training.step import ModelSetup

__all__ = ["LocalStack", "hybrid_stack", "hybrid_stage"]


def hybrid_stage(setup: ModelSetup, pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
    """Build one stage of the model, as a megatron-core `HybridModel`.

    Args:
        setup: the settings and megatron-core's configuration.
        pre_process: whether the stage embeds tokens.
        post_process: whether the stage computes the loss.
        vp_stage: index of the stage among the rank's model chunks; None if the rank has one.
    """
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron.zerobubble.mcore.model.hybrid_layers import place_stack

    settings, model = setup.settings, setup.settings.model
    placement = settings.placement
    stages = settings.hybrid_pattern(placement)
    assert stages is not None, "without a pattern the model is a GPTModel"
    pattern = stages.text
    return HybridModel(
        config=setup.config,
        hybrid_stack_spec=place_stack(hybrid_stack(setup.config), pattern, placement, vp_stage=vp_stage),
        vocab_size=setup.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings or model.seq_length,
        hybrid_layer_pattern=pattern,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
    )


class LocalStack:
    """Builds megatron-core's `HybridStack` with a `LocalNorm` at the end. A factory: instances are those of `HybridStack`.

    `HybridStack` itself ends with a norm of Transformer Engine.
    """

    def __new__(cls, config: Any, *args: Any, post_process: bool = True, **others: Any) -> Any:
        from megatron.core.models.hybrid.hybrid_block import HybridStack

        from megatron.zerobubble.training.models.layer_specs import LocalNorm

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
    from megatron.zerobubble.training.models.layer_specs import local_layer

    layer = local_layer(config, has_experts=has_experts)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, **without))


def _mamba() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron.zerobubble.training.models.layer_specs import LocalNorm

    layer = MambaLayerSubmodules(
        norm=LocalNorm,
        mixer=ModuleSpec(
            module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
        ),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},  # Transformer Engine's name, as in the other layers
    )
    return ModuleSpec(module=MambaLayer, submodules=layer)
