"""What a core takes: problems, orders and policies. `core.Core` documents what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.ir import Placement

Order = list[bytes]
"""Op codes per rank: bytes ``3 * chunk + kind`` with kind 0, 1, 2 for F, B, W."""

Rows = Sequence[bytes | bytearray]
"""Op codes per rank, as in `Order`, possibly without W."""


class Problem(NamedTuple):
    """The costs and limits under which a core scores orders. Lists of slices, or of unequal microbatches, have one value each."""

    num_microbatches: int
    """m."""
    stage_to_rank: Sequence[int]
    """The placement."""
    durations: Sequence[float]
    """F, B, W time of every stage, flat over (stage, F B W), in milliseconds."""
    comm_ms: float
    """P2P latency per message in milliseconds."""
    activation: Sequence[float]
    """Per stage, memory from F to B."""
    remaining: Sequence[float]
    """Per stage, memory from B to W."""
    limit: float
    """Most memory per rank, in the unit of `activation`."""
    is_makespan: bool = False
    """Whether to minimize the makespan instead of the span."""
    links: Sequence[float] = ()
    """Time of a message of each producing stage, flat over (F B, stage), in place of `comm_ms`; empty: `comm_ms` for all."""
    busy: Sequence[float] = ()
    """The part of it in which the link takes no other message, likewise; empty: none."""
    excess_ms: float = 0.0
    """Milliseconds charged per unit of memory above the limit; 0: an order that exceeds it has no score."""
    num_slices: int = 1
    """n, slices per microbatch; of unequal microbatches the most."""
    counts: Sequence[int] = ()
    """Slices of each unequal microbatch; empty: n of each."""

    @property
    def num_passes(self) -> int:
        """Passes through a stage in each direction."""
        return sum(self.counts) or self.num_microbatches * self.num_slices

    @staticmethod
    def of(
        placement: Placement,
        num_microbatches: int,
        costs: CostModel,
        *,
        limit: float,
        is_makespan: bool,
        fused: bool = False,
        excess_ms: float = 0.0,
    ) -> Problem:
        """That of these costs; with `fused`, of F and BW only, which need no memory after B."""
        counts = costs.slice_counts
        width = sum(counts) or (costs.num_slices if costs.num_microbatches is None else num_microbatches)
        ranks, last = placement.stage_to_rank, placement.num_stages - 1
        links, busy = list[float](), list[float]()
        if costs.links is not None:
            ends = [(stage, min(max(stage + step, 0), last)) for step in (1, -1) for stage in range(placement.num_stages)]
            messages = [(ranks[a], ranks[b], microbatch) for a, b in ends for microbatch in range(width)]
            links = [float(costs.link_ms(*message)) for message in messages]
            busy = [float(costs.busy_ms(*message)) for message in messages]
        activation, remaining = ([float(value) for row in costs.rows(name, width) for value in row] for name in COST_LISTS[3:])
        return Problem(
            num_microbatches,
            ranks,
            flat_durations(costs, fused=fused, width=width),
            float(costs.comm_ms),
            activation,
            [0.0] * len(remaining) if fused else remaining,
            limit,
            is_makespan,
            links,
            busy if any(busy) else [],
            excess_ms,
            costs.num_slices,
            counts,
        )


def flat_durations(costs: CostModel, *, fused: bool = False, width: int = 1) -> tuple[float, ...]:
    """F, B, W of every stage in turn, in milliseconds; of slices, and of unequal microbatches, `width` many, over each.

    With `fused`, the time of W is added to B and W itself takes none.
    """
    flat: list[float] = []
    for forward, backward, wgrad in zip(*(costs.rows(name, width) for name in COST_LISTS[:3]), strict=True):
        fused_backward = [b + w for b, w in zip(backward, wgrad, strict=True)]
        flat += [*forward, *fused_backward, *[0.0] * len(wgrad)] if fused else [*forward, *backward, *wgrad]
    return tuple(map(float, flat))


class Policy(NamedTuple):
    """The parameters of a list schedule."""

    durations: Sequence[float]
    """F, B, W time of every stage, flat, in milliseconds; they may differ from the true ones."""
    comm_ms: float
    """P2P latency per message in milliseconds; it may differ from the true one."""
    offsets: Sequence[float]
    """Priority of every stage's F, B and W of microbatch 0, flat."""
    caps: Sequence[float]
    """Per stage, most microbatches between its F and the F of the rank's next chunk (of the last chunk: its own B).

    With slices all these numbers count slices, and n-1 more of the last chunk may be before its own B."""
    period: float
    """Distance of two microbatches in priority."""
    wait_weight: float
    """Priority lost per millisecond of waiting for an op."""
    max_wait: float
    """Longest wait for an op while another could run."""
    limit: float
    """Memory limit of the policy, in the unit of the core's limit; the smaller of the two applies."""
    settled: float
    """Share to which every cap falls; above 0."""
    settle_after: float
    """Number of microbatches over which it falls; above 0."""
