"""What the losses beside the language model's came to: of routers (load balancing, size of logits) and of further-token heads.

megatron-core adds them up on each rank, forward by forward, in trackers of its own. A progress line takes their means and begins
anew, so that telling costs an iteration nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from megatron.zerobubble.training.config.settings import Settings

__all__ = ["AuxLosses"]

_ROUTER_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kind of --moe-router-load-balancing-type -> name in megatron-core's tracker."""


class AuxLosses:
    """Begins anew when it is made. One on every rank.

    Args:
        settings: which losses there are; all ranks tell of the same ones, whatever layers they hold.
    """

    def __init__(self, settings: Settings) -> None:
        self._routers = self._router_losses(settings)
        self._num_heads = settings.model.mtp_num_layers or 0
        self._copies = settings.data_parallel_size * settings.parallel.tensor_model_parallel_size
        self._clear()

    @staticmethod
    def _router_losses(settings: Settings) -> dict[str, int]:
        """Name -> by what the sum over all ranks and layers is to be divided for a mean over layers and copies."""
        moe, num_layers = settings.moe, sum(settings.moe_layer_pattern)
        if moe.num_experts is None:
            return {}
        if settings.moe_layer_pattern[-1]:
            num_layers += settings.model.mtp_num_layers or 0  # further-token heads are layers like the last one
        losses = {}
        for kind, weight in zip(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff, strict=True):
            if weight:  # a tensor-parallel rank counts its own tokens; and of the global loss, a copy its own
                losses[_ROUTER_LOSSES[kind]] = num_layers * (1 if kind == "global_aux_loss" else settings.data_parallel_size)
        if moe.moe_z_loss_coeff is not None:
            losses["z_loss"] = num_layers * settings.data_parallel_size * settings.parallel.tensor_model_parallel_size
        return losses

    @torch.no_grad()
    def take(self, num_microbatches: int) -> dict[str, float]:
        """Means of each loss, without its weight, over this many microbatches since the last call. All ranks must call this."""
        if not self._routers and not self._num_heads:
            return {}
        device = torch.cuda.current_device()
        routers, heads = get_moe_layer_wise_logging_tracker(), MTPLossLoggingHelper.tracker.get("values")
        zero = torch.zeros((), device=device)
        sums: list[Tensor] = [routers[name]["values"].sum() if name in routers else zero for name in self._routers]
        sums += [zero if heads is None else heads[head] for head in range(self._num_heads)]
        total = torch.stack(sums).to(torch.float64)
        dist.all_reduce(total)
        self._clear()
        names = [*self._routers, *(f"mtp_{head + 1} loss" for head in range(self._num_heads))]
        shares = [*self._routers.values(), *[self._copies] * self._num_heads]
        return {name: value / share / num_microbatches for name, value, share in zip(names, total.tolist(), shares, strict=True)}

    def _clear(self) -> None:
        clear_aux_losses_tracker()
        if "values" in MTPLossLoggingHelper.tracker:
            MTPLossLoggingHelper.tracker["values"].zero_()
