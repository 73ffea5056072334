"""Makes a batch of samples of unequal length, by padding that does not count in the loss.

Shapes: b samples of the batch, s padded tokens per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.microbatch_lengths import padded_length

__all__ = ["PaddedBatches"]


@dataclass(frozen=True)
class PaddedBatches:
    """Collates the samples of a `DocumentDataset`. Picklable, for data loader processes."""

    settings: Settings
    """Say how long a batch is, and whether samples are packed."""

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A batch.

        Returns:
            tokens, labels, position_ids and loss_mask, [b, s], as megatron-core's GPTDataset has them. Padding is token 0 with a
            loss mask of 0. With --pack-sequences also cu_seqlens [k + 1] int32, where each of the k sequences of the row begins,
            from 0 on, and s: the documents, and behind them the padding as a sequence of its own.
        """
        length = padded_length(max(len(sample["tokens"]) for sample in samples), self.settings)
        names = ("tokens", "labels", "loss_mask", "position_ids")
        batch = {name: torch.stack([_padded(sample[name], length) for sample in samples]) for name in names}
        if not self.settings.data.pack_sequences:
            batch["position_ids"] = torch.arange(length).expand(len(samples), -1).contiguous()
            return batch
        (sample,) = samples
        begins, filled = sample["cu_seqlens"], len(sample["tokens"])
        batch["position_ids"][0, filled:] = torch.arange(length - filled)
        batch["cu_seqlens"] = begins if filled == length else torch.cat([begins, begins.new_tensor([length])])
        return batch


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, length - len(tensor)))
