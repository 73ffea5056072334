"""verl's Megatron engine from PyPI, not a line of it edited, on CPU ranks (`make test-frameworks`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.frameworks.verl_engine import NUM_STEPS, Seen, train, write_model
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER

pytestmark = pytest.mark.claims(
    "Your own script",
    "verl 0.9.1's Megatron engine from PyPI, unedited (`make test-frameworks`): inference, updates, export of weights, on packed "
    "nested sequences, in bf16; with replicas, tensor and sequence parallelism, rows padded to buckets",
    "ZB-H1: every bit of stock's; ZBV: its inference and first losses, later ones to 0.1 %; **not run on a GPU**",
)

BUCKETS = {"pad_to_length": True, "pad_to_length_bucket": 64}
SHARDED = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LATER = 0.001
"""Relative, of what ZBV computes with weights of which some are the next bf16 number."""


def row_length(item: Any) -> int:
    """Length of a packed row under `BUCKETS`."""
    return 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPool) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    two_ranks.run(write_model, folder)
    return folder


def assert_same(ours: list[Seen], stock: list[Seen]) -> None:
    """Every bit of results and of weights, on every rank."""
    assert len(stock[-1].losses) == max(len(run.norms) for run in stock) == NUM_STEPS
    for each, other in zip(ours, stock, strict=True):
        for name in ("log_probs", "losses", "entropies", "norms"):
            assert getattr(each, name) == getattr(other, name), name
        assert each.weights.keys() == other.weights.keys()
        assert all(torch.equal(weight, other.weights[name]) for name, weight in each.weights.items())


def test_zb_h1_has_every_bit_of_stock_and_zbv_but_for_the_norm(two_ranks: RankPool, model: str) -> None:
    stock = two_ranks.run(train, model, {})
    assert {run.schedule for run in stock} == {"stock"}
    ours = two_ranks.run(train, model, {}, "zb-h1")
    assert {run.schedule for run in ours} == {"zb-h1"}
    assert_same(ours, stock)
    in_v = two_ranks.run(train, model, {"virtual_pipeline_model_parallel_size": 2}, "zbv")
    assert {run.schedule for run in in_v} == {"zbv"}
    expected = stock[-1]
    assert in_v[-1].log_probs == expected.log_probs
    assert in_v[-1].norms[0] == pytest.approx(expected.norms[0], rel=OTHER_ORDER)
    assert in_v[-1].losses[0] == expected.losses[0]
    for name in ("losses", "norms"):
        assert torch.tensor(getattr(in_v[-1], name)).allclose(torch.tensor(getattr(expected, name)), rtol=LATER, atol=0), name
    for each in in_v:
        assert each.weights.keys() == expected.weights.keys()
        assert all(
            torch.allclose(weight, expected.weights[name], rtol=2**-6, atol=2**-7) for name, weight in each.weights.items()
        )


def test_rows_padded_to_buckets(two_ranks: RankPool, model: str) -> None:
    stock = two_ranks.run(train, model, BUCKETS)
    assert_same(two_ranks.run(train, model, BUCKETS, "zb-h1", row_length), stock)


@pytest.mark.parametrize("engine", [{}, SHARDED], ids=["replicas", "tensor-parallel"])
def test_four_ranks(four_ranks: RankPool, model: str, engine: dict[str, Any]) -> None:
    stock = four_ranks.run(train, model, engine)
    assert_same(four_ranks.run(train, model, engine, "zb-h1"), stock)
