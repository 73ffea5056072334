"""The small GPT of `gpt`, with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from megatron.zerobubble.mcore.compat import define_missing_te_gemm
from megatron.zerobubble.training.models.layer_specs import stage_layers
from tests.support.gpt import Case, Trainer


@dataclass(frozen=True)
class MoeCase(Case):
    num_experts: int = 4
    topk: int = 2
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    """Ranks that share an expert; None: as many as share the rest of a layer."""
    dispatcher: str = "alltoall"
    balancing: str | tuple[str, ...] = "aux_loss"
    aux_loss_coeff: float | tuple[float, ...] = 0.1
    z_loss_coeff: float | None = None
    expert_bias: bool = False
    shared: bool = False
    shared_overlap: bool = False
    layer_freq: int | tuple[int, ...] = 1
    """A tuple where sequences are shared."""
    capacity_factor: float | None = None
    pre_softmax: bool = False

    @property
    def unpipelined(self) -> MoeCase:
        """The same training without a pipeline, on num_ranks times as many data-parallel replicas. megatron-core divides the
        auxiliary loss over the tokens of all replicas twice by their number, so its weight is larger there (a power of two:
        the same bits)."""
        coeff = self.aux_loss_coeff
        if isinstance(coeff, tuple):
            weights = [self.num_ranks if kind == "global_aux_loss" else 1 for kind in self.balancing]
            coeff = tuple(weight * each for weight, each in zip(weights, coeff, strict=True))
        return replace(super().unpipelined, aux_loss_coeff=coeff)  # type: ignore[call-arg,return-value]


class MoeTrainer(Trainer, trains=MoeCase):
    """Trains a `MoeCase`. A rank's `parameters` are those of its own experts."""

    case: MoeCase

    def close(self) -> None:
        """Also clear megatron-core's own state of experts, which would keep every process group of this trainer alive."""
        for chunk in self.chunks:
            for module in chunk.modules():
                dispatcher = getattr(module, "token_dispatcher", None)
                if dispatcher is not None:
                    vars(dispatcher).clear()  # tensors of the last microbatch, with their graph
        super().close()

    def _models(self) -> list[Any]:
        define_missing_te_gemm()
        return super()._models()

    def _parallel_sizes(self) -> dict[str, Any]:
        return {
            "expert_model_parallel_size": self.case.expert_parallel,
            "expert_tensor_parallel_size": self.case.expert_tensor_parallel,
        }

    def _config_changes(self) -> dict[str, Any]:
        case = self.case
        balancing, coeff = case.balancing, case.aux_loss_coeff
        return {
            "num_moe_experts": case.num_experts,
            "moe_ffn_hidden_size": 40,
            "moe_router_topk": case.topk,
            "moe_token_dispatcher_type": case.dispatcher,
            "moe_router_load_balancing_type": list(balancing) if isinstance(balancing, tuple) else balancing,
            "moe_aux_loss_coeff": list(coeff) if isinstance(coeff, tuple) else coeff,
            "moe_z_loss_coeff": case.z_loss_coeff,
            "moe_router_enable_expert_bias": case.expert_bias,
            "moe_router_score_function": "sigmoid" if case.expert_bias else "softmax",
            "moe_shared_expert_intermediate_size": 24 if case.shared else None,
            "moe_shared_expert_gate": case.shared,
            "moe_shared_expert_overlap": case.shared_overlap,
            "moe_layer_freq": list(case.layer_freq) if isinstance(case.layer_freq, tuple) else case.layer_freq,
            "moe_expert_capacity_factor": case.capacity_factor,
            "moe_router_pre_softmax": case.pre_softmax,
            "expert_model_parallel_size": case.expert_parallel,
            "expert_tensor_parallel_size": case.expert_tensor_parallel or case.tensor_parallel,
            "add_bias_linear": False,
        }

    def _layers(self, vp_stage: int | None) -> Any:
        if self.case.sequence_parallel or self.case.context_parallel > 1:
            return stage_layers(self.config, vp_stage=vp_stage)
        return get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, normalization=self.config.normalization, vp_stage=vp_stage
        )

    def _model_options(self, vp_stage: int | None) -> dict[str, Any]:
        return {"position_embedding_type": "rope"}

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        first = parallel_state.get_expert_model_parallel_rank() * (self.case.num_experts // self.case.expert_parallel)
        for name, parameter in super().parameters():
            words = name.split(".")
            if "local_experts" in words:
                words[words.index("local_experts") + 1] = str(first + int(words[words.index("local_experts") + 1]))
            yield ".".join(words), parameter


ZBV = MoeCase("zbv", 2, 4, num_chunks=2, num_layers=4)
ZB_H2 = MoeCase("zb-h2", 2, 4, num_layers=4)
