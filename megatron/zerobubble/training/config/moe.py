"""Mixture of experts (MoE): the flags of the group "Mixture of experts"."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.dataclass_flags import flag_of
from megatron.zerobubble.flags.require import at_most, one_of, positive
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.training.config.model import ModelConfig
from megatron.zerobubble.training.config.parallel import ParallelConfig

__all__ = ["MoeConfig", "layer_pattern"]

_LONGEST = 100_000
"""Characters of --moe-layer-freq; one 0 or 1 per layer needs two."""
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts."""

    num_experts: int | None = None
    """Number of experts per MoE layer. Default: none, a dense model; then no other flag of this group may be given."""
    expert_model_parallel_size: int = 1
    """Expert-parallel size: the experts of a layer are divided over this many of the ranks that hold the layer. Every rank keeps
    its own batch; tokens are dispatched to the ranks of their experts."""
    expert_tensor_parallel_size: int | None = None
    """Tensor-parallel size of each expert. Default: --tensor-model-parallel-size."""
    moe_layer_freq: str = "1"
    """Which layers have experts: N for every Nth layer, beginning with the first, or one 0 (dense) or 1 (MoE) per layer as a
    Python list expression, such as "[0]+[1]*23"."""
    moe_ffn_hidden_size: int | None = None
    """Intermediate width of one expert. Default: --ffn-hidden-size."""
    moe_shared_expert_intermediate_size: int | None = None
    """Intermediate width of the shared expert, which processes every token. Needs --disable-bias-linear. Default: no shared
    expert."""
    moe_router_topk: int = 2
    """Number of experts per token."""
    moe_router_load_balancing_type: tuple[str, ...] = ("aux_loss",)
    """Load balancing losses of the router: aux_loss, seq_aux_loss, global_aux_loss or several of them."""
    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    """Coefficient of each load balancing loss in --moe-router-load-balancing-type."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Score function applied to the router logits."""
    moe_router_topk_scaling_factor: float | None = None
    """Scaling factor of the scores of the selected experts. Default: none."""
    moe_router_num_groups: int | None = None
    """Number of groups of experts for group-limited routing, with --moe-router-group-topk. Default: no groups."""
    moe_router_group_topk: int | None = None
    """Number of groups that a token may be routed to, with --moe-router-num-groups."""
    moe_router_enable_expert_bias: bool = False
    """Balance the load without an auxiliary loss: a bias per expert, updated from its load, is added to the scores that select
    experts. Needs --moe-router-score-function sigmoid."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Data type in which the router computes. Default: the model's."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    """Collective that dispatches tokens to the ranks of their experts."""
    moe_grouped_gemm: bool = False
    """Compute all experts of a rank in one grouped GEMM. Needs --transformer-impl transformer_engine."""

    def __post_init__(self) -> None:
        positive(self, "num_experts", "expert_model_parallel_size", "expert_tensor_parallel_size", "moe_ffn_hidden_size")
        positive(self, "moe_shared_expert_intermediate_size", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk")
        positive(self, "moe_router_topk_scaling_factor")
        at_most(self, 2**16, "num_experts", "expert_model_parallel_size", "expert_tensor_parallel_size")
        at_most(self, 2**24, "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
        if self.num_experts is None:
            self._refuse_the_rest()
            return
        for kind in self.moe_router_load_balancing_type:
            one_of(kind, _BALANCING, "--moe-router-load-balancing-type")
        self._check_balancing()
        self._check_routing(self.num_experts)

    def check(self, model: ModelConfig, parallel: ParallelConfig, zero_bubble: ZeroBubbleConfig, *, world_size: int) -> None:
        """Raise ConfigError unless the experts divide over the ranks and their options go with those of the model."""
        if self.num_experts is None:
            return
        size = parallel.tensor_model_parallel_size
        ranks, shared = world_size // parallel.pipeline_model_parallel_size, self.expert_tensor_parallel_size or size
        if ranks % (shared * self.expert_model_parallel_size):
            raise ConfigError(
                f"--expert-model-parallel-size {self.expert_model_parallel_size} x --expert-tensor-parallel-size {shared} does "
                f"not divide the {ranks} rank(s) that hold the same layers; change one of them, or the number of ranks"
            )
        if size > 1 and not parallel.sequence_parallel:
            raise ConfigError(f"--num-experts with --tensor-model-parallel-size {size} needs --sequence-parallel")
        if model.add_bias_linear and (self.moe_shared_expert_intermediate_size is not None or shared > 1):
            raise ConfigError(
                "--moe-shared-expert-intermediate-size and tensor-parallel experts do not support biases: add "
                "--disable-bias-linear"
            )
        if self.moe_grouped_gemm and model.transformer_impl == "local":
            raise ConfigError(
                "--moe-grouped-gemm with --transformer-impl local is one weight for all experts, whose wgrad cannot be deferred: "
                "leave it out to run the experts one by one, or use --transformer-impl transformer_engine"
            )
        layer_pattern(self.moe_layer_freq, model.num_layers)  # which refuses one that does not fit

    def _refuse_the_rest(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default:
                raise ConfigError(f"{flag_of(field)} needs --num-experts")

    def _check_balancing(self) -> None:
        kinds, weights = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if len(kinds) != len(weights):
            raise ConfigError(
                f"--moe-aux-loss-coeff has {len(weights)} values and --moe-router-load-balancing-type {len(kinds)} kinds; "
                "give one value for each"
            )
        if any(weight < 0.0 for weight in weights):
            raise ConfigError(f"--moe-aux-loss-coeff {min(weights)} must not be negative")
        if self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid":
            raise ConfigError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid")

    def _check_routing(self, num_experts: int) -> None:
        if self.moe_router_topk > num_experts:
            raise ConfigError(f"--moe-router-topk {self.moe_router_topk} is more than --num-experts {num_experts}")
        if num_experts % self.expert_model_parallel_size:
            raise ConfigError(
                f"--num-experts {num_experts} does not divide over --expert-model-parallel-size {self.expert_model_parallel_size}"
            )
        if self.moe_router_topk == 1 and self.moe_router_score_function == "softmax":
            raise ConfigError(
                "--moe-router-topk 1: the softmax over one score is always 1, so the router gets no gradient; "
                "give --moe-router-score-function sigmoid"
            )
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if (groups is None) != (chosen is None):
            raise ConfigError("--moe-router-num-groups and --moe-router-group-topk need each other")
        if groups is not None and chosen is not None and (num_experts % groups or chosen > groups):
            raise ConfigError(
                f"--moe-router-num-groups {groups} must divide --num-experts {num_experts} and be at least "
                f"--moe-router-group-topk {chosen}"
            )


def layer_pattern(text: str, num_layers: int) -> tuple[int, ...]:
    """Parse --moe-layer-freq: 1 for each layer with experts, 0 for each dense layer.

    Args:
        text: N, or a Python list expression such as "[0]+[1]*23".
        num_layers: number of transformer layers.

    Raises:
        ConfigError: the text is neither a positive number nor a list of `num_layers` zeros and ones.
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body) if len(text) <= _LONGEST else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        value = None
    if isinstance(value, int) and value > 0:
        return tuple(int(layer % value == 0) for layer in range(num_layers))
    if isinstance(value, list) and len(value) == num_layers and set(value) <= {0, 1} and 1 in value:
        return tuple(value)
    raise ConfigError(
        f"--moe-layer-freq {quoted(text)} is neither a number nor a pattern of {num_layers} layers, such as "
        f'"[0]+[1]*{num_layers - 1}"'
    )


def _value(node: ast.expr) -> int | list[int]:
    """A number, a list of numbers, sums of lists, a list times a number; anything else is a ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= 10_000:
        return node.value
    if isinstance(node, ast.List):
        return [item for item in map(_value, node.elts) if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and len(left) * right <= 10_000:
            return left * right
    raise ValueError("not a pattern")
