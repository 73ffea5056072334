"""A rank's model chunks, made to run slice by slice.

Nothing changes outside of the schedule's F and B: the replaced `forward`s then call those of the modules' classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice
from megatron.zerobubble.mcore.slices.positions import PositionIds, count_from_slice
from megatron.zerobubble.mcore.slices.prefix_attention import attend_to_prefix
from megatron.zerobubble.mcore.slices.refusals import check_attention, core_attentions
from megatron.zerobubble.mcore.slices.router_losses import REPLACED, balance_microbatches

__all__ = ["SlicedChunks"]


class SlicedChunks:
    """Replaces, on the instances, the `forward` of core attentions and position embeddings, and the `routing` of routers.

    Args:
        chunks: this rank's model chunks, wrapped by DDP or not.
        positions: what the loop's position ids are, see `PositionIds`.

    Raises:
        ConfigError: a layer that slices do not go with.
    """

    def __init__(self, chunks: Sequence[nn.Module], positions: str | None = None) -> None:
        self.current = CurrentSlice()
        """The slice that runs now."""
        self._replaced: list[Any] = []
        self._positions = PositionIds(self.current, positions)
        for chunk in chunks:
            check_attention(chunk)
        for chunk in chunks:
            for _, module in core_attentions(chunk):
                attend_to_prefix(module.core_attention, self.current)
                self._replaced.append(module.core_attention)
            _accumulate_always(chunk)
            self._replaced += [module for module in chunk.modules() if balance_microbatches(module, self.current)]
            self._replaced += [module for module in chunk.modules() if count_from_slice(module, self.current, self._positions)]

    def remove(self) -> None:
        """Leave the modules as they were."""
        for module in self._replaced:
            for name in ("forward", *REPLACED):
                vars(module).pop(name, None)
        self._replaced.clear()


def _accumulate_always(chunk: nn.Module) -> None:
    """Clear the mark of the first microbatch, which megatron-core's wrappers of Transformer Engine's layers have when new.

    With `gradient_accumulation_fusion` the W of what was marked in its F overwrites the gradients, and the first W is that of a
    microbatch's last slice. Gradients are zeroed before every iteration, so that every W can add to them.
    """
    module: Any
    for module in chunk.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = False
