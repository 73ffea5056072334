"""The small GPT of `tests.support.gpt` and `moe`, and with multi-latent attention (MLA), of Transformer Engine's layers.

Runs inside the ranks of a pool that `install` prepared. The reference is the same model without a pipeline, with weight gradients
that Transformer Engine computes in its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import MLATransformerConfig
from torch.nn import functional

from megatron.zerobubble.mcore.model.transformer_engine import fused_operations, is_fused
from megatron.zerobubble.mcore.model.wgrad_split import deferring_modules
from megatron.zerobubble.training.models.layer_specs import stage_layers
from megatron.zerobubble.wgrad.deferring import DeferringModule, WgradKey
from tests.support.comparisons import Difference, difference, unpipelined
from tests.support.gpt import Case, Tensors, Trainer
from tests.support.moe import MoeCase, MoeTrainer
from tests.support.transformer_engine import attention

__all__ = ["EngineCase", "EngineMlaCase", "EngineMoeCase", "compare_engine"]


@dataclass(frozen=True)
class EngineCase(Case):
    fuses: bool = False
    """Whether its GEMMs add to `main_grad` (`gradient_accumulation_fusion`)."""
    fp8: str | None = None
    """`e4m3` or `hybrid`."""
    fp8_recipe: str = "delayed"
    fp8_param: bool = False
    fp8_history: int = 1
    """Length of the history of magnitudes, of which the largest is taken."""
    userbuffers: bool = False
    """Whether tensor-parallel communication overlaps with GEMMs (`tp_comm_overlap`), by megatron-core's defaults."""
    op_fuser: bool = False
    """Whether fused operations run the MLPs."""

    @property
    def unpipelined(self) -> Case:
        return replace(super().unpipelined, userbuffers=False)  # type: ignore[call-arg]


@dataclass(frozen=True)
class EngineMoeCase(MoeCase):
    """With experts in grouped linears."""

    fuses: bool = False
    grouped: bool = True
    op_fuser: bool = False
    """Whether fused operations run the experts, and if there are any, the shared ones."""
    fp8: str | None = None
    """A recipe in E4M3, with operations that are fused."""
    overlap: bool = False


@dataclass(frozen=True)
class EngineMlaCase(EngineCase):
    """With multi-latent attention, whose values have another head size than its queries, 12."""

    q_lora_rank: int | None = 24
    qk_layernorm: bool = False
    rope_type: str = "yarn"


ENGINE = {"transformer_impl": "transformer_engine"}


class _EngineModels(Trainer):
    """Its layers can be built with `gradient_accumulation_fusion` where apex is not installed.

    megatron-core's own linears get the option off afterwards, since their backward would call apex. Split ones have a kernel of
    `wgrad.gemm`.
    """

    def _models(self) -> list[Any]:
        has_apex = getattr(layers, _HAS_APEX, True)
        with mock.patch.object(layers, _HAS_APEX, True):
            models = super()._models()
        for module in (each for model in models for each in model.modules()):
            if not has_apex and isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear):
                module.gradient_accumulation_fusion = False
        return models


_HAS_APEX = "_grad_accum_fusion_available"


class EngineTrainer(_EngineModels, trains=EngineCase):
    case: EngineCase

    def __init__(self, case: EngineCase, initial: Tensors | None = None, **options: Any) -> None:
        self._ring = ExitStack()
        if case.context_parallel > 1:
            self._ring.enter_context(attention.enabled())
        super().__init__(case, initial, **options)

    def _config_changes(self) -> dict[str, Any]:
        case = self.case
        options: dict[str, Any] = {"gradient_accumulation_fusion": case.fuses, "tp_comm_overlap": case.userbuffers} | ENGINE
        if case.fp8 is not None:
            options |= {"fp8": case.fp8, "fp8_recipe": case.fp8_recipe, "fp8_param": case.fp8_param}
            options |= {"fp8_amax_history_len": case.fp8_history, "fp8_amax_compute_algo": "max"}
        if case.fp8_param:  # otherwise main weights begin as memory that nobody has written
            options |= {"use_cpu_initialization": False}
        return options

    def _ddp_config(self) -> Any:
        gathers = self.case.fp8_param and self.case.distributed_optimizer
        return replace(super()._ddp_config(), fp8_param_gather=gathers)

    def _layers(self, vp_stage: int | None) -> Any:
        if self.case.op_fuser:
            return get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=True)
        return stage_layers(self.config, vp_stage=vp_stage)

    def close(self) -> None:
        """Also forget the scales of FP8, and leave fused attention."""
        _forget_scales(self.case)
        self._ring.close()
        super().close()


