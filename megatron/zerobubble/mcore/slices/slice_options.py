"""How the microbatches of a run are cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron.zerobubble.flags.loop_options import Cut
from megatron.zerobubble.mcore.slices.current_slice import SlicePart
from megatron.zerobubble.plan.costs.slicing import TILE, CutRule, check_slice_lengths, unlike_lengths

__all__ = ["SliceOptions"]


@dataclass(frozen=True, kw_only=True)
class SliceOptions:
    """Beside the number of slices, which the schedule has."""

    lengths: tuple[int, ...] = ()
    """Tokens of each slice, for sequences of their sum; empty, and for other sequences: slices of equal work by operations."""
    cut: Cut | None = None
    """Cuts what the data iterators return; None: `cut_batch`."""
    positions: str | None = None
    """What the loop's position ids are in every slice, see `PositionIds`; None: found out."""
    is_measured: bool = False
    """Whether slices have unlike lengths, from whose times those of any slices follow; until `of_lengths`."""
    rule: CutRule = field(default_factory=lambda: CutRule(tile=TILE))
    """Cuts into slices of equal work by operations: what is measured changes the order of ops and never what they compute."""

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
            lengths = unlike_lengths(tokens, multiple=self.rule.multiple)
        elif len(lengths) == num_slices and sum(lengths) == tokens:
            check_slice_lengths(lengths, tokens, multiple=self.rule.multiple)
        else:
            lengths = self.rule.lengths(tokens, num_slices)
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

    def of_lengths(self, lengths: tuple[int, ...]) -> SliceOptions:
        """The options of a run that goes on with slices of these lengths."""
        return replace(self, lengths=lengths, is_measured=False)
