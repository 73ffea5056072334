"""The exact optima of small instances, in optima.json beside this file.

The instances are V, linear and interleaved placements of up to four ranks and twelve microbatches. Those that CP-SAT did not
prove within twelve seconds are left out. A plan from the search is its upper bound, and no lower bound of ours goes into it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from tests.plan.exact import optimum

FILE = Path(__file__).with_name("optima.json")
PLACEMENTS = {"linear": Placement.linear, "V": Placement.v, "loop": lambda num_ranks: Placement.loop(num_ranks, 2)}


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


def solved(instance: Instance, *, seconds: float) -> Instance:
    """The instance with its optimum, if it is found in time."""
    placement, costs, m = instance.stages(), instance.costs(), instance.num_microbatches
    objective = Objective(instance.objective)
    options = SearchOptions(memory_limit=instance.limit, objective=objective, budget=2e7)
    found = objective.of(simulate(search("any", placement, m, costs, options), costs))
    makespan = objective is Objective.MAKESPAN
    best = optimum(placement, m, costs, instance.limit, makespan=makespan, at_most=found, seconds=seconds)
    return instance._replace(optimum=None if best is None else float(math.floor(best + 0.5)))
