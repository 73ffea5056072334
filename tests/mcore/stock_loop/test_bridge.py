"""A loop that passes process groups and a communicator in every call, as Megatron-Bridge does: same losses, same gradients."""

from __future__ import annotations

import numpy as np
import pytest
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.zerobubble.errors import ConfigError
from tests.support.loops import Loop, merged, train_with_groups
from tests.support.ranks import RankPool
from tests.support.stock import installed

pytestmark = pytest.mark.claims(
    "Your own script",
    "in a loop of your own: process groups and a communicator in every call, as Megatron-Bridge passes them: ZB-H1, ZB-H2, "
    "ZBV, losses and gradients",
    "works, bit for bit",
)

TWO = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --train-iters 3"
CHUNKS = f"{TWO} --virtual-pipeline-model-parallel-size 2"


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
    expected, actual = (merged(four_ranks.run(train_with_groups, flags, name)) for name in (None, schedule))
    assert actual.keys() == expected.keys()
    losses = [[result["lm loss"] for rank in each["results"] for call in rank for result in call] for each in (actual, expected)]
    assert len(losses[1]) == 2 * 4 * 4, "of the last rank of two pipelines, in three iterations and an evaluation"
    np.testing.assert_allclose(*losses, rtol=tolerance, atol=0.0)
    for name in expected.keys() - {"results"}:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=0.0, atol=tolerance * abs(expected[name]).max(), err_msg=name
        )


def _misuse(rank: int, flags: str, schedule: str) -> list[str]:
    """The messages of calls whose groups or communicator are not the ones of `parallel_state`."""

    class OtherCommunicator(P2PCommunicator):
        pass

    with installed(flags, schedule) as args:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        others = ProcessGroupCollection.use_mpu_process_groups()
        others.dp = groups.pp
        loop = Loop(args)
        messages = []
        for wrong in (
            {"pg_collection": others},
            {"pg_collection": object()},
            {"p2p_communicator": P2PCommunicator(pp_group=groups.dp, config=loop.config)},
            {"p2p_communicator": OtherCommunicator(pp_group=groups.pp, config=loop.config)},
            {"adjust_tensor_shapes_fn": len},
        ):
            try:
                loop.passes(**wrong)
            except ConfigError as error:
                messages.append(str(error))
        return messages


def test_other_groups_or_another_communicator_are_named_in_the_error(four_ranks: RankPool) -> None:
    for rank, messages in enumerate(four_ranks.run(_misuse, TWO, "zb-h1")):
        dp, object_, pp, other, shapes = messages
        data, pipeline = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert f"pg_collection.dp has the ranks {pipeline}, in parallel_state they are {data}" in dp
        assert "pg_collection is a object" in object_
        assert f"p2p_communicator.pp_group has the ranks {data}, in parallel_state they are {pipeline}" in pp
        assert "OtherCommunicator: schedule 'zb-h1' has links of its own" in other
        assert "adjust_tensor_shapes_fn is not supported" in shapes
