"""Options of a model's configuration that are turned off for a schedule of ours, or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.enums import LayerType

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.compat import makes_fused_experts_as_known
from megatron.zerobubble.mcore.microbatches.length_exchange import GIVE_LENGTHS
from megatron.zerobubble.mcore.model.stage_layout import StageLayout
from megatron.zerobubble.mcore.slices.refusals import check_sliced_config
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec

logger = logging.getLogger(__name__)


OVERLAP_MOE = "overlap_moe_expert_parallel_comm"
"""Option of megatron-core in whose place `zero_bubble_overlap_moe` is turned on."""

_TURNED_OFF = {
    "defer_embedding_wgrad_compute": "W defers the head's weight gradient already",
    "overlap_dispatch_backward_with_experts_wgrad": "W computes the experts' weight gradients",
    OVERLAP_MOE: "--zero-bubble-overlap-moe, which takes its place, pairs passes of this schedule",
    "ep_overlap_early_attn_memory_release": "passes are paired otherwise",
}
"""Options of megatron-core's configuration that a split of B and W makes superfluous or cannot serve, and what that costs."""


def turn_off(config: Any, known: set[str]) -> None:
    """Turn off options that only change when something is computed, before a model is built, with one line on rank 0.

    Args:
        config: TransformerConfig of the model, before megatron-core's checks of these options or after them.
        known: those that a line has named; they are added. A loop may make a config for each microbatch.
    """
    found = [name for name in _TURNED_OFF if getattr(config, name, False)]
    for name in found:
        setattr(config, name, False)
    new = [f"{name} ({_TURNED_OFF[name]})" for name in found if name not in known]
    known.update(found)
    if new and not (dist.is_initialized() and dist.get_rank()):
        logger.warning("turned off for the schedule: %s", "; ".join(new))


def check_config(config: Any, spec: ScheduleSpec, *, knows_lengths: bool = False) -> None:
    """Check that every option of the model works with the schedule.

    Args:
        config: TransformerConfig of the model.
        spec: the schedule.
        knows_lengths: whether the schedule gets the lengths of unequal microbatches (`UnequalOptions`).

    Raises:
        ConfigError: an option that the B/W split or the executor does not support.
    """
    for name, why in _refused(config):
        if name == "variable_seq_lengths" and knows_lengths:
            continue
        raise ConfigError(f"{name} does not go with schedule {spec.name!r}: {why}. Turn it off or use the stock schedule")
    if spec.num_slices > 1:
        check_sliced_config(config, name=spec.name)


_REFUSED = {
    "hybrid_context_parallel": "it brings a schedule of its own",
    "moe_ncclep_zero_copy": "the gradients that W reads would lie in a buffer that all layers share",
    "moe_paged_stash": "it restores the inputs of experts before B, into buffers of full capacity, and W alone reads them: from "
    "B to W they would take the memory that it saves from F to B (ADR 67)",
    "fine_grained_activation_offloading": "it brings microbatches back in the order of megatron-core's 1F1B or interleaved "
    "chunks, and ends its iteration inside of those schedules",
    "cpu_offloading": "it hooks into the backward pass that is split here",
    "num_microbatches_with_partial_activation_checkpoints": "it counts 1F1B's warmup microbatches",
    "variable_seq_lengths": f"ranks have to know the lengths before an iteration begins: {GIVE_LENGTHS}, or pad to the sequence "
    "length",
    "enable_autocast": "B and W compute in the dtype of the weights, outside of autocast; use bf16 or fp16 weights",
    "moe_single_grouped_weight": "Transformer Engine's kernels for one weight of all experts need a GPU, and were not tried with "
    "deferred weight gradients",
    "moe_single_grouped_bias": "Transformer Engine's kernels for one bias of all experts need a GPU, and were not tried with "
    "deferred weight gradients",
}
"""Options of megatron-core's configuration, up to 0.19, and why none of them may be on where B and W are split."""


_REFUSED_GRAPHS = {
    "local": "megatron-core captures these graphs inside its own schedules, and lets neighboring layers share their buffers; "
    'cuda_graph_impl="transformer_engine" captures the same layers',
    "full_iteration": "in one graph of an iteration the driver, not the streams of this schedule, orders its transfers, and a "
    "receive that is posted ahead of its op spins on the SMs that another rank waits for; "
    'cuda_graph_impl="transformer_engine" captures layers',
}
"""`cuda_graph_impl` of megatron-core, and why not (ADR 53)."""


def _refused(config: Any) -> Iterator[tuple[str, str]]:
    """(name, why) of each option that is on and does not go with a split of B and W. A release without an option has it off."""
    yield from ((name, why) for name, why in _REFUSED.items() if getattr(config, name, None))
    graphs = getattr(config, "cuda_graph_impl", None)
    if graphs in _REFUSED_GRAPHS:
        yield f"cuda_graph_impl={graphs!r}", _REFUSED_GRAPHS[graphs]
    if getattr(config, "use_transformer_engine_op_fuser", False) and not makes_fused_experts_as_known():
        yield "use_transformer_engine_op_fuser", "this megatron-core makes fused experts in another way than up to 0.19"
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    first_rank = [] if layout is None or isinstance(layout, StageLayout) else layout.layout[0]
    if len(first_rank) > 1 and LayerType.mtp in first_rank[-1]:
        yield (
            "pipeline_model_parallel_layout with m (MTP layers) on the first rank",
            "two chunks of that rank have an embedding, and megatron-core's all-reduce of its gradient is called for one",
        )
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if (getattr(config, name, None) or 1) > 1:
            yield name, "weights are gathered for the backward pass and freed before W"
