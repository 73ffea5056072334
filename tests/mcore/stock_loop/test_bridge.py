"""A loop that passes process groups and a communicator in every call, as Megatron-Bridge does: same losses, same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import bridge
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Your own script",
    "in a loop of your own: process groups and a communicator in every call, as Megatron-Bridge passes them: ZB-H1, ZB-H2, "
    "ZBV, losses and gradients",
    "works, bit for bit",
)

TWO = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --train-iters 3"
CHUNKS = f"{TWO} --virtual-pipeline-model-parallel-size 2"


def _merged(results: list[dict[str, Any]]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The losses of the replicas on their last pipeline rank, and all gradients: each replica has the same ones."""
    losses = [result["losses"] for result in results[len(results) // 2 :]]
    gradients: dict[str, torch.Tensor] = {}
    for result in results:
        for name, gradient in result["gradients"].items():
            assert torch.equal(gradients.setdefault(name, gradient), gradient), name
    return losses, gradients


@pytest.mark.parametrize(
    ("flags", "schedule", "tolerance"),
    [
        (f"{TWO} --overlap-grad-reduce", "zb-h1", 0.0),
        (f"{TWO} --tie-embeddings-and-output-weights --clip-grad 0.5", "zb-h2", 0.0),
        (f"{CHUNKS} --calculate-per-token-loss --clip-grad 0.0", "zbv", 0.0),
        (f"{CHUNKS} --calculate-per-token-loss --clip-grad 0.5", "zbv", 1e-5),
    ],
    ids=["zb-h1-overlapped", "zb-h2-tied", "zbv-per-token", "zbv-clipped"],
)
@pytest.mark.sampled(0.25)
def test_the_same_losses_and_gradients_as_the_stock_schedule(
    four_ranks: RankPool, flags: str, schedule: str, tolerance: float
) -> None:
    """Bit for bit but for clipping under V: a rank has other layers, so the sum of squared gradients is rounded differently."""
    expected, actual = (_merged(four_ranks.run(bridge.train, flags, name)) for name in (None, schedule))
    assert expected[0] != []
    torch.testing.assert_close(torch.tensor(actual[0]), torch.tensor(expected[0]), rtol=tolerance, atol=0.0)
    assert set(actual[1]) == set(expected[1])
    for name, gradient in actual[1].items():
        largest = float(expected[1][name].abs().max())
        torch.testing.assert_close(gradient, expected[1][name], rtol=0.0, atol=tolerance * largest, msg=name)


def test_other_groups_or_another_communicator_are_named_in_the_error(four_ranks: RankPool) -> None:
    for rank, messages in enumerate(four_ranks.run(bridge.misuse, TWO, "zb-h1")):
        dp, object_, pp, other, shapes = messages
        data, pipeline = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert f"pg_collection.dp has the ranks {pipeline}, in parallel_state they are {data}" in dp
        assert "pg_collection is a object" in object_
        assert f"p2p_communicator.pp_group has the ranks {data}, in parallel_state they are {pipeline}" in pp
        assert "OtherCommunicator: schedule 'zb-h1' has links of its own" in other
        assert "adjust_tensor_shapes_fn is not supported" in shapes
