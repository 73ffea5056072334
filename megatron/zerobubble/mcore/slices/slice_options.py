"""How the microbatches of a run are cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.zerobubble.mcore.slices.batches import Cut, CutDimensions
from megatron.zerobubble.mcore.slices.current_slice import SlicePart
from megatron.zerobubble.plan.costs.cost_table import numbers_of_slices
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
    cut: Cut | CutDimensions | None = None
    """Cuts what the data iterators return, or what `cut_batch` cannot know of it; None: `cut_batch` alone."""
    positions: str | None = None
    """What the loop's position ids are in every slice, see `PositionIds`; None: found out."""
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
            lengths = slice_lengths(self._work(tokens), tokens, num_slices, multiple=self.multiple_of(tokens, num_slices))
        offsets = itertools.accumulate(lengths, initial=0)
        return tuple(SlicePart(index, offset, length, tokens) for index, (offset, length) in enumerate(zip(offsets, lengths)))  # noqa: B905 -- one offset more

    def parts_of(self, tokens: Sequence[int], slices: Sequence[int]) -> list[tuple[SlicePart, ...]]:
        """The slices of each of some sequences.

        Args:
            tokens: of every sequence.
            slices: number of slices of every sequence.

        Raises:
            ConfigError: as `parts`.
        """
        each = list(zip(tokens, slices, strict=True))
        parts = {which: self.parts(*which) for which in dict.fromkeys(each)}
        return [parts[which] for which in each]

    def numbers(self, tokens: Sequence[int], num_slices: int, fewest: Sequence[int]) -> tuple[int, ...]:
        """Slices of unequal microbatches by their operations: `num_slices` of the longest, and of the others fewer.

        Args:
            tokens: of every microbatch.
            num_slices: n.
            fewest: of every microbatch, tokens of the shortest that is cut into as many slices.
        """
        work = self._work(max(tokens))
        counts = numbers_of_slices([work.at(each, each * each) for each in tokens], num_slices)
        return tuple(min(count, max(1, each // self.multiple)) for count, each in zip(counts, fewest, strict=True))

    def _work(self, tokens: int) -> Terms:
        """The operations of sequences, in those of a token of one of `tokens` tokens."""
        share = 0.0 if self.attention_share is None else self.attention_share(tokens)
        return Terms(per_token=1 - share, per_square=share / tokens)

    def of_lengths(self, lengths: tuple[int, ...]) -> SliceOptions:
        """The options of a run that goes on with slices of these lengths."""
        return replace(self, lengths=lengths, is_measured=False)

    def multiple_of(self, tokens: int, num_slices: int) -> int:
        """What lengths of equal work are a multiple of: `multiple` times a power of two, up to a tile, with a few steps each."""
        best = self.multiple
        while best * 2 <= _TILE and tokens % (best * 2) == 0 and tokens >= best * 2 * num_slices * _STEPS:
            best *= 2
        return best
