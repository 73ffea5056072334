"""MTP losses, and from megatron-core 0.19 on acceptance rates, on the rank that logs them in a loop for megatron-core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from tests.support.ranks import RankPool
from tests.support.stock import example, train_mtp, with_flags

SIZES = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --train-iters 5"
CHUNKS = "--virtual-pipeline-model-parallel-size 2"
OPTIMISTIC = {"zero_bubble_v_schedule": True, "enable_optimizer_post_validation": True, "post_validation_patience": 0}


class _Writer:
    """TensorBoard's, or with `log` that of W&B."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.values.setdefault(name, []).append((iteration, float(value)))

    def log(self, values: dict[str, Any], iteration: int) -> None:
        for name, value in values.items():
            self.add_scalar(name, value, iteration)


def _logged(rank: int, flags: str, options: dict[str, Any], every: int) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """What a rank writes as Megatron-LM's loop does on all of them, after each `every`th iteration: by kind of log."""
    loop, board, wandb, totals, done = example(), _Writer(), _Writer(), {}, []  # type: ignore[var-annotated]
    make: Callable[[], Callable[..., Any]] = loop.get_forward_backward_func

    def passes(*, num_microbatches: int, **given: Any) -> Any:
        results = make()(num_microbatches=num_microbatches, **given)
        done.append(num_microbatches)
        if len(done) % every == 0:
            MTPLossLoggingHelper.track_mtp_metrics(1 / sum(done[-every:]), len(done), board, wandb, totals)
        return results

    with mock.patch.object(loop, "get_forward_backward_func", return_value=passes):
        train_mtp(rank, flags, options)
    log = {name: [(len(done), float(value))] for name, value in totals.items()}
    return {"log": log, "tensorboard": board.values, "wandb": wandb.values}


@functools.cache
def _expected(ranks: RankPool, more: str, every: int) -> Any:
    return ranks.run(_logged, f"{SIZES} {more}", {}, every)[-1]


@pytest.mark.claims(
    "Your own script",
    "MTP losses, and acceptance rates where the release has them, under V on the rank that logs them: the loop's log, "
    "TensorBoard, W&B; two replicas, steps that are redone, logging every second iteration",
    "works, 2e-6",
)
@pytest.mark.parametrize(
    ("more", "options", "every"),
    [
        ("", {"schedule": "zbv"}, 1),
        ("", {"schedule": "v-half"}, 2),
        ("--clip-grad 0.05", with_flags(**OPTIMISTIC), 1),
        ("", {"schedule": "zb-h1"}, 1),
    ],
    ids=["zbv", "v-half-every-second", "zbv-optimistic", "zb-h1"],
)
def test_the_last_pipeline_rank_logs_what_it_logs_under_1f1b(
    four_ranks: RankPool, more: str, options: dict[str, Any], every: int
) -> None:
    expected = _expected(four_ranks, more, every)
    assert "mtp_1 loss" in expected["log"]
    chunks = "" if options.get("schedule") == "zb-h1" else CHUNKS
    *_, other_replica, last = four_ranks.run(_logged, f"{SIZES} {more} {chunks}", options, every)
    assert last == other_replica
    assert last.keys() == expected.keys()
    for kind, by_name in expected.items():
        assert last[kind].keys() == by_name.keys(), kind
        for name, values in by_name.items():
            assert [number for number, _ in last[kind][name]] == [number for number, _ in values]
            found = [value for _, value in last[kind][name]]
            # Losses are of weights whose gradients were summed in another order; rates are of counts.
            assert found == pytest.approx([value for _, value in values], rel=2e-6), f"{kind}: {name}"
