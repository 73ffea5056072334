"""The lengths of microbatches: what a function of the user's may return."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.loop_options import READY_LENGTHS
from megatron.zerobubble.mcore.microbatches.iteration_plans import UnequalMicrobatches, UnequalOptions
from megatron.zerobubble.mcore.microbatches.length_exchange import LengthExchange, Lengths, lengths_of
from megatron.zerobubble.mcore.microbatches.programs import Programs
from megatron.zerobubble.mcore.microbatches.ready import READY, nested_tokens, thd_tokens
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from megatron.zerobubble.plan.costs.length_model import Work
from megatron.zerobubble.plan.costs.slicing import CutRule
from megatron.zerobubble.plan.registry import schedule_spec
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    '`MicrobatchLengths("thd")` and `"nested"`: batches as dicts, objects, tuples and tensors, padding for tensor and context '
    "parallelism, no value read on another device; numbers of microbatches that differ between replicas",
    "works; the last is rejected",
    also=("mcore/microbatches/test_length_exchange.py",),
)


@pytest.mark.parametrize("found", [5, np.int64(5), (5, 25), (np.int32(5), np.float32(25.0))])
def test_whole_numbers_of_any_type_are_lengths(found: Any) -> None:
    lengths = lengths_of(lambda item: item, found, 0)
    assert lengths == Lengths(5, 25.0)
    assert list(map(type, lengths)) == [int, float]


@pytest.mark.parametrize("found", [0, -3, 5.0, float("nan"), None, True, "5", [5, 25.0], (5,), torch.tensor(5), (0, 1.0)])
def test_other_lengths_are_refused_as_they_were_returned(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"microbatch 3: .* function returned .*; it must return .* 1 or more") as caught:
        lengths_of(lambda item: item, found, 3)
    assert f"returned {found!r};" in str(caught.value)


@pytest.mark.parametrize("squares", [0, -1.0, float("nan"), float("inf"), "25", [25.0]])
def test_other_squares_are_refused(squares: Any) -> None:
    with pytest.raises(ConfigError, match=r"microbatch 3: .* function returned .* squared lengths; give a number above 0"):
        lengths_of(lambda item: item, (5, squares), 3)


REPLICAS = ((Lengths(10, 60.0), Lengths(30, 340.0)), (Lengths(20, 200.0), Lengths(40, 600.0)))


@pytest.mark.parametrize("forward_only", [False, True])
@mock.patch("megatron.zerobubble.mcore.microbatches.iteration_plans.LengthExchange")
@mock.patch.object(parallel_state, "get_data_parallel_rank", mock.Mock(return_value=0))
def test_without_a_usual_length_it_is_the_mean_of_the_first_call(exchange: Any, forward_only: bool) -> None:
    """Such as with variable_seq_lengths, where loops give 1: the costs of equal microbatches are those of the mean one."""
    exchange.return_value.return_value = REPLICAS
    spec = schedule_spec("zb-h1", num_ranks=2, num_chunks=1)
    options = UnequalOptions(tokens_of=lambda item: (item.tokens, item.squares), usual_tokens=None)
    slicing = SliceOptions(rule=CutRule(work=Work(per_token=36.0, per_square=1.0)))  # attention takes a quarter of 12 tokens
    unequal = UnequalMicrobatches(spec, options, Programs(), plan=mock.Mock(), place=mock.Mock(), slicing=slicing)
    with mock.patch.object(unequal, "_program"):
        unequal.arrange([iter(REPLICAS[0])], 2, equal=mock.Mock(), forward_only=True)
        exchange.return_value.return_value = ((Lengths(1, 1.0),) * 2,) * 2
        unequal.arrange([iter([Lengths(1, 1.0)] * 2)], 2, equal=mock.Mock(), forward_only=forward_only)
    assert unequal.usual_tokens == 25
    costs = unequal.model.costs([25], [300.0])
    assert [row[0] for row in costs.forward_ms] == pytest.approx([1.0, 1.0])
    shares = [terms.per_square * 300 for terms in unequal.model.forward_ms]
    assert shares == pytest.approx([0.25, 0.25]), "at the length of a sequence whose attention takes as long per token: 300 / 25"


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


TOKENS = torch.zeros(1, 12, dtype=torch.long)
BOUNDS = torch.tensor([0, 3, 8, 12], dtype=torch.int32)
SQUARES = 9.0 + 25.0 + 16.0


@pytest.fixture(autouse=True)
def sizes() -> Iterator[None]:
    with _sizes(tensor=1, context=1):
        yield


def _sizes(*, tensor: int, context: int) -> Any:
    return mock.patch.multiple(
        parallel_state,
        get_tensor_model_parallel_world_size=mock.Mock(return_value=tensor),
        get_context_parallel_world_size=mock.Mock(return_value=context),
    )


def _nested(*lengths: int, **given: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(length, **given) for length in lengths], layout=torch.jagged)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"tokens": TOKENS}, 12),
        ({"tokens": TOKENS, "cu_seqlens": BOUNDS}, (12, SQUARES)),
        ({"input_ids": TOKENS[0], "cu_seqlens_q": BOUNDS.tolist()}, (12, SQUARES)),
        ({"packed_input_ids": TOKENS, "cu_seqlens": torch.tensor([[0, 3, 8, 12, 12, -1, -1]])}, (12, SQUARES)),
        ({"tokens": TOKENS, "packed_seq_params": PackedSeqParams(cu_seqlens_q=BOUNDS)}, (12, SQUARES)),
        ({"tokens": TOKENS, "packed_seq_params": None, "cu_seqlens": None}, 12),
        (SimpleNamespace(input_ids=TOKENS, cu_seqlens=BOUNDS), (12, SQUARES)),
        (({"tokens": TOKENS, "cu_seqlens": BOUNDS}, 0, 1), (12, SQUARES)),
        ({"tokens": TOKENS.to("meta"), "cu_seqlens": BOUNDS.to("meta")}, 12),
        ({"tokens": TOKENS, "cu_seqlens": torch.tensor([0])}, 12),
        ({"tokens": TOKENS.expand(2, 12), "cu_seqlens": torch.tensor([[0, 12, 12], [0, 6, 12]])}, (12, 144.0)),
    ],
)
def test_a_packed_microbatch_has_the_length_of_its_row(item: Any, expected: Any) -> None:
    assert thd_tokens(item) == expected
    assert lengths_of(thd_tokens, item, 0).tokens == 12


@pytest.mark.parametrize(
    ("tensor", "context", "expected"), [(1, 1, (9, 35.0)), (2, 1, (12, 35.0)), (1, 2, (16, 35.0)), (2, 2, (24, 35.0))]
)
def test_sequences_of_a_nested_tensor_are_padded_as_parallelism_needs_it(tensor: int, context: int, expected: Any) -> None:
    with _sizes(tensor=tensor, context=context):
        assert nested_tokens({"responses": _nested(1), "input_ids": _nested(3, 5, 1)}) == expected


@pytest.mark.parametrize(
    "item",
    [
        _nested(3, 5, 1),
        {"anything": _nested(3, 5, 1)},
        [TOKENS, {"tokens": TOKENS, "ids": _nested(3, 5, 1)}],
        torch.nested.narrow(torch.zeros(3, 8), 1, torch.tensor([0, 1, 2]), torch.tensor([3, 5, 1]), layout=torch.jagged),
    ],
    ids=["itself", "unnamed", "in-a-list", "with-gaps"],
)
def test_a_nested_tensor_is_found(item: Any) -> None:
    assert nested_tokens(item) == (9, 35.0)


def test_a_nested_tensor_elsewhere_is_measured_by_its_shape() -> None:
    """Squared lengths, and padding, need values, which a GPU has to be waited for."""
    elsewhere = torch.nested.nested_tensor_from_jagged(
        torch.zeros(9, device="meta"), torch.zeros(4, device="meta", dtype=torch.long), min_seqlen=1, max_seqlen=5
    )
    assert nested_tokens({"input_ids": elsewhere}) == 9
    with _sizes(tensor=2, context=1), pytest.raises(ConfigError, match=r"on meta, .* multiple of 2: .* in the forward step"):
        nested_tokens({"input_ids": elsewhere})


@pytest.mark.parametrize(
    ("name", "item", "message"),
    [
        ("thd", {"text": TOKENS}, r"'thd' found no tensor named tokens or input_ids .* the dict with text that the data"),
        ("thd", {"tokens": _nested(3)}, r"'thd' found a nested tensor .*, or MicrobatchLengths\('nested'\)"),
        ("thd", 3, "'thd' found no tensor .* the int that"),
        ("thd", {"tokens": torch.tensor(3)}, "'thd' found no tensor"),
        ("nested", {"tokens": TOKENS}, "'nested' found no nested tensor in the dict with tokens .*give a function"),
        ("nested", [], "'nested' found no nested tensor in the list"),
    ],
)
def test_a_batch_without_lengths_is_named_in_the_error(name: str, item: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        READY[name](item)


def test_install_knows_the_names() -> None:
    assert set(READY) == set(READY_LENGTHS)
    assert lengths_of(READY["nested"], _nested(2, 2), 0) == Lengths(4, 8.0)
