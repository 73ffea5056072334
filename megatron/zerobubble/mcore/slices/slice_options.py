"""How the microbatches of a run are cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.zerobubble.mcore.slices.batches import Cut
from megatron.zerobubble.mcore.slices.current_slice import SlicePart
from megatron.zerobubble.plan.costs.length_model import Terms
from megatron.zerobubble.plan.costs.slicing import check_slice_lengths, slice_lengths, unlike_lengths

__all__ = ["SliceOptions"]

_TILE = 128
"""Tokens of a tile in kernels for matrix products and attention. Lengths are multiples of it, or of a part of it where slices are
short."""
_STEPS = 8
"""Multiples that a slice has at least, so that rounding to them changes the work of a slice by a sixteenth at most."""


@dataclass(frozen=True, kw_only=True)
class SliceOptions:
    """Beside the number of slices, which the schedule has."""

    lengths: tuple[int, ...] = ()
    """Tokens of each slice, for sequences of their sum; empty, and for other sequences: slices of equal work by operations."""
    cut: Cut | None = None
    """Cuts what the data iterators return; None: `cut_batch`."""
    multiple: int = 1
    """What the length of each slice must be a multiple of."""
    is_measured: bool = False
    """Whether slices have unlike lengths, from whose times those of any slices follow; until `of_lengths`."""
    attention_share: Callable[[int], float] | None = None
    """The share of a layer's time in attention, by the tokens of a whole sequence; None: attention takes none."""

    def parts(self, tokens: int, num_slices: int) -> tuple[SlicePart, ...]:
        """The slices of a sequence.

        Args:
            tokens: of the sequence.
            num_slices: n.

        Raises:
            ConfigError: the tokens cannot be cut like that.
        """
        lengths = self.lengths
        if self.is_measured:
            lengths = unlike_lengths(tokens, multiple=self.multiple)
        elif len(lengths) == num_slices and sum(lengths) == tokens:
            check_slice_lengths(lengths, tokens, multiple=self.multiple)
        else:
            share = 0.0 if self.attention_share is None else self.attention_share(tokens)
            work = Terms(per_token=1 - share, per_square=share / tokens)
            lengths = slice_lengths(work, tokens, num_slices, multiple=self.multiple_of(tokens, num_slices))
        offsets = itertools.accumulate(lengths, initial=0)
        return tuple(SlicePart(index, offset, length, tokens) for index, (offset, length) in enumerate(zip(offsets, lengths)))  # noqa: B905 -- one offset more

    def of_lengths(self, lengths: tuple[int, ...]) -> SliceOptions:
        """The options of a run that goes on with slices of these lengths."""
        return replace(self, lengths=lengths, is_measured=False)

    def multiple_of(self, tokens: int, num_slices: int) -> int:
        """What lengths of equal work are a multiple of: `multiple` times a power of two, up to a tile, with a few steps each."""
        best = self.multiple
        while best * 2 <= _TILE and tokens % (best * 2) == 0 and tokens >= best * 2 * num_slices * _STEPS:
            best *= 2
        return best
