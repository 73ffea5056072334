"""What a search is asked for: the iteration time to minimize, effort, seed, and a memory limit that some plan fits."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import DEFAULT_OBJECTIVE, Objective
from megatron.zerobubble.plan.search.search_progress import Progress
from megatron.zerobubble.plan.search.tuning import Tuning
from megatron.zerobubble.plan.validate import MEMORY_TOLERANCE


class Effort(enum.Enum):
    """How long to search, as a budget in op evaluations. The compiled core does about 1.5 * 10^8 per second."""

    FAST = "fast"
    DEFAULT = "default"
    MAX = "max"

    @property
    def budget(self) -> float:
        """Op evaluations of one search."""
        return {"fast": 6e7, "default": 1.6e9, "max": 2.2e10}[self.value]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Memory limit, objective, random seed and budget of a search."""

    memory_limit: float | None = None
    """Most activation memory per rank, 1.0 being that of 1F1B's rank 0; None: no limit."""
    objective: Objective = DEFAULT_OBJECTIVE
    """Which iteration time to minimize."""
    seed: int = 0
    """Seed of the random numbers."""
    workers: int = 1
    """Threads to search with, at least 1. The plan does not depend on it, the time does, with the compiled core."""
    progress: Progress | None = field(default=None, compare=False, repr=False)
    """Follows the search, and may stop it."""
    tuning: Tuning = field(default_factory=Tuning)
    """How a search shares its budget."""
    budget: float = Effort.DEFAULT.budget
    """Op evaluations to spend; `auto` spends up to 4.3 times this. With 0 only the seed orders and 48 blocks are tried."""


def smallest_memory(placement: Placement, num_microbatches: int, costs: CostModel) -> float:
    """The smallest feasible memory limit; 1.0 is 1F1B's rank 0.

    It is the activation memory of a single microbatch on the rank that needs most, each of its chunks counted at its maximum
    (see `CostModel.reserved`); of unequal microbatches, that of the largest.
    """
    costs.check_fits(placement, num_microbatches)
    return max(memory_of_microbatches(placement, costs)) / min(placement.num_ranks, num_microbatches)


def memory_of_microbatches(placement: Placement, costs: CostModel) -> list[float]:
    """Activation memory of each microbatch alone on the rank that needs most, in the unit of the costs; one if all are equal."""
    costs = costs.reserved
    return [
        max(
            math.fsum(costs.table.of_microbatch("activation", stage, microbatch) for stage in stages)
            for stages in placement.rank_to_stages
        )
        for microbatch in range(len(costs.table.counts))
    ]


def check_memory_limit(placement: Placement, num_microbatches: int, costs: CostModel, limit: float | None) -> None:
    """Raise ConfigError if no plan fits the memory limit; the message names the smallest one that works."""
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or math.isnan(limit):
        raise ConfigError(f"memory limit is {limit!r}; it must be a number; 1.0 is the activation memory of 1F1B's rank 0")
    least = smallest_memory(placement, num_microbatches, costs)
    if limit < least - MEMORY_TOLERANCE:
        raise ConfigError(
            f"memory limit {limit:.6g} is too small for any plan of {num_microbatches} microbatches on "
            f"{placement.num_ranks} ranks ({placement.name} placement){largest_microbatch(placement, costs, limit / least)}: "
            f"the smallest that works is {math.ceil(least * 1e6) / 1e6}"
        )


def largest_microbatch(placement: Placement, costs: CostModel, share: float) -> str:
    """Which microbatch a limit of this share of its memory is too small for, with its tokens if known; empty if all are equal."""
    memory = memory_of_microbatches(placement, costs)
    if len(memory) == 1:
        return ""
    index = memory.index(max(memory))
    tokens = costs.tokens
    return f", microbatch {index} " + (
        f"has {tokens[index]} tokens and the limit holds at most {int(tokens[index] * share)}" if tokens else "is the largest"
    )
