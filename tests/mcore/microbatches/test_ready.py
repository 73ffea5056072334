"""Ready functions for `microbatch_tokens`: packed sequences and nested tensors, without a value of a tensor on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.microbatches.length_exchange import Lengths, lengths_of
from megatron.zerobubble.mcore.microbatches.ready import READY, nested_tokens, thd_tokens
from megatron.zerobubble.overlay import READY_LENGTHS

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    '`microbatch_tokens="thd"` and `"nested"`: batches as dicts, objects, tuples and tensors, padding for tensor and context '
    "parallelism, no value read on another device; numbers of microbatches that differ between replicas",
    "works; the last is rejected",
    also=("mcore/microbatches/test_length_exchange.py",),
)

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
        (
            "thd",
            {"text": TOKENS},
            r"'thd' found no tensor named tokens or input_ids .* the dict with text that the data iterator",
        ),
        ("thd", {"tokens": _nested(3)}, r"'thd' found a nested tensor .*, or microbatch_tokens='nested'"),
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
