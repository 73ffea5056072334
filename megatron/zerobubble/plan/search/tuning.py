"""The numbers that a search is tuned by: how its budget is shared, and how much of each kind it tries.

They were chosen on the published cost sets (docs/benchmarks/planner.md) and hold for any costs. A change of one changes the plans
that a seed gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Round", "Tuning"]


class Round(NamedTuple):
    """One annealing round."""

    is_filled: bool
    """Whether W is left out of the order and fills the bubbles."""
    share: float
    """Share of the budget that is left for the rounds."""
    threshold: float
    """Initial threshold, as a share of the bottleneck rank's time per microbatch; it falls to 0."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The numbers of `search`. Budgets are in op evaluations."""

    most_searches: int = 16
    """Most searches that a large budget is divided into."""
    least_of_several: float = 4e8
    """Budget that each search of a divided one has at least."""
    enough_per_op: float = 4e5
    """The same, per op of the plan."""
    seeds_apart: int = 1 << 24
    """Distance of the seeds of these searches."""

    breed_share: float = 0.4
    """Share of the budget for blocks."""
    most_bred: float = 1.6e8
    """Budget from which on blocks get `late_breed_share` of the rest only: annealing needs it more."""
    late_breed_share: float = 0.15
    """See `most_bred`."""
    fewest_blocks: int = 48
    """Blocks that are tried at least, with any budget."""
    random_blocks: int = 300
    """Blocks that are tried before the best are varied."""
    fresh_share: float = 0.1
    """Share of random blocks among those that are tried afterwards."""
    kept_blocks: int = 20
    """Best blocks, of which variations are tried."""
    generation: int = 8
    """Blocks that are tried between two choices of which to vary: what may be done side by side."""
    block_weight: int = 500
    """Op evaluations charged per stage for trying a block, on top of its list schedule."""
    most_unrolled: int = 4
    """Best blocks of a smaller instance that are built in full."""
    behind_share: float = 0.25
    """Share of the blocks' budget after which they are given up if a seed order is better than all of them."""

    most_improved: int = 16
    """Best seed orders whose W is moved into the bubbles."""
    most_seed_orders: int = 6
    """Best of these that are built in full."""
    patiences: tuple[float, ...] = (0.1, 0.2, 0.3, 0.45, 0.6, 0.9, 1.5)
    """How long a rank waits for an op before it runs a W, as multiples of that W's duration; all are tried."""
    usual_patience: float = 0.45
    """The one that is tried first."""

    fewest_small: int = 24
    """More microbatches than this, and than `small_per_rank` per rank, are planned on a smaller instance first."""
    small_per_rank: int = 3
    """See `fewest_small`."""
    more_of_slices: int = 2
    """Microbatches more with slices, which the numbers above then count: a steady cycle is a whole microbatch."""
    small_share: float = 0.5
    """Share of the budget for the smaller instance."""
    most_cycles: int = 3
    """Orders of the smaller instance whose steady cycle is unrolled with every patience."""

    most_starts: int = 2
    """Orders that the first annealing rounds start from."""
    near: float = 1.005
    """Their score is at most this much of the best one's."""
    first_share: float = 0.06
    """Share of the budget of each first round."""
    first_rounds: tuple[tuple[bool, float], ...] = ((True, 0.05), (True, 0.02), (False, 0.02), (False, 0.01))
    """Whether W is left out, and the initial threshold, of the first rounds from each start."""
    filled_rounds: tuple[Round, ...] = (
        Round(True, 0.35, 0.03),
        Round(True, 0.35, 0.015),
        Round(False, 0.15, 0.01),
        Round(False, 0.15, 0.005),
    )
    """The rounds that follow if the best of the first rounds left W out."""
    full_rounds: tuple[Round, ...] = (Round(False, 0.4, 0.02), Round(False, 0.3, 0.01), Round(False, 0.3, 0.004))
    """The rounds that follow if it did not."""
