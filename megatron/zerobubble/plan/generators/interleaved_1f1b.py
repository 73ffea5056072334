"""Interleaved 1F1B: v stages per rank, placed round-robin, with a fused backward (arXiv 2104.04473, section 2.2.2).

Microbatches run in groups of p: a group runs through a rank's first stage, then through its second, and so on;
the backward passes visit the stages in reverse. p=2, v=2, m=4 (stages 0 and 2 on rank 0, 1 and 3 on rank 1), small
letters for the second stage of a rank::

    rank 0  F0 F1 f0 f1 F2 .. bw0-- F3 bw1-- f2 BW0-- f3 BW1-- .. bw2-- .. bw3-- BW2-- BW3--
    rank 1     F0 F1 f0 bw0-- f1 bw1-- F2 BW0-- F3 BW1-- f2 bw2-- f3 bw3-- BW2-- BW3--

Bubble, with equal stages and m a multiple of p: ((p-1)/v) / (m + (p-1)/v) of the span. Memory: 1 + (p-1)/(p*v) of
1F1B's on rank 0, with m >= 2p. If m is not a multiple of p, the schedule is built for the next multiple and the excess
microbatches are removed.
"""

from __future__ import annotations

from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.transforms import first_microbatches


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int) -> Plan:
    """Interleaved 1F1B for any p >= 1, v >= 1 and m >= 1. With v=1 it is 1F1B."""
    p, v = num_ranks, num_chunks
    m = -(-num_microbatches // p) * p
    rows = []
    for rank in range(p):
        stages = [rank + chunk * p for chunk in range(v)]
        forwards = _in_groups(stages, OpKind.F, m, p)
        backwards = _in_groups(stages[::-1], OpKind.BW, m, p)
        num_ahead = min((p - rank - 1) * (1 if v == 1 else 2) + (v - 1) * p + 1, len(forwards))
        row = forwards[:num_ahead]
        for step, backward in enumerate(backwards):
            row.append(backward)
            row.extend(forwards[num_ahead + step : num_ahead + step + 1])
        rows.append(row)
    return first_microbatches(Plan.of("interleaved-1f1b", Placement.loop(p, v), m, rows), num_microbatches)


def _in_groups(stages: list[int], kind: OpKind, num_microbatches: int, group: int) -> list[Op]:
    """All ops of one kind on one rank: group by group, within a group stage by stage."""
    return [
        Op(stage, kind, microbatch)
        for first in range(0, num_microbatches, group)
        for stage in stages
        for microbatch in range(first, first + group)
    ]
