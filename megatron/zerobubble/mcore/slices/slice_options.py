"""How the microbatches of a run are cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron.zerobubble.mcore.slices.batches import Cut
from megatron.zerobubble.mcore.slices.current_slice import SlicePart
from megatron.zerobubble.plan.slice_lengths import check_slice_lengths, equal_slice_lengths

__all__ = ["SliceOptions"]


@dataclass(frozen=True, kw_only=True)
class SliceOptions:
    """Beside the number of slices, which the schedule has."""

    lengths: tuple[int, ...] = ()
    """Tokens of each slice, for sequences of their sum; empty, and for sequences of other lengths: slices are equally long."""
    cut: Cut | None = None
    """Cuts what the data iterators return; None: `cut_batch`."""

    def parts(self, tokens: int, num_slices: int, *, multiple: int) -> tuple[SlicePart, ...]:
        """The slices of a sequence.

        Args:
            tokens: of the sequence.
            num_slices: n.
            multiple: what the length of each slice must be a multiple of.

        Raises:
            ConfigError: the tokens cannot be cut like that.
        """
        lengths = self.lengths
        if len(lengths) == num_slices and sum(lengths) == tokens:
            check_slice_lengths(lengths, tokens, multiple=multiple)
        else:
            lengths = equal_slice_lengths(tokens, num_slices, multiple=multiple)
        offsets = itertools.accumulate(lengths, initial=0)
        return tuple(SlicePart(index, offset, length, tokens) for index, (offset, length) in enumerate(zip(offsets, lengths)))  # noqa: B905 -- one offset more
