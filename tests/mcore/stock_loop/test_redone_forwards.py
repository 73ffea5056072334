"""Post-validation in loops whose forward steps change their batches and buffers: a forward that runs again sees neither.

Every step is clipped and redone. The baseline is megatron-core's 1F1B, whose gradient norm is summed in single precision and in
another order: what is clipped by it agrees to 1e-5.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from tests.support.loops import SIZES, Loop, merged, plain
from tests.support.ranks import RankPool
from tests.support.stock import example, installed

pytestmark = pytest.mark.claims(
    "Your own script",
    "post-validation in a loop of your own whose forward steps pop keys of their batches, change tensors of them in place, and "
    "assign registered buffers; ZB-H1, ZBV, distributed optimizer",
    "works, within 1e-5",
)

CLIPPED = f"{SIZES} --clip-grad 0.05"
OPTIMISTIC = "--enable-optimizer-post-validation --post-validation-patience 0"
CHUNKS = "--virtual-pipeline-model-parallel-size 2 --zero-bubble-v-schedule"


def _batches(loop: Loop) -> Iterator[Any]:
    """Objects with nested containers of views of one tensor."""
    for text in loop.batches():
        yield SimpleNamespace(text=text, rows=[{"tokens": text[:, :-1], "labels": text[:, 1:]}])


def _forward_step(data: Any, model: Any) -> Any:
    """Takes its batch apart, and changes tokens, and labels with them, in place."""
    batch = next(data)
    row = batch.rows.pop()
    row["tokens"].add_(1).remainder_(example().VOCABULARY)
    del batch.text
    tokens, labels = row.pop("tokens").contiguous(), row.pop("labels").contiguous()
    positions = torch.arange(tokens.size(1)).expand(len(tokens), -1)
    return model(tokens, positions, None, labels=labels), example().loss_function


def _add_average(chunk: Any) -> None:
    """Let each layer keep a moving average of its output, which it uses, in a buffer that its forward assigns."""

    def average(layer: Any, given: Any, output: Any) -> Any:
        layer.average = 0.5 * layer.average + 0.5 * output[0].detach().abs().mean()
        return output[0] * (1 + layer.average), *output[1:]

    for layer in chunk.decoder.layers:
        layer.register_buffer("average", torch.zeros(()))
        layer.register_forward_hook(average)


def train(rank: int, flags: str) -> dict[str, Any]:
    """Results of four iterations on one rank, then weights and averages by name."""
    with installed(flags, by_flags="zero-bubble" in flags) as args:
        loop = Loop(args, prepare=_add_average)
        if args.overlap_grad_reduce:
            loop.overlap_reductions(is_aligned=False)
        loop.data = [_batches(loop) for _ in loop.model]
        for _ in range(4):
            loop.train(forward_step_func=_forward_step)
        for chunk in loop.model:
            chunk.state_dict()  # validates the last step
        layers = [layer for chunk in loop.model for layer in chunk.module.decoder.layers]
        replica = parallel_state.get_data_parallel_rank()
        averages = {f"average {layer.layer_number} of replica {replica}": layer.average.numpy() for layer in layers}
        return {"results": loop.seen, **{name: plain(weight) for name, weight in loop.named()}, **averages}


@pytest.mark.parametrize("more", ["", "--use-distributed-optimizer --overlap-grad-reduce"], ids=["plain", "distributed"])
@pytest.mark.parametrize("schedule", ["--enable-zero-bubble", CHUNKS], ids=["zb-h1", "zbv"])
@pytest.mark.sampled(0.5)
def test_batches_and_buffers_are_those_of_one_forward(four_ranks: RankPool, schedule: str, more: str) -> None:
    expected = merged(four_ranks.run(train, f"{CLIPPED} {more}"))
    actual = merged(four_ranks.run(train, f"{CLIPPED} {more} {schedule} {OPTIMISTIC}"))
    assert actual.keys() == expected.keys()
    assert _losses(actual) == pytest.approx(_losses(expected), rel=1e-5)
    for name in expected.keys() - {"results"}:
        assert actual[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


def _losses(found: dict[str, Any]) -> list[float]:
    losses = [float(report["lm loss"]) for rank in found["results"] for reports in rank for report in reports]
    assert losses
    return losses
