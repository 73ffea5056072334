"""Read and write the action tables of torch.distributed.pipelining: one line per rank, one action per cell.

torch uses other letters: our B (input gradient, dgrad) is ``I`` there, and our fused BW is ``B``. A pair is its ``OVERLAP_F_B``:
``(0F2;3B0)OVERLAP_F_B``. Only compute actions are written; torch places its own sends and receives. Empty cells are ignored.
"""

from __future__ import annotations

import re
from dataclasses import replace

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.ir import Launch, Op, OpKind, Placement, Plan

_TO_TORCH = {OpKind.F: "F", OpKind.B: "I", OpKind.W: "W", OpKind.BW: "B"}
_FROM_TORCH = {letter: kind for kind, letter in _TO_TORCH.items()}
_ACTION = re.compile(r"(\d{1,6})([FIWB])(\d{1,6})")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")


def to_torch_csv(plan: Plan) -> str:
    """The plan's compute order as an action table of torch, in CSV. Raises PlanError for slices, which torch does not have."""
    if plan.num_slices > 1:
        raise PlanError(f"plan {plan.schedule!r} has {plan.num_slices} slices per microbatch; an action table of torch has none")
    return "".join(",".join(map(_cell, row)) + "\n" for row in plan.launches)


def from_torch_csv(text: str, *, schedule: str = "imported") -> Plan:
    """Parse an action table of torch; the placement and the number of microbatches follow from its cells.

    Raises:
        PlanError: a cell is not a compute action, a stage is missing or on two ranks, or the table is empty.
    """
    launches = [
        [_launch(cell.strip(), rank) for cell in line.split(",") if cell.strip()] for rank, line in enumerate(text.splitlines())
    ]
    while launches and not launches[-1]:
        launches.pop()
    rows = [[op for launch in row for op in launch] for row in launches]
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for op in row:
            if owner.setdefault(op.stage, rank) != rank:
                raise PlanError(f"the table has {op} on rank {rank}, and stage {op.stage} on rank {owner[op.stage]} before")
    if not owner:
        raise PlanError("the table has no actions; one line per rank is expected, for example 0F0,0F1,0I0,0W0")
    missing = sorted(set(range(max(owner) + 1)) - set(owner))
    if missing:
        raise PlanError(f"the table has {max(owner) + 1} stages and no action of stage {missing[0]}")
    placement = Placement(tuple(owner[stage] for stage in range(len(owner))))
    num_microbatches = 1 + max(op.microbatch for row in rows for op in row)
    pairs = frozenset(launch[0] for row in launches for launch in row if len(launch) == 2)
    return replace(Plan.of(schedule, placement, num_microbatches, rows), pairs=pairs)


def _cell(launch: Launch) -> str:
    actions = [f"{op.stage}{_TO_TORCH[op.kind]}{op.microbatch}" for op in launch]
    return actions[0] if len(actions) == 1 else f"({';'.join(actions)})OVERLAP_F_B"


def _launch(cell: str, rank: int) -> Launch:
    match = _PAIR.fullmatch(cell)
    return tuple(_action(each.strip(), rank) for each in (match.groups() if match else (cell,)))


def _action(cell: str, rank: int) -> Op:
    match = _ACTION.fullmatch(cell)
    if match is None:
        raise PlanError(
            f"rank {rank}: {quoted(cell)} is not a compute action; expected <stage><F|I|W|B><microbatch>, for example 3F0 or "
            "3I0, or a pair of two, (3F2;0B1)OVERLAP_F_B"
        )
    return Op(int(match[1]), _FROM_TORCH[match[2]], int(match[3]))
