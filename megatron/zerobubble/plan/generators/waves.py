"""Waves: orders in which F of one microbatch and B of another meet on every rank in every step of the steady state, as a pair.

Both results of a pair exist only when it ends, so a microbatch goes one stage further per *slot*, down with its F and back with
its B. With `hops[s]` slots from stage s to the next one, and a microbatch every `period` slots, F of microbatch i is in slot
``period * i + down(s)`` of stage s, and its B in slot ``period * i + down(last) + turn + down(last) - down(s)``. What a rank has
in one slot is a pair. The first slots of a V with p=2, small letters for a rank's second stage, W left out::

    rank 0  F0    ..    F1    f0    F2+b0 f1    F3+b1 f2+B0 F4+b2 f3+B1 b3    f4+B2
    rank 1  ..    F0    f0    F1    f1    F2+b0 f2+B0 F3+b1 f3+B1 F4+b2 f4+B2 b3

Three of them are useful:

- V, one slot per hop, period 2: a rank alternates between F of its first stage beside B of its second, and the reverse. This is
  what DualPipeV does (github.com/deepseek-ai/DualPipe): a ZBV with pairs. It needs (2p+1)/2p of 1F1B's memory.
- linear, one slot per hop, period 1: every slot has a pair, and a microbatch is 2p slots under way: twice 1F1B's memory.
- linear, one slot per hop, period 2: a pair every other slot, and W in between. A microbatch takes at least two pairs. It needs
  (p+1)/p of 1F1B's memory. With two slots for some hops it needs more, and waits less.

W is not in the wave: it runs where its rank would wait, or where an F needs its memory, else at the end.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from megatron.zerobubble.plan.costs.all_to_alls import Filling
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.dependencies import requirements, result_of
from megatron.zerobubble.plan.ir import Launch, Op, OpKind, Placement, Plan

_MOST_WIDTHS = 8
"""Numbers of wide hops that are tried."""
WAITS = (0.0, 0.5)
"""Shares of a W: a rank that would wait for longer runs the W first."""


class Walk:
    """Ranks that run launches one after the other, the earliest first, each as early as it can.

    Args:
        placement: stage -> rank.
        costs: times of the stages.
    """

    def __init__(self, placement: Placement, costs: CostModel) -> None:
        self.free = [0.0] * placement.num_ranks
        """When each rank has run what it was given."""
        self._ranks, self._costs = placement.stage_to_rank, costs
        self._fillings = [Filling(costs) for _ in self.free]
        self._arrives: dict[Op, float] = {}
        """A result -> when the rank that needs it has it."""
        self._due = [(0.0, rank) for rank in range(placement.num_ranks)]

    def arrival(self, op: Op) -> float:
        """When all that an op needs is on its rank; infinite if it is not known yet."""
        needs = requirements(op, len(self._ranks))
        return max((self._arrives.get(need, math.inf) for need in needs), default=0.0)

    def launch_ms(self, launch: Launch) -> float:
        """The time of an op, or of a pair, if its rank runs it next."""
        return self._fillings[self._ranks[launch[0].stage]].time_ms(launch)

    def run(self, rank: int, launch: Launch) -> None:
        """Let a rank run something next, as early as it can."""
        start = max(self.free[rank], *map(self.arrival, launch))
        end = self.free[rank] = start + self._fillings[rank].run(launch)
        for op in launch:
            near = op.stage + (1 if op.kind is OpKind.F else -1)
            to = self._ranks[near] if op.kind is not OpKind.W and 0 <= near < len(self._ranks) else rank
            self._arrives[result_of(op)] = at = end + self._costs.link_ms(rank, to, op.microbatch)
            heapq.heappush(self._due, (at, to))
        heapq.heappush(self._due, (end, rank))

    def __iter__(self) -> Iterator[int]:
        """Ranks that may be able to run something, by the time at which they can; each as often as that may have changed."""
        while self._due:
            yield heapq.heappop(self._due)[1]


def waves(
    schedule: str, placement: Placement, num_microbatches: int, costs: CostModel, limit: float, *, splits: bool = True
) -> Iterator[Plan]:
    """Plans with pairs for equal microbatches on a linear placement or a V; for another placement none.

    Args:
        schedule: their name.
        placement: stage -> rank.
        num_microbatches: m.
        costs: times and activation memory of the stages, of whole microbatches that are alike.
        limit: most activation memory per rank, in microbatches, which W keeps where it can; a plan may need more.
        splits: whether B and W may be apart; False: every backward is a BW.
    """
    num_hops = placement.num_stages - 1
    shapes: list[tuple[int, int, list[int]]] = []  # period, turn, hops
    if placement.name == "V":
        shapes.append((2, 1, [1] * num_hops))
    elif placement.name == "linear" and num_hops:
        widths = sorted({round(num_hops * i / (_MOST_WIDTHS - 1)) for i in range(_MOST_WIDTHS)})
        shapes = [(1, 1, [1] * num_hops), *((2, 2, [1] * (num_hops - wide) + [2] * wide) for wide in widths)]
    for period, turn, hops in shapes:
        rows = _rows(placement, num_microbatches, period, turn, hops)
        for wait in WAITS if splits else WAITS[:1]:
            for fused in ((), (2,)) if splits else ((1, 2),):
                yield with_wgrads(schedule, placement, num_microbatches, rows, costs, limit, wait=wait, fused=fused)


def _rows(placement: Placement, num_microbatches: int, period: int, turn: int, hops: Sequence[int]) -> list[list[Launch]]:
    """Per rank F and B of its stages by slots, those of one slot together."""
    down = list(accumulate(hops, initial=0))
    rows = []
    for stages in placement.rank_to_stages:
        slots: dict[int, list[Op]] = {}
        for kind in (OpKind.F, OpKind.B):
            for stage in stages:
                first = down[stage] if kind is OpKind.F else 2 * down[-1] + turn - down[stage]
                for microbatch in range(num_microbatches):
                    slots.setdefault(first + period * microbatch, []).append(Op(stage, kind, microbatch))
        rows.append([tuple(slots[slot]) for slot in sorted(slots)])
    return rows


def with_wgrads(
    schedule: str,
    placement: Placement,
    num_microbatches: int,
    rows: Sequence[Sequence[Launch]],
    costs: CostModel,
    limit: float,
    *,
    wait: float,
    fused: tuple[int, ...] = (),
) -> Plan:
    """The order with its Ws, each as late as memory and waiting allow: beside all-to-alls that come before, a W costs no time.

    Args:
        schedule: name of the plan.
        placement: stage -> rank.
        num_microbatches: m.
        rows: of F, B and BW.
        costs: times and activation memory of the stages.
        limit: activation memory in microbatches above which a W runs before an F.
        wait: share of a W for which a rank rather waits.
        fused: numbers of ops of a launch, 1 or 2, that have a BW in place of a B. In a pair its W runs beside communication of F.
    """
    walk, held = Walk(placement, costs), [0.0] * placement.num_ranks
    waiting: list[deque[Op]] = [deque() for _ in rows]
    position, done = [0] * len(rows), [list[Launch]() for _ in rows]

    def run_wgrad(rank: int) -> None:
        op = waiting[rank].popleft()
        walk.run(rank, (op,))
        done[rank].append((op,))
        held[rank] -= costs.activation_after_backward[op.stage]

    for rank in walk:
        if position[rank] == len(rows[rank]):
            continue
        launch = rows[rank][position[rank]]
        start = max(walk.free[rank], *map(walk.arrival, launch))
        if start == math.inf:
            continue
        needed = sum(costs.activation[op.stage] for op in launch if op.kind is OpKind.F)
        if waiting[rank]:
            idle, most = start - walk.free[rank], wait * walk.launch_ms((waiting[rank][0],))
            if (idle > 0 and idle >= most) or held[rank] + needed > limit:
                run_wgrad(rank)
                continue
        if len(launch) in fused:
            launch = tuple(op._replace(kind=OpKind.BW) if op.kind is OpKind.B else op for op in launch)
        walk.run(rank, launch)
        done[rank].append(launch)
        position[rank] += 1
        for op in launch:
            held[rank] += costs.activation[op.stage] if op.kind is OpKind.F else -costs.activation[op.stage]
            if op.kind is OpKind.B:
                held[rank] += costs.activation_after_backward[op.stage]
                waiting[rank].append(op._replace(kind=OpKind.W))
    for rank, rest in enumerate(waiting):
        done[rank] += [(op,) for op in rest]
    ops = tuple(tuple(op for launch in row for op in launch) for row in done)
    pairs = frozenset(launch[0] for row in done for launch in row if len(launch) == 2)
    return Plan(schedule, placement, num_microbatches, ops, pairs=pairs)
