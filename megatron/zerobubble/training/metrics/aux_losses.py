"""Auxiliary losses for the log: of MoE routers (load balancing, z-loss) and of MTP layers.

megatron-core sums them on each rank, per forward pass, in trackers of its own. They are all-reduced and reset once per progress
line, so an iteration adds no communication for them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.mcore.compat import mtp_entries, mtp_loss_sums, router_loss_sums
from megatron.zerobubble.training.config.settings import Settings

__all__ = ["AuxLosses"]

_ROUTER_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kind of --moe-router-load-balancing-type -> name in megatron-core's tracker."""


class AuxLosses:
    """Means of the auxiliary losses since the last progress line. Every rank has one; making it resets megatron-core's trackers.

    Args:
        settings: determine which losses exist. All ranks report the same ones, also those without such layers.
    """

    def __init__(self, settings: Settings) -> None:
        self._routers = self._router_losses(settings)
        self._num_mtp_layers = settings.model.mtp_num_layers or 0
        self._num_replicas = settings.gradient_reduction_size * settings.parallel.tensor_model_parallel_size
        self._clear()

    @staticmethod
    def _router_losses(settings: Settings) -> dict[str, int]:
        """Name -> divisor that turns the sum over all ranks and layers into a mean over layers and data-parallel replicas."""
        moe, num_layers = settings.moe, sum(settings.moe_layer_pattern)
        if moe.num_experts is None:
            return {}
        if settings.moe_layer_pattern[-1]:
            num_layers += settings.model.mtp_num_layers or 0  # MTP layers are like the last layer
        losses = {}
        for kind, weight in zip(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff, strict=True):
            if weight:  # a tensor- or context-parallel rank sums over its own tokens; in the global loss, so does a replica
                losses[_ROUTER_LOSSES[kind]] = num_layers * (1 if kind == "global_aux_loss" else settings.data_parallel_size)
        if moe.moe_z_loss_coeff is not None:
            losses["z_loss"] = num_layers * settings.gradient_reduction_size * settings.parallel.tensor_model_parallel_size
        return losses

    @torch.no_grad()
    def take(self, num_microbatches: int) -> dict[str, float]:
        """Means of each loss, without its coefficient, since the last call; resets the trackers. All ranks must call this.

        Args:
            num_microbatches: microbatches per data-parallel rank since the last call.
        """
        if not self._routers and not self._num_mtp_layers:
            return {}
        device = torch.cuda.current_device()
        routers, mtp_losses = router_loss_sums(), mtp_loss_sums()
        zero = torch.zeros((), device=device)
        sums: list[Tensor] = [routers[name].sum() if name in routers else zero for name in self._routers]
        sums += [zero if mtp_losses is None else mtp_losses[layer] for layer in range(self._num_mtp_layers)]
        total = torch.stack(sums).to(torch.float64)
        dist.all_reduce(total)
        self._clear()
        names = [*self._routers, *(f"mtp_{layer + 1} loss" for layer in range(self._num_mtp_layers))]
        divisors = [*self._routers.values(), *[self._num_replicas] * self._num_mtp_layers]
        means = (value / divisor / num_microbatches for value, divisor in zip(total.tolist(), divisors, strict=True))
        return dict(zip(names, means, strict=True))

    def _clear(self) -> None:
        for values in router_loss_sums().values():
            values.zero_()
        for logged in mtp_entries().values():
            if isinstance(logged, Tensor):
                logged.zero_()
