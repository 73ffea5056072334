"""The lengths of microbatches: what a function of the user's may return."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.microbatches.iteration_plans import UnequalMicrobatches, UnequalOptions
from megatron.zerobubble.mcore.microbatches.length_exchange import LengthExchange, Lengths, lengths_of
from megatron.zerobubble.plan.registry import schedule_spec
from tests.support.ranks import RankPool


@pytest.mark.parametrize("found", [5, np.int64(5), (5, 25), (np.int32(5), np.float32(25.0))])
def test_whole_numbers_of_any_type_are_lengths(found: Any) -> None:
    lengths = lengths_of(lambda item: item, found, 0)
    assert lengths == Lengths(5, 25.0)
    assert list(map(type, lengths)) == [int, float]


@pytest.mark.parametrize("found", [0, -3, 5.0, float("nan"), None, True, "5", [5, 25.0], (5,), torch.tensor(5), (0, 1.0)])
def test_other_lengths_are_refused_as_they_were_returned(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"microbatch 3: microbatch_tokens returned .*; it must return .* 1 or more") as caught:
        lengths_of(lambda item: item, found, 3)
    assert f"returned {found!r};" in str(caught.value)


@pytest.mark.parametrize("squares", [0, -1.0, float("nan"), float("inf"), "25", [25.0]])
def test_other_squares_are_refused(squares: Any) -> None:
    with pytest.raises(ConfigError, match=r"microbatch 3: microbatch_tokens returned .* squared lengths; give a number above 0"):
        lengths_of(lambda item: item, (5, squares), 3)


REPLICAS = ((Lengths(10, 60.0), Lengths(30, 340.0)), (Lengths(20, 200.0), Lengths(40, 600.0)))


@pytest.mark.parametrize("forward_only", [False, True])
@mock.patch("megatron.zerobubble.mcore.microbatches.iteration_plans.LengthExchange")
@mock.patch.object(parallel_state, "get_data_parallel_rank", mock.Mock(return_value=0))
def test_without_a_usual_length_it_is_the_mean_of_the_first_call(exchange: Any, forward_only: bool) -> None:
    """Such as with variable_seq_lengths, where loops give 1: the costs of equal microbatches are those of the mean one."""
    exchange.return_value.return_value = REPLICAS
    spec, share = schedule_spec("zb-h1", num_ranks=2, num_chunks=1), mock.Mock(return_value=0.25)
    options = UnequalOptions(tokens_of=lambda item: (item.tokens, item.squares), usual_tokens=None, attention_share=share)
    unequal = UnequalMicrobatches(spec, options, plan=mock.Mock(), place=mock.Mock())
    with mock.patch.object(unequal, "_planned"):
        unequal.arrange([iter(REPLICAS[0])], 2, equal=mock.Mock(), forward_only=True)
        exchange.return_value.return_value = ((Lengths(1, 1.0),) * 2,) * 2
        unequal.arrange([iter([Lengths(1, 1.0)] * 2)], 2, equal=mock.Mock(), forward_only=forward_only)
    assert unequal.usual_tokens == 25
    assert share.call_args_list == [mock.call(12)], "the length of a sequence whose attention takes as long per token: 300 / 25"
    costs = unequal.model.costs([25], [300.0])
    assert [row[0] for row in costs.forward_ms] == pytest.approx([1.0, 1.0])


def _exchange(rank: int, numbers: list[int]) -> Any:
    """Lengths that every rank gets where rank r has `numbers[r]` microbatches, or the message of its error; one replica."""
    with mock.patch.multiple(
        parallel_state,
        get_data_parallel_rank=mock.Mock(return_value=0),
        get_data_parallel_world_size=mock.Mock(return_value=1),
    ):
        exchange = LengthExchange()
    number = numbers[rank]
    try:
        return exchange([Lengths(1 + each, float(each + 2)) for each in range(number)] if rank else None, number)
    except ConfigError as error:
        return str(error)
    finally:
        exchange.close()


def test_numbers_of_microbatches_that_differ_are_named_on_every_rank(four_ranks: RankPool) -> None:
    """Gloo would end the processes."""
    for message in four_ranks.run(_exchange, [5, 5, 6, 5]):
        assert "called with 5 microbatches on rank 0 and with 6 on rank 2: all ranks run one order of ops" in message


@pytest.mark.parametrize("number", [1, 64, 65, 300])
def test_any_number_of_lengths_is_exchanged(four_ranks: RankPool, number: int) -> None:
    expected = (tuple(Lengths(1 + each, float(each + 2)) for each in range(number)),)
    assert four_ranks.run(_exchange, [number] * 4) == [expected] * 4
