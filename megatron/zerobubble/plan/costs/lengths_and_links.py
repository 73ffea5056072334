"""Lengths of microbatches and links of ranks as a user gives them, beside the times of a microbatch of the mean length.

The command line and the playground both plan from these: a list of lengths instead of costs of every microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.costs.slicing import Slicing


def with_sizes(links: Links, tokens: Sequence[int], per_token: float, *, source: str, remedy: str) -> Links:
    """Links with the size of each microbatch's message, if bytes per token are given.

    Args:
        links: as read.
        tokens: of every microbatch.
        per_token: bytes of a message per token; 0: what `links` has.
        source: name of the links, for the message.
        remedy: what to give where a bandwidth has no sizes.

    Raises:
        ConfigError: a bandwidth, and messages of 0 bytes.
    """
    if per_token > 0 and tokens:
        links = replace(links, message_bytes=tuple(per_token * count for count in tokens))
    if links.gigabytes_per_s and not any(links.message_bytes):
        raise ConfigError(f"{source} has gigabytes_per_s and messages of 0 bytes; {remedy}")
    return links


@dataclass(frozen=True)
class Unequal:
    """Lengths and links."""

    tokens: tuple[int, ...] = ()
    """Tokens of every microbatch; empty: all are equal."""
    attention_share: float = 0.0
    """Share of F's time in attention, at the mean length."""
    links: Links | None = None
    """None: one latency for all."""
    model: LengthModel | None = None
    """Measured costs by length, in place of an attention share and of times at the mean length; None: not measured."""

    def applied(self, costs: CostModel) -> CostModel:
        """The costs of microbatches with these lengths on these links, from those of a microbatch of the mean length.

        Equal lengths have the given costs, to the bit, and so the usual plan. Of measured costs by length the given ones only
        add the P2P latency and the links.

        Raises:
            ConfigError: the costs are of unequal microbatches already.
        """
        if self.tokens and not costs.table.is_alike and self.model is None:
            raise ConfigError("the costs are those of every microbatch; drop the lengths (--microbatch-tokens)")
        table, tokens = costs.table, self.tokens
        if tokens and self.model is not None:
            table = self.model.costs(tokens)
        elif len(set(tokens)) > 1:  # else the model gives these costs, but for the last digits
            mean, squares = (sum(count**power for count in tokens) / len(tokens) for power in (1, 2))
            table = LengthModel.of(costs, tokens=mean, squares=squares, attention_share=self.attention_share).costs(tokens)
        return CostModel.of(table, comm_ms=costs.comm_ms, links=costs.links if self.links is None else self.links)

    def cut(self, costs: CostModel, slicing: Slicing, num_slices: int) -> CostModel:
        """`applied`, of microbatches that are cut into slices of about equal work, the longest into `num_slices`.

        Raises:
            ConfigError: as `Slicing.applied`.
        """
        if num_slices == 1:
            return self.applied(costs)
        return slicing.applied(replace(self, tokens=()).applied(costs), num_slices, self.tokens)

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
