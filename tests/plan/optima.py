"""The exact optima of small instances, in optima.json beside this file.

The instances are V, linear and interleaved placements of up to four ranks and twelve microbatches, as OR-tools' CP-SAT has proven
them; those that took it more than twelve seconds are left out. No lower bound of ours went into the proofs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement

FILE = Path(__file__).with_name("optima.json")
PLACEMENTS = {"linear": Placement.linear, "V": Placement.v, "loop": lambda num_ranks: Placement.loop(num_ranks, 2)}


class Instance(NamedTuple):
    placement: str
    num_ranks: int
    num_microbatches: int
    times: tuple[float, ...]
    limit: float
    objective: str
    optimum: float | None = None
    """Milliseconds; None: not known."""

    def stages(self) -> Placement:
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
