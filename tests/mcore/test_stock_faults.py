"""megatron-core's own interleaved 1F1B on two pipeline ranks: wrong gradients if its transfers are one batch, and a warning."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zerobubble.mcore.stock_faults import warned_of_wrong_gradients, wrong_gradients
from tests.support.comparisons import compare
from tests.support.gpt import Case, Trainer
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Your own script",
    "where megatron-core's own interleaved 1F1B computes wrong gradients (two pipeline ranks, batch_p2p_comm), `zerobubble run` "
    "with the stock schedule and `zerobubble bench` say so",
    "works",
)


@dataclass(frozen=True)
class StockCase(Case):
    """With transfers of a given kind."""

    is_batched: bool = False


class StockTrainer(Trainer, trains=StockCase):
    case: StockCase

    def _config_changes(self) -> dict[str, Any]:
        if self.case.num_chunks == 1:
            return {}
        return {"overlap_p2p_comm": not self.case.is_batched, "batch_p2p_comm": self.case.is_batched}


def gradients_and_lines(rank: int, case: StockCase) -> tuple[float, list[str]]:
    """The largest difference of a gradient to the unpipelined model's, and what was written to stderr."""
    written = io.StringIO()
    with contextlib.redirect_stderr(written), warned_of_wrong_gradients(is_writing=rank == 0):
        difference = compare(rank, case)
    return difference.gradients, [line for line in written.getvalue().splitlines() if line.startswith("zero bubble: ")]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_batched", [False, True])
def test_wrong_gradients_are_announced_and_right_ones_are_not(four_ranks: RankPool, num_ranks: int, is_batched: bool) -> None:
    case = StockCase("stock", num_ranks, 2 * num_ranks, num_chunks=2, is_batched=is_batched)
    found = four_ranks.run(gradients_and_lines, case)
    is_wrong = is_batched and num_ranks == 2
    assert (max(difference for difference, _ in found) > 1e-3) == is_wrong
    assert [len(lines) for _, lines in found] == [int(is_wrong), 0, 0, 0]
    if is_wrong:
        assert found[0][1][0].startswith(
            "zero bubble: megatron-core's interleaved 1F1B trains on wrong gradients here: with 2 pipeline ranks"
        )


@pytest.mark.parametrize("changes", [{"overlap_p2p_comm": True}, {"batch_p2p_comm": False}, {"use_ring_exchange_p2p": True}])
def test_other_kinds_of_transfers_are_right(changes: dict[str, bool]) -> None:
    given = {"overlap_p2p_comm": False, "batch_p2p_comm": True, "use_ring_exchange_p2p": False, "pipeline_model_parallel_size": 2}
    assert wrong_gradients(SimpleNamespace(**given), 2) is not None
    assert wrong_gradients(SimpleNamespace(**given), 1) is None
    assert wrong_gradients(SimpleNamespace(**given | changes), 2) is None
