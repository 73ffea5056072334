"""Lengths of microbatches and links of ranks as a user gives them, beside the times of a microbatch of the mean length.

The command line plans from a list of lengths instead of costs of every microbatch, and it and the playground from a length and
shares instead of costs of every slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS, CostTable
from megatron.zerobubble.plan.costs.length_model import LengthModel, slices_of_sequence
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.costs.slicing import CutRule, work_of


@dataclass(frozen=True)
class LengthsAndLinks:
    """What a user gives of lengths, of what they cost, and of links."""

    tokens: tuple[int, ...] = ()
    """Tokens of every microbatch; empty: all are equal."""
    attention_share: float = 0.0
    """Share of F's time in attention, at the mean length."""
    links: Links | None = None
    """None: one latency for all."""
    model: LengthModel | None = None
    """Measured costs by length, in place of a share, an overhead and times at the mean length; None: not measured."""
    sequence_length: int | None = None
    """Tokens of a sequence that is cut into slices of equal work, where microbatches have lengths of their own of the longest.
    None: slices are even parts."""
    key_share: float = 0.0
    """Share of F's activation memory that is keys and values, which a stage keeps from a microbatch's first F to its last B."""
    overhead_ms: float = 0.0
    """What each F, B and W of a slice takes besides the work of its tokens: launches, kernels too short for the device."""
    multiple: int = 1
    """Of which the length of every slice is one."""

    def __post_init__(self) -> None:
        if not 0 <= self.key_share < 1:
            raise ConfigError(f"key_share is {quoted(self.key_share)}; it must be 0 or more and below 1")
        for name, value in (("sequence_length", self.sequence_length), ("multiple", self.multiple)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {quoted(value)}; it must be a whole number, 1 or more")
        if not 0 <= self.overhead_ms < math.inf:
            raise ConfigError(f"overhead_ms is {quoted(self.overhead_ms)}; it must be a number of 0 or more")

    def applied(self, costs: CostModel, num_slices: int = 1) -> CostModel:
        """The costs of microbatches with these lengths on these links, from those of a whole one of the mean length.

        Equal lengths have the given costs, to the bit, and so the usual plan. Of measured costs by length the given ones only
        add the P2P latency and the links. Slices have about equal work, if a length is given.

        Args:
            costs: of whole microbatches.
            num_slices: n, of the longest microbatch.

        Raises:
            ConfigError: the costs are of unequal microbatches already, or see `slice_lengths`.
        """
        tokens, is_cut = self.tokens, num_slices > 1 and self.sequence_length is not None
        if is_cut and not costs.table.is_alike:
            raise ConfigError("costs of every microbatch do not say what its slices cost; give lengths, or 1 slice")
        if tokens and self.model is None and not costs.table.is_alike:
            raise ConfigError("the costs are those of every microbatch; drop the lengths (--microbatch-tokens)")
        linked = costs.changed(links=costs.links if self.links is None else self.links)
        if is_cut:
            return linked.with_table(self._cut(self.by_length(costs, self.overhead_ms), num_slices))
        if (tokens and self.model is not None) or len(set(tokens)) > 1:  # else a model gives these costs, but for the last digits
            return linked.changed(table=self.by_length(costs).costs(tokens))
        return linked

    def by_length(self, costs: CostModel, overhead_ms: float = 0.0) -> LengthModel:
        """How costs follow from the length, the given ones being the means, each time with a part that is paid per pass."""
        if self.model is not None:
            return self.model
        lengths = self.tokens or (self.sequence_length or 1,)
        mean, squares = (sum(length**power for length in lengths) / len(lengths) for power in (1, 2))
        model = LengthModel.of(costs, tokens=mean, squares=squares, attention_share=self.attention_share)
        if not overhead_ms:
            return model
        lists = model.lists
        for name in COST_LISTS[:3]:
            times = costs.lists[name]
            if min(times) < overhead_ms:
                raise ConfigError(
                    f"overhead_ms is {overhead_ms:g} and a pass takes {min(times):g} ms ({name}); it must be a part of that"
                )
            scaled = (terms.scaled(1 - overhead_ms / time) for terms, time in zip(lists[name], times, strict=True))
            lists[name] = tuple(terms._replace(constant=overhead_ms) for terms in scaled)
        return LengthModel(**lists)

    def _cut(self, model: LengthModel, num_slices: int) -> CostTable:
        rule, tokens = CutRule(work=work_of(model), multiple=self.multiple), self.tokens or (self.sequence_length or 1,)
        longest = rule.lengths(max(tokens), num_slices)  # refuses a sequence that is too short
        if len(set(tokens)) == 1:
            return model.table([slices_of_sequence(longest)], key_share=self.key_share).of(0)
        return model.table(list(map(slices_of_sequence, rule.pieces(tokens, num_slices))), key_share=self.key_share)

    @property
    def is_plain(self) -> bool:
        """Whether all microbatches have one length, and all messages take the same time."""
        return len(set(self.tokens)) <= 1 and (self.links is None or self.links.is_uniform)

    def auto_memory_limit(self, num_ranks: int) -> float:
        """1F1B's activation memory on rank 0, in the order of the data that needs most: that of the longest microbatches."""
        if not self.tokens:
            return 1.0
        held = min(num_ranks, len(self.tokens))
        if self.model is not None:
            sizes = sorted(map(math.fsum, zip(*self.model.costs(self.tokens).activation, strict=True)))
            return math.fsum(sizes[-held:]) / (held * num_ranks)
        return sum(sorted(self.tokens)[-held:]) * len(self.tokens) / (held * sum(self.tokens))
