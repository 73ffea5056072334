"""Is there a pattern that repeats every so often? By constraint programming (OR-tools CP-SAT), for equal stages on a V.

    python -m tests.plan.periods --row 11 --point v-min --repeats 2 --ratios 1.15,1.18

A pattern runs a few microbatches per period, each at its own times, and repeats for ever: it is the steady state of an order. The
search finds orders whose steady state takes a certain time per microbatch; this says whether any pattern of so many microbatches
takes less. Times are rounded to a twentieth of a millisecond.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from megatron.zerobubble.cli.published import read_configs
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement

DATA = Path(__file__).parents[2] / "docs" / "benchmarks" / "data"
_PER_MS = 20
_WHOLE = 1000
"""The memory of one pass between F and B, in whole numbers."""


def is_possible(
    placement: Placement, costs: CostModel, limit: float, period_ms: float, repeats: int, seconds: float
) -> bool | None:
    """Whether some pattern runs `repeats` microbatches per period; None if that is not known after so many seconds.

    Args:
        placement: a V.
        costs: uniform over the stages.
        limit: most activation memory per rank, in microbatches.
        period_ms: the period, of all its microbatches together.
        repeats: microbatches per period.
        seconds: how long to look.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    times = {kind: round(_PER_MS * getattr(costs, name)[0]) for kind, name in zip("FBW", _LISTS, strict=True)}
    link, period = round(_PER_MS * costs.comm_ms), round(_PER_MS * period_ms)
    kept = round(_WHOLE * costs.activation_after_backward[0] / costs.activation[0])
    most = int(limit / costs.activation[0] * _WHOLE + 1e-6)
    last, ranks = placement.num_stages - 1, placement.stage_to_rank
    horizon = period * (most // _WHOLE + 8) + _PER_MS * 200
    ops = list(itertools.product(range(repeats), range(placement.num_stages), "FBW"))
    start: dict[tuple[int, int, str], Any] = {op: model.new_int_var(0, horizon, "") for op in ops}
    for k, stage in itertools.product(range(repeats), range(last + 1)):
        model.add(start[k, stage, "W"] >= start[k, stage, "B"] + times["B"])
        if stage < last:
            hop = link if ranks[stage] != ranks[stage + 1] else 0
            model.add(start[k, stage + 1, "F"] >= start[k, stage, "F"] + times["F"] + hop)
            model.add(start[k, stage, "B"] >= start[k, stage + 1, "B"] + times["B"] + hop)
        else:
            model.add(start[k, stage, "B"] >= start[k, stage, "F"] + times["F"])
        model.add(start[k, 0, "F"] <= period - times["F"])

    def periods_since(now: Any, then: Any) -> Any:
        """The number of whole periods between two times."""
        number = model.new_int_var(-horizon, horizon, "")
        model.add(now - then >= period * number)
        model.add(now - then < period * (number + 1))
        return number

    model.add(start[0, 0, "F"] == 0)
    for stages in placement.rank_to_stages:
        own = [op for op in ops if op[1] in stages]
        for one, other in itertools.combinations(own, 2):
            apart = start[other] - start[one] - period * periods_since(start[other], start[one])
            model.add(apart >= times[one[2]])
            model.add(apart <= period - times[other[2]])
        passes = list(itertools.product(range(repeats), stages))
        for k, stage in passes:
            now, held = start[k, stage, "F"], []
            for each in passes:
                began, done, freed = (
                    periods_since(now, start[(*each, kind)] + (0 if kind == "F" else times[kind])) for kind in "FBW"
                )
                held.append(_WHOLE * (began - done) + kept * (done - freed))
            model.add(sum(held) <= most)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    return {cp_model.OPTIMAL: True, cp_model.FEASIBLE: True, cp_model.INFEASIBLE: False}.get(status)


_LISTS = ("forward_ms", "backward_ms", "wgrad_ms")


def main() -> None:
    """Look for patterns of one point of the published times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, default=11, help="config of published.json (default %(default)s)")
    parser.add_argument("--point", default="v-min", help="point of planner.json (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="microbatches per period (default %(default)s)")
    parser.add_argument("--ratios", default="1.1,1.2", help="periods per microbatch over a rank's work (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=200, help="most seconds per period (default %(default)s)")
    args = parser.parse_args()
    (config,) = read_configs(str(DATA / "published.json"), str(args.row))
    placement = Placement.v(config.num_ranks)
    costs = config.costs_of(placement)
    points = json.loads((DATA / "planner.json").read_text(encoding="utf-8"))["sections"]["points"]
    (limit,) = (row["limit"] for row in points if (row["row"], row["point"]) == (args.row, args.point))
    work = 2 * sum(getattr(costs, name)[0] for name in _LISTS)
    for ratio in map(float, args.ratios.split(",")):
        found = is_possible(placement, costs, limit * config.num_ranks, ratio * work * args.repeats, args.repeats, args.seconds)
        sys.stdout.write(
            f"{args.repeats} microbatches in {args.repeats} x {ratio * work:.2f} ms ({ratio} of the work): {found}\n"
        )


if __name__ == "__main__":
    main()