def _forget_scales(case: Any) -> None:
    """Forget the scales of FP8 and their process groups, which Transformer Engine keeps for the whole process."""
    if case.fp8 is not None:
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

        FP8GlobalStateManager.reset()


class EngineMlaTrainer(EngineTrainer, trains=EngineMlaCase):
    case: EngineMlaCase

    config_type = MLATransformerConfig

    def _config_changes(self) -> dict[str, Any]:
        case = self.case
        return super()._config_changes() | {
            "multi_latent_attention": True,
            "q_lora_rank": case.q_lora_rank,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 6,
            "qk_layernorm": case.qk_layernorm,
            "rope_type": case.rope_type,
            "rotary_scaling_factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale_all_dim": 0.5,
        }

    def _model_options(self, vp_stage: int | None) -> dict[str, Any]:
        return {"position_embedding_type": "rope"}


class EngineMoeTrainer(_EngineModels, MoeTrainer, trains=EngineMoeCase):
    case: EngineMoeCase

    def _config_changes(self) -> dict[str, Any]:
        case = self.case
        own: dict[str, Any] = {"gradient_accumulation_fusion": case.fuses, "moe_grouped_gemm": case.grouped}
        if case.op_fuser:
            own |= {"use_transformer_engine_op_fuser": True, "gated_linear_unit": True, "activation_func": functional.silu}
            own |= {"moe_mlp_glu_interleave_size": 4, "bias_activation_fusion": False}
        if case.fp8 is not None:
            own |= {"fp8": "e4m3", "fp8_recipe": case.fp8}
        if case.op_fuser and case.shared:
            own |= {"use_grouped_gemm_for_shared_expert": True, "moe_shared_expert_glu_interleave_size": 4}
        return super()._config_changes() | ENGINE | own

    def _schedule_options(self) -> dict[str, Any]:
        return {"overlap_moe": self.case.overlap}

    def _layers(self, vp_stage: int | None) -> Any:
        return stage_layers(self.config, vp_stage=vp_stage)

    def close(self) -> None:
        """Also forget the scales of FP8."""
        _forget_scales(self.case)
        super().close()

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """A rank's grouped linears number their own experts from 0; the reference numbers all."""
        first = parallel_state.get_expert_model_parallel_rank() * (self.case.num_experts // self.case.expert_parallel)
        for name, parameter in super().parameters():
            rest, _, last = name.rpartition(".")
            number = last.removeprefix("weight")
            if rest.endswith((".experts.linear_fc1", ".experts.linear_fc2")) and number.isdigit():
                last = f"weight{first + int(number)}"
            yield f"{rest}.{last}", parameter


def compare_engine(rank: int, case: EngineCase | EngineMlaCase | EngineMoeCase) -> tuple[Difference, dict[str, int], list[str]]:
    """Train `case` and its reference.

    Returns:
        The differences; how often each module that defers computed its weight gradients, by the name of its class, and as
        "early modules" how many did before their W; and the names of the modules whose queue was not empty afterwards.
    """
    initial, expected = unpipelined(case.unpipelined)
    trainer = case.trainer(initial)
    counts = Counter({"early modules": 0})
    deferring = [(name, module) for chunk in trainer.chunks for name, module in deferring_modules(chunk)]
    for _, module in deferring:
        _count(counts, module)
    compute_ahead = DeferringModule.compute_ahead

    def counted(module: DeferringModule, key: WgradKey) -> bool:
        is_early = compute_ahead(module, key)
        counts["early modules"] += is_early
        return is_early

    with mock.patch.object(DeferringModule, "compute_ahead", counted):
        actual = trainer.train()
    left = [name for name, module in deferring if any(map(len, driven_queues(module)))]
    trainer.close()
    return difference(actual, expected), dict(counts), left


def driven_queues(module: Any) -> list[Any]:
    """The queues of weight gradients of a module that defers them, or of the fused operations that run for it."""
    having = [each for each in (module, *fused_operations(module)) if hasattr(each, "wgrad_store")]
    return [each.wgrad_store.context.queue for each in having]


def _count(counts: Counter[str], module: Any) -> None:
    """Count in `counts` how often the hooks behind the weight gradients of the module run, a weight gradient for each."""
    kind = type(module).__name__
    counts[f"{kind} modules"] += 1
    weight = next(iter(module.parameters()))

    def hook() -> None:
        assert weight.grad is None or weight.main_grad is not None
        counts[kind] += 1

    hooked = module.linear_fc1 if is_fused(module) else module
    hooked.register_wgrad_accumulation_and_reduce_hooks(hook)
