"""The exact optima of small instances, in optima.json beside this file, and the script that solves them again.

    python -m tests.plan.optima --seconds 12 --share 3        # writes optima.json: half an hour on one core

The instances are V, linear and interleaved placements of up to four ranks and twelve microbatches. Those that CP-SAT does not
prove within the time are left out. A plan from the search is its upper bound, and no lower bound of ours goes into it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions, smallest_memory
from megatron.zerobubble.plan.simulate import simulate
from tests.plan.exact import optimum

FILE = Path(__file__).with_name("optima.json")
PLACEMENTS = {"linear": Placement.linear, "V": Placement.v, "loop": lambda num_ranks: Placement.loop(num_ranks, 2)}
SIZES = ((2, 2), (2, 4), (2, 6), (2, 8), (2, 12), (3, 3), (3, 5), (3, 8), (3, 12), (4, 4), (4, 6), (4, 8), (4, 12))
TIMES = ((4, 4, 2, 0, 0.5), (4, 4, 2, 1, 0.5), (6, 4, 4, 1, 0.25), (4, 6, 2, 2, 0.75))
"""Times of F, B, W and a message, and the share of the activations that is kept for W."""
LIMITS = (0.5, 0.75, 1.0, 1.25)


class Instance(NamedTuple):
    """One instance as in the file."""

    placement: str
    num_ranks: int
    num_microbatches: int
    times: tuple[float, ...]
    limit: float
    objective: str
    optimum: float | None = None
    """Milliseconds; None: not known."""

    def stages(self) -> Placement:
        """Its placement."""
        return PLACEMENTS[self.placement](self.num_ranks)

    def costs(self) -> CostModel:
        """Its costs; the times are per rank, as in `CostModel.uniform`."""
        forward, backward, wgrad, comm, kept = self.times
        return CostModel.uniform(
            self.stages(),
            forward_ms=forward,
            backward_ms=backward,
            wgrad_ms=wgrad,
            comm_ms=comm,
            activation_after_backward=kept,
        )


def read() -> list[Instance]:
    """The instances of the file, with their optima."""
    return [Instance(**(body | {"times": tuple(body["times"])})) for body in json.loads(FILE.read_text(encoding="utf-8"))]


def instances() -> Iterator[Instance]:
    """All instances that have a plan, the small ones first."""
    for (p, m), placement, times, limit in itertools.product(SIZES, PLACEMENTS, TIMES, LIMITS):
        instance = Instance(placement, p, m, times, limit, Objective.SPAN.value)
        if smallest_memory(instance.stages(), m, instance.costs()) <= limit:
            yield instance
            if m <= 4:
                yield instance._replace(objective=Objective.MAKESPAN.value)


def solved(instance: Instance, *, seconds: float) -> Instance:
    """The instance with its optimum, if it is found in time."""
    placement, costs, m = instance.stages(), instance.costs(), instance.num_microbatches
    objective = Objective(instance.objective)
    options = SearchOptions(memory_limit=instance.limit, objective=objective, budget=2e7)
    found = objective.of(simulate(search("any", placement, m, costs, options), costs))
    makespan = objective is Objective.MAKESPAN
    best = optimum(placement, m, costs, instance.limit, makespan=makespan, at_most=found, seconds=seconds)
    return instance._replace(optimum=None if best is None else float(math.floor(best + 0.5)))


def main() -> None:
    """Solve every instance and write those that were solved in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12, help="most seconds per instance (default %(default)s)")
    parser.add_argument("--share", type=int, default=1, help="solve every nth instance only (default: all)")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for index, instance in enumerate(instances()):
        if index % args.share:
            continue
        result = solved(instance, seconds=args.seconds)
        sys.stdout.write(f"{result}\n")
        if result.optimum is not None:
            found.append(result._asdict())
            FILE.write_text("[\n" + ",\n".join(json.dumps(body) for body in found) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
