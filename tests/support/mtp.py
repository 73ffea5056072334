"""The small GPT of `gpt`, with MTP layers (multi-token prediction)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from megatron.zerobubble.mcore.compat import mtp_entries
from megatron.zerobubble.training.models.layer_specs import mtp_layers, stage_layers
from tests.support.gpt import Case, Trainer


@dataclass(frozen=True)
class MtpCase(Case):
    num_mtp_layers: int = 2


class MtpTrainer(Trainer, trains=MtpCase):
    """Trains a `MtpCase`. Its losses are those of the microbatches, then the sum over them of each MTP layer's."""

    case: MtpCase

    def close(self) -> None:
        """Also clear megatron-core's own sums of MTP losses, which refer to a process group."""
        mtp_entries().clear()
        super().close()

    def forward_backward(self, step: int, *, forward_only: bool = False) -> list[float]:
        before = self._sums()
        losses = super().forward_backward(step, forward_only=forward_only)
        return losses + [after - earlier for after, earlier in zip_longest(self._sums(), before, fillvalue=0.0)]

    @staticmethod
    def _sums() -> list[float]:
        """Of each MTP layer's losses so far, which run on over steps as they do between two progress lines of a job."""
        tracker = mtp_entries()
        sums = tracker.get("loss_values", tracker.get("values"))
        return [] if sums is None else list(map(float, sums))

    def _config_changes(self) -> dict[str, Any]:
        number = self.case.num_mtp_layers
        return {"mtp_num_layers": number, "pipeline_model_parallel_layout": self._layout(number)}

    def _layers(self, vp_stage: int | None) -> Any:
        return stage_layers(self.config, vp_stage=vp_stage)

    def _model_options(self, vp_stage: int | None) -> dict[str, Any]:
        return {"position_embedding_type": "rope", "mtp_block_spec": mtp_layers(self.config, vp_stage=vp_stage)}


ZBV = MtpCase("zbv", 2, 4, num_chunks=2, num_layers=4, adam_eps=1.0)
ZB_H2 = MtpCase("zb-h2", 2, 4, num_layers=4, adam_eps=1.0)
