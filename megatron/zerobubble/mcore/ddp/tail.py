"""How the last Ws of a rank run, where gradients are reduced over replicas beside them.

Run one after another, all but the last of them complete no gradient, and every bucket is reduced beside that last W, or after it.
So behind the last B of a stage its Ws run weight by weight (`WeightGradStore.run_together`), in the order of DDP's
buckets: these become final all along the tail. Each weight still adds its microbatches in ascending order, to the same bits.

Nothing waits for the B of stage 0. Where it and its W are a rank's last ops, they run as the full backward does, layer by layer,
and each weight is reported when autograd has come to it. `plan.transforms.reductions_beside_tail` orders the ops for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.wgrad.deferring import WgradKey

__all__ = ["Tail", "tail_of"]


@dataclass(frozen=True)
class Tail:
    """The last Ws of a rank that do not run one by one; by default none."""

    fused: Op | None = None
    """The B that runs with its W as one full backward."""
    done: Op | None = None
    """That W: nothing is left for it."""
    parts: Mapping[Op, tuple[tuple[WgradKey, ...], int]] = field(default_factory=dict)
    """W -> the Ws that it runs a part of, and which part."""


def tail_of(row: Sequence[Op], chunk_of: Callable[[int], int]) -> Tail:
    """The tail of a rank that runs these ops.

    Args:
        row: the rank's ops.
        chunk_of: stage -> its chunk on the rank.
    """
    fused = done = None
    if len(row) > 1 and row[-2].stage == 0 and row[-2].kind is OpKind.B and row[-1] == row[-2]._replace(kind=OpKind.W):
        fused, done = row[-2:]
    last = {op.stage: index for index, op in enumerate(row) if op.kind is OpKind.B}
    parts = {}
    for stage, begin in last.items():
        ops = [op for op in row[begin:] if op.stage == stage and op.kind is OpKind.W]
        keys = tuple(WgradKey(chunk_of(op.stage), op.microbatch, op.slice) for op in ops)
        if len(ops) > 1:
            parts.update({op: (keys, part) for part, op in enumerate(ops)})
    return Tail(fused, done, parts)
