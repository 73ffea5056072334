"""What a core takes and does: problems, orders, policies, and the methods of `PythonCore` and of the compiled core (`core`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement

Order = list[bytes]
"""Op codes per rank: bytes ``3 * chunk + kind`` with kind 0, 1, 2 for F, B, W."""

Rows = Sequence[bytes | bytearray]
"""Op codes per rank, as in `Order`, possibly without W."""


class Problem(NamedTuple):
    """The costs and limits under which a core scores orders. Lists of unequal microbatches have a value for each in turn."""

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

    @staticmethod
    def of(
        placement: Placement, num_microbatches: int, costs: CostModel, *, limit: float, is_makespan: bool, fused: bool = False
    ) -> Problem:
        """That of equal microbatches with these costs; with `fused`, of F and BW only."""
        return Problem(
            num_microbatches,
            placement.stage_to_rank,
            flat_durations(costs, fused=fused),
            float(costs.comm_ms),
            tuple(map(float, costs.activation)),
            tuple(map(float, costs.activation_after_backward)),
            limit,
            is_makespan,
        )


def flat_durations(costs: CostModel, *, fused: bool = False) -> tuple[float, ...]:
    """F, B, W of every stage in turn, in milliseconds. With `fused`, the time of W is added to B and W itself takes none."""
    backward = costs.backward_ms
    wgrad = costs.wgrad_ms
    if fused:
        backward = tuple(b + w for b, w in zip(costs.backward_ms, costs.wgrad_ms, strict=True))
        wgrad = (0.0,) * costs.num_stages
    return tuple(value for stage in zip(costs.forward_ms, backward, wgrad, strict=True) for value in stage)


class Policy(NamedTuple):
    """The parameters of a list schedule."""

    durations: Sequence[float]
    """F, B, W time of every stage, flat, in milliseconds; they may differ from the true ones."""
    comm_ms: float
    """P2P latency per message in milliseconds; it may differ from the true one."""
    offsets: Sequence[float]
    """Priority of every stage's F, B and W of microbatch 0, flat."""
    caps: Sequence[float]
    """Per stage, most microbatches between its F and the F of the rank's next chunk (of the last chunk: its own B)."""
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


class Core(Protocol):
    """The interface of `PythonCore` and of the compiled core."""

    work: float
    """Op evaluations so far."""

    def stop(self) -> None:
        """End annealing at the next move, now and from now on; may be called from any thread."""

    def evaluate(self, order: Order) -> tuple[float, float]:
        """Score, which the search minimizes, and objective (span or makespan) in ms; infinite if it deadlocks."""

    def decode(self, policy: Policy) -> Order:
        """List-schedule a policy. Empty if it cannot finish."""

    def fill(self, rows: Order, patience: Sequence[float]) -> Order:
        """The order with every W inserted; patience per rank. Empty if the rows deadlock or exceed the memory limit."""

    def anneal(self, rows: Order, patience: Sequence[float], seed: int, budget: float, temperature: float) -> Order:
        """Move ops within rows at random, with an acceptance threshold falling from `temperature` to 0, and fill the best.

        If some patience is finite (rows without W), more of the moves change many ops at once, and some change the patience.
        """

    def evaluate_assigned(self, rows: Order, patience: Sequence[float], assignment: Sequence[int]) -> tuple[float, float]:
        """Score and objective of rows whose microbatch i is `assignment[i]` in the costs; beyond the limit only a score."""

    def fill_assigned(self, rows: Order, patience: Sequence[float], assignment: Sequence[int]) -> Order:
        """`fill` with this assignment."""

    def assign(
        self,
        rows: Order,
        patience: Sequence[float],
        assignment: Sequence[int],
        seed: int,
        budget: float,
        temperature: float,
        fixed_order: bool,
    ) -> tuple[Order, list[int]]:
        """Anneal the assignment and, unless it is fixed, the order. The order is empty if none met fits the memory limit."""
