"""Every schedule against the unpipelined model: same loss, same gradients, same weights after two optimizer steps.

fp32, and bit for bit (`torch.equal`): each weight's gradient is accumulated over the microbatches in the same ascending order on
both sides, by the same operations. Where a sum is taken in another order the tolerance is 4e-6 and the test states which sum.
Weights are compared without clipping, because the gradient norm is a sum over all parameters and its order depends on where they
are; clipping has its own test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.wgrad import sharing
from tests.support.comparisons import assert_near, assert_same_bits, compare
from tests.support.gpt import Case, Tensors, Trainer
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER

pytestmark = pytest.mark.claims(
    "Precision and the optimizer",
    "fp32, bf16, fp16; main gradients in fp32 or the weights' precision; constant and dynamic loss scale with overflows",
    "works, bit for bit",
    also=("mcore/test_pairwise.py",),
)


SCHEDULES = [("stock", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zbv", 2)]


def _grid() -> list[Case]:
    cases = []
    for num_ranks in (2, 4):
        for num_microbatches in sorted({1, 2, num_ranks, 3 * num_ranks}):
            for schedule, num_chunks in SCHEDULES:
                cases.append(Case(schedule, num_ranks, num_microbatches, num_chunks=num_chunks))
        cases.append(Case("stock", num_ranks, 2 * num_ranks, num_chunks=2))
        cases.append(Case("interleaved-1f1b", num_ranks, num_ranks + 1, num_chunks=2))
        for schedule in ("v-half", "v-min", "1f1b-v", "zb-interleaved"):
            cases.append(Case(schedule, num_ranks, num_ranks + 1, num_chunks=2))
        cases.append(Case("zb", num_ranks, 6, max_pending_backward=num_ranks + 1))
    return sorted(cases, key=lambda case: case.num_microbatches)  # neighbors share their reference


@pytest.mark.claims(
    "Schedules",
    "stock 1F1B; 1F1B, interleaved 1F1B, ZB-H1, ZB-H2, ZB, ZBV through our executor, p 2 and 4, m from 1 to 3p; V-Half, "
    "V-Min, 1F1B-V, zero-bubble interleaved, m = p+1; ZB-W with uneven stages",
    "works, bit for bit",
)
@pytest.mark.claims(
    "Schedules",
    "megatron-core's own 1F1B and interleaved 1F1B, the baselines (on gloo the interleaved one keeps its outputs: freed early"
    " they were seen to be sent wrong)",
    "works",
)
@pytest.mark.claims(
    "Layers",
    "torch's attention under schedules, as the attention of nearly all tests: recomputation, dropout, every placement",
    "works, bit for bit",
    also=("mcore/model/test_wgrad_split.py",),
)
@pytest.mark.parametrize("case", _grid(), ids=str)
@pytest.mark.sampled(0.15)
def test_same_bits_as_the_unpipelined_model(four_ranks: RankPool, case: Case) -> None:
    assert_same_bits(four_ranks.run(compare, case), case)


UNEVEN = [
    Case("stock", 2, 4, num_layers=7, layout="Et|t*6L"),
    Case("stock", 2, 4, num_layers=7, num_chunks=2, layout="Ettt|tt|t|tL"),
    Case("zb-h2", 4, 6, num_layers=7, layout="E|ttt|t*4|L"),
    Case("zb-interleaved", 2, 3, num_layers=7, num_chunks=2, layout="Ettt|t|tt|tL"),
    Case("zbv", 2, 4, num_layers=7, num_chunks=2, layout="Et|ttt|ttt|L"),
    Case("zbv", 2, 4, num_layers=7, num_chunks=2, layout="Ettt||t*4|L"),
    Case("zb-interleaved", 2, 4, num_layers=7, num_chunks=2, layout="Ettt|||t*4L"),
    Case("zb-interleaved", 2, 4, num_layers=7, num_chunks=3, layout="Et||tt|t|tt|tL"),
    Case("zb-w", 2, 4, num_layers=7, num_chunks=4, layout="Et|t|tt||t|t|t|L"),
    Case("zbv", 4, 8, num_layers=12, num_chunks=2),
]


@pytest.mark.claims(
    "Schedules",
    "uneven stages (linear, stock interleaved, V, two Vs), any stage without a layer, an odd number of layers per rank under V",
    "works, bit for bit",
)
@pytest.mark.parametrize("case", UNEVEN, ids=str)
@pytest.mark.sampled(0.2)
def test_same_bits_with_uneven_stages(four_ranks: RankPool, case: Case) -> None:
    """Stages of any number of layers, ends without a layer, odd layers per rank under V: each layer keeps its global index."""
    assert_same_bits(four_ranks.run(compare, case), case)


ZBV = Case("zbv", 2, 4, num_chunks=2)
ZB_H2 = Case("zb-h2", 2, 4)


@pytest.mark.claims("Precision and the optimizer", "gradient clipping", "works, 4e-6")
@pytest.mark.parametrize("base", [ZBV, ZB_H2, pytest.param(Case("zbv", 4, 8, num_chunks=2), marks=pytest.mark.smoke)], ids=str)
@pytest.mark.sampled(0.34)
def test_clipping(four_ranks: RankPool, base: Case) -> None:
    """The norm is summed over the ranks' parameters in another order than over the whole model's: 4e-6."""
    case = replace(base, clip_grad=0.1, optimizer="sgd")
    for rank, difference in enumerate(four_ranks.run(compare, case)):
        assert difference.gradients == 0.0, (rank, difference)
        assert difference.grad_norms < OTHER_ORDER, (rank, difference)
        assert difference.weights < OTHER_ORDER, (rank, difference)


FIRST_SCALE = 2.0**30
"""Overflows in every gradient."""
FP16 = torch.float16


@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)
@pytest.mark.parametrize(
    ("scale", "scales"),
    [(64.0, [64.0] * 2), (None, [FIRST_SCALE / 2, FIRST_SCALE / 4])],
    ids=["constant", "dynamic"],
)
@pytest.mark.sampled(0.25)
def test_loss_scales(four_ranks: RankPool, base: Case, scale: float | None, scales: list[float]) -> None:
    """A constant scale stays. A dynamic one that is far too large halves at every step, and such a step leaves weights alone."""
    case = replace(base, dtype=FP16, loss_scale=scale, initial_loss_scale=FIRST_SCALE)
    for expected, actual, moved, equal in four_ranks.run(scaled_steps, case):
        assert actual == expected == scales
        assert equal
        assert moved is (scale is not None)


def scaled_steps(rank: int, case: Case) -> tuple[list[float], list[float], bool, bool]:
    """The loss scale after each step without and with the pipeline, whether weights moved, and whether they are equal."""
    reference, initial, expected = steps_of(case.unpipelined)
    scales, before, actual = steps_of(case, initial)
    moved = any(not torch.equal(before[name], actual[name]) for name in actual)
    return reference, scales, moved, all(torch.equal(actual[name], expected[name]) for name in actual)


def steps_of(case: Case, initial: Tensors | None = None) -> tuple[list[float], Tensors, Tensors]:
    """The loss scale after each step; weights before and after."""
    trainer = Trainer(case, initial)
    before, scales = trainer.snapshot(), []
    for step in range(case.num_steps):
        trainer.zero_gradients()
        trainer.forward_backward(step)
        with trainer.host.on_host():
            trainer.optimizer.step()
        scales.append(float(trainer.optimizer.get_loss_scale().item()))
    after = trainer.snapshot()
    trainer.close()
    return scales, before, after


TP_ZBV = Case("zbv", 2, 4, num_chunks=2, tensor_parallel=2, num_steps=2)
TP_ZB_H2 = Case("zb-h2", 2, 4, tensor_parallel=2, num_steps=2)


def sequence_parallel(base: Case, **features: Any) -> Case:
    return replace(base, sequence_parallel=True, **features)


@pytest.mark.parametrize("base", [TP_ZBV, TP_ZB_H2], ids=str)
@pytest.mark.sampled(0.5)
def test_sequence_parallel_is_tensor_parallel(four_ranks: RankPool, base: Case) -> None:
    """Against a model without it, whose norms see the whole sequence: a norm's or a bias' gradient is summed in two parts over
    the ranks, and everything after a reduce-scatter in another order: 1e-5 of float32 sums. A norm that was not marked would
    miss half of its gradient."""
    case = replace(base, adam_eps=1.0)
    assert_near(four_ranks.run(compare, sequence_parallel(case), case.unpipelined), case, 1e-5)


# -- wgrad GEMMs beside B's all-reduce ----------------------------------------------------------------------------------------


@pytest.mark.claims(
    "Parallelism",
    "tensor parallel 2; B's tensor-parallel all-reduce overlaps with a deferred wgrad GEMM (in flight on gloo; time on a GPU "
    "not measured)",
    "works, bit for bit",
)
@pytest.mark.parametrize("case", [TP_ZBV, TP_ZB_H2, sequence_parallel(TP_ZBV)], ids=str)
@pytest.mark.sampled(0.33)
def test_wgrad_gemms_of_other_microbatches_overlap_with_all_reduces_of_b(four_ranks: RankPool, case: Case) -> None:
    """In every B while a W is waiting, and never while passes are profiled."""
    for running, measured in four_ranks.run(gemms_in_flight, case):
        assert running["gemms"] == measured["gemms"] > 0
        assert running["collectives"] == measured["collectives"] > 0
        assert measured["in flight"] == 0
        assert running["collectives"] / 2 < running["in flight"] <= running["collectives"], (
            "one GEMM per all-reduce, while a W waits"
        )


def gemms_in_flight(rank: int, case: Case) -> list[dict[str, int]]:
    """Numbers of GEMMs and all-reduces of a normal iteration and of a profiled one."""
    counts = []
    for mode in ("running", "measured"):
        trainer = Trainer(case)
        if mode == "measured":
            trainer.schedule.hooks.profiler = Profiler(trainer.schedule.device)
        with InFlightCounter(trainer) as counter:
            trainer.forward_backward(0)
        trainer.close()
        counts.append(counter.counts)
    return counts


class InFlightCounter:
    """Counts all-reduces and reduce-scatters of dgrads, wgrad GEMMs, and the GEMMs between start and wait of a collective."""

    def __init__(self, trainer: Trainer) -> None:
        self.counts = {"collectives": 0, "gemms": 0, "in flight": 0}
        self._num_in_flight = 0
        store = trainer.store
        assert store is not None
        accumulate = store.kernel.accumulate

        def counted(*operands: torch.Tensor) -> None:
            self.counts["gemms"] += 1
            self.counts["in flight"] += self._num_in_flight
            accumulate(*operands)

        store.kernel = replace(store.kernel, accumulate=counted)

    def __enter__(self) -> InFlightCounter:
        self._before = dist.all_reduce, sharing._reduce_scatter
        dist.all_reduce, sharing._reduce_scatter = map(self._started, self._before)
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce, sharing._reduce_scatter = self._before

    def _started(self, collective: Any) -> Any:
        def start(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            if not kwargs.get("async_op"):
                return work
            self.counts["collectives"] += 1
            self._num_in_flight += 1
            return _CountedWork(work, self)

        return start

    def finished(self) -> None:
        self._num_in_flight -= 1


class _CountedWork:
    def __init__(self, work: Any, counter: InFlightCounter) -> None:
        self._work, self._counter = work, counter

    def wait(self) -> None:
        self._counter.finished()
        self._work.wait()
