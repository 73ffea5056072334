"""Position ids under slices: read from the batch or counted by the loop, as the model without a pipeline has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.slices.batches import SlicedBatches
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice
from megatron.zerobubble.mcore.slices.positions import PositionIds
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from tests.mcore.slices.test_slices import check
from tests.support.ranks import RankPool
from tests.support.sliced import SlicedPositionsCase

ZB_H1 = SlicedPositionsCase("zb-h1", 2, 2, num_layers=4, num_slices=2, num_steps=1)
ZBV = replace(ZB_H1, schedule="zbv", num_chunks=2, num_slices=3)
CASES: list[Any] = [
    ZB_H1,
    replace(ZBV, batch="position_ids", copies=True),
    replace(ZB_H1, batch="tuple"),
    replace(ZBV, batch="tuple", counts_up=True, copies=True),
    replace(ZB_H1, positions="restart-in-the-middle"),
    replace(ZB_H1, positions="restart-in-the-middle", batch="tuple", tensor_parallel=2),
    replace(ZB_H1, positions="none", batch="tuple", counts_up=True),
    replace(ZBV, positions="none", counts_up=True, tensor_parallel=2),
    replace(ZB_H1, positions="plain"),
    replace(ZBV, positions="plain", batch="tuple", counts_up=True),
]


@pytest.mark.claims(
    "Layers",
    "slices of microbatches with learned position ids that the batch has, under a name or in a tuple, also with "
    "several beginnings per row, or that the loop counts",
    "works, losses and gradients within 1e-6 of whole microbatches",
)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.25)
def test_positions_are_those_of_whole_sequences(four_ranks: RankPool, case: Any) -> None:
    check(four_ranks, case)


COUNT = torch.arange(8).expand(2, 8)
RESTART = COUNT % 4
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@pytest.fixture
def alone(world_of_one: None) -> Iterator[None]:
    """megatron-core's groups of one rank."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def absolute(batch: Any, given: Any, *, counted: str | None = None, microbatches: int = 1) -> list[Tensor]:
    """The positions of the slices of a batch, of which the loop gives `given(part of the batch, its number of tokens)`."""
    slices, found = CurrentSlice(), []
    positions, batches = PositionIds(slices, counted), SlicedBatches(iter([batch] * microbatches), slices)
    for microbatch in range(microbatches):
        for part in SliceOptions(lengths=(4, 4)).parts(8, 2):
            with slices.running(0, microbatch, part):
                own = next(batches)
                tokens = own["tokens"] if isinstance(own, dict) else own[0]
                found.append(positions.absolute(given(own, part.length), tokens))
    return found


def count(_part: Any, length: int) -> Tensor:
    return torch.arange(length).expand(2, -1)


def test_a_part_of_a_table_that_is_not_cut_is_the_count_or_refused(alone: None) -> None:
    """It begins at 0 in every slice, and is of the batch."""
    batch = {"tokens": TOKENS, "table": torch.arange(64)}
    with pytest.raises(ConfigError, match=r"slice 1, tokens 4 to 7: the position ids .* and also in the batch"):
        absolute(batch, lambda part, length: part["table"][:length])
    found = absolute(batch, lambda part, length: part["table"][:length], counted="from-zero")
    assert torch.equal(torch.cat(found), torch.arange(8))


def test_positions_of_neither_kind_are_refused(alone: None) -> None:
    with pytest.raises(
        ConfigError, match=r"neither 0 to 3, .* nor a tensor of the batch that it read: give --zero-bubble-slice-pos"
    ):
        absolute({"tokens": TOKENS}, lambda part, length: count(part, length) // 2)
    found = absolute({"tokens": TOKENS}, lambda part, length: count(part, length) // 2, counted="absolute")
    assert torch.equal(torch.cat(found, dim=1), RESTART // 2)


def test_copies_that_could_be_both_are_refused(alone: None) -> None:
    batch = {"tokens": TOKENS, "positions": RESTART}
    with pytest.raises(ConfigError, match="and also in the batch"):
        absolute(batch, lambda part, _: part["positions"].clone())
    assert torch.equal(torch.cat(absolute(batch, lambda part, _: part["positions"]), dim=1), RESTART)


@pytest.mark.parametrize("kind", [dict, tuple])
def test_tokens_that_count_up_are_not_positions(alone: None, kind: type) -> None:
    for tokens in (COUNT, RESTART):
        batch = {"tokens": tokens, "labels": tokens + 1}
        found = absolute(batch if kind is dict else tuple(batch.values()), count)
        assert torch.equal(torch.cat(found, dim=1), COUNT)


def test_positions_of_another_type_are_those_of_the_batch(alone: None) -> None:
    found = absolute((TOKENS, (COUNT % 5).int()), lambda part, _: part[1].long(), microbatches=2)
    assert torch.equal(torch.cat(found, dim=1), (COUNT % 5).repeat(1, 2))
