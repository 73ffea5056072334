"""Slices of equal work: how long each slice of a sequence is, and what it costs.

A slice of ``l`` tokens behind a prefix of ``q`` tokens has ``l`` tokens' work in linear layers and, with causal attention, that
of ``(q + l)^2 - q^2`` of the whole sequence's ``s^2`` pairs of tokens in attention: later slices of one length take longer. So
the lengths fall, such that the passes of all slices take the same time (SlimPipe, arXiv 2504.14519, has equal lengths and moves
attention between ranks instead). What a pass takes besides its tokens, the constant of a fit against lengths, is paid once per
slice: that is how short slices lose. Of microbatches with lengths of their own the longest has n slices, and the others as many
as have about the same work.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import numbers_of_slices
from megatron.zerobubble.plan.costs.length_model import LengthModel, Work, slices_of_sequence

NUMBERS_OF_SLICES = (1, 2, 4, 8, 16)
"""Of which `auto` chooses one."""
TILE = 128
"""Tokens of a tile in kernels for matrix products and attention."""
_STEPS = 8
"""Multiples that a slice has at least, so that rounding to them changes the work of a slice by a sixteenth at most."""
_AROUND = 2
"""How many multiples around the place of equal work cuts are looked for."""


def slice_lengths(work: Work, tokens: int, num_slices: int, *, multiple: int = 1) -> tuple[int, ...]:
    """Tokens of every slice of a sequence, such that all take about the same time.

    Args:
        work: time of a pass by tokens and squared lengths; its constant does not count.
        tokens: length of the sequence.
        num_slices: n.
        multiple: of which every length is one, as tensor and sequence parallelism and kernels want it.

    Returns:
        n lengths whose sum is `tokens`, none below `multiple`.

    Raises:
        ConfigError: a sequence that is no multiple of `multiple`, or too short for the slices.
    """
    if tokens % multiple:
        raise ConfigError(
            f"a sequence of {tokens} tokens cannot be cut at multiples of {multiple}: pad it, or choose another one"
        )
    units = tokens // multiple
    if num_slices > units:
        unit = "tokens" if multiple == 1 else f"parts of {multiple} tokens"
        raise ConfigError(f"a sequence of {tokens} tokens has {units} {unit}, which is too few for {num_slices} slices")
    if not (work.per_token or work.per_square):
        work = Work(per_token=1.0)

    def before(unit: int) -> float:
        return work.at(multiple * unit, (multiple * unit) ** 2) - work.constant

    # Near the places of equal work, the cuts with the least squared times: rounding each by itself may add up.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for index in range(1, num_slices + 1):
        near = bisect.bisect_left(range(units + 1), before(units) * index / num_slices, key=before)
        found = {}
        for cut in range(max(near - _AROUND, index), min(near + _AROUND, units - num_slices + index) + 1):
            ways = [(cost + (before(cut) - before(at)) ** 2, (*cuts, cut)) for at, (cost, cuts) in best.items() if at < cut]
            if ways:
                found[cut] = min(ways)
        best = found
    cuts = (0, *best[units][1])
    return tuple((after - at) * multiple for at, after in itertools.pairwise(cuts))


def check_slice_lengths(lengths: Sequence[int], tokens: int, *, multiple: int = 1) -> None:
    """Check the lengths of slices that were planned.

    Args:
        lengths: tokens of each slice.
        tokens: length of the sequence.
        multiple: of which every length must be one.

    Raises:
        ConfigError: they are for sequences of another length, or a slice is empty or no multiple.
    """
    if sum(lengths) != tokens:
        raise ConfigError(
            f"slices of {list(lengths)} tokens make {sum(lengths)}, and a sequence has {tokens}: plan for its length"
        )
    wrong = next((length for length in lengths if length < 1 or length % multiple), None)
    if wrong is not None:
        raise ConfigError(f"slices of {list(lengths)} tokens: {wrong} is not a positive multiple of {multiple}")


def unlike_lengths(tokens: int, *, multiple: int = 1) -> tuple[int, ...]:
    """Tokens of slices to measure: about a half, a quarter, and two eighths of a sequence.

    Costs of slices that all have the same length would not say what a pass takes besides its tokens.

    Raises:
        ConfigError: a sequence that is no multiple of `multiple`, or has fewer than 8 of them.
    """
    slice_lengths(Work(), tokens, 8, multiple=multiple)  # raises
    rest, lengths = tokens // multiple, []
    for _ in range(3):
        lengths.append(rest // 2 * multiple)
        rest -= rest // 2
    return (*lengths, rest * multiple)


def work_of(model: LengthModel) -> Work:
    """Time of F, B and W of all stages by tokens and squared lengths; where none takes time, as if by tokens.

    By the FLOPs of a transformer layer B and W together are twice F for any share of attention, so that F and the fused backward
    are each the same for all slices of equal work, too. B alone is longer for later slices, and W shorter.
    """
    passes = [*model.forward_ms, *model.backward_ms, *model.wgrad_ms]
    work = Work(0.0, math.fsum(terms.per_token for terms in passes), math.fsum(terms.per_square for terms in passes))
    return work if work.per_token or work.per_square else Work(per_token=1.0)


def costs_of_other_slices(costs: CostModel, num_slices: int, *, multiple: int = 1) -> CostModel:
    """The costs of other slices, of equal work, or with 1 of whole microbatches, fitted to measured slices of unlike lengths.

    Where the latency of messages is not known, one takes no less time for being shorter than the longest measured one.

    Args:
        costs: with slices and their lengths.
        num_slices: n.
        multiple: of which every length is one.

    Raises:
        ConfigError: see `slice_lengths`.
    """
    measured = costs.table
    model = LengthModel.fit(measured)
    rule = CutRule(work=work_of(model), multiple=multiple)
    lengths = rule.lengths(sum(measured.tokens), num_slices)
    table = replace(model.table([slices_of_sequence(lengths)]).of(0), keys=measured.keys, key_gradients=measured.key_gradients)
    if num_slices == 1:
        table = replace(table, activation=measured.whole.activation, keys=(), key_gradients=(), tokens=())
    least = 0.0 if costs.latency_share else 1.0
    return costs.with_table(table, message_length=max(least, max(lengths) / max(measured.tokens)))


@dataclass(frozen=True, kw_only=True)
class CutRule:
    """Which slices microbatches are cut into, in a plan and in a run."""

    work: Work = field(default_factory=lambda: Work(per_token=1.0))
    """Time or operations of a pass by tokens and squared lengths; its constant does not count."""
    multiple: int = 1
    """What the length of each slice is a multiple of."""
    tile: int = 1
    """Where sequences are long enough, lengths are multiples of this many tokens, or of a power of two up to it."""

    def lengths(self, tokens: int, num_slices: int) -> tuple[int, ...]:
        """Tokens of every slice of a sequence. Raises ConfigError as `slice_lengths`."""
        return slice_lengths(self.work, tokens, num_slices, multiple=self.multiple_of(tokens, num_slices))

    def pieces(self, tokens: Sequence[int], num_slices: int) -> list[tuple[int, ...]]:
        """Tokens of the slices of microbatches: `num_slices` of the longest, of the others as many as have about the same work.

        Args:
            tokens: of every microbatch.
            num_slices: n.

        Raises:
            ConfigError: see `slice_lengths`.
        """
        return [self.lengths(*each) for each in zip(tokens, self.counts(tokens, num_slices), strict=True)]

    def counts(self, tokens: Sequence[int], num_slices: int, fewest: Sequence[int] = ()) -> tuple[int, ...]:
        """Slices of every microbatch, as in `pieces`.

        Args:
            tokens: of every microbatch.
            num_slices: n.
            fewest: of every microbatch, tokens of the shortest that is cut into as many slices; empty: its own.
        """
        counts = numbers_of_slices([self.work.at(each, each * each) - self.work.constant for each in tokens], num_slices)
        return tuple(min(count, max(1, each // self.multiple)) for count, each in zip(counts, fewest or tokens, strict=True))

    def multiple_of(self, tokens: int, num_slices: int) -> int:
        """`multiple` times a power of two, up to a tile, with a few steps for each slice."""
        best = self.multiple
        while best * 2 <= self.tile and tokens % (best * 2) == 0 and tokens >= best * 2 * num_slices * _STEPS:
            best *= 2
        return best
