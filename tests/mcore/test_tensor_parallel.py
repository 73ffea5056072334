"""Tensor and sequence parallelism with split B and W: overlapped GEMMs change no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.wgrad import sharing
from tests.support.gpt import Case, Trainer, assert_near, compare
from tests.support.ranks import RankPool

ZBV = Case("zbv", 2, 4, num_chunks=2, tensor_parallel=2, num_steps=2)
ZB_H2 = Case("zb-h2", 2, 4, tensor_parallel=2, num_steps=2)
ONE_F_ONE_B = Case("1f1b", 2, 4, tensor_parallel=2, num_steps=2)


def sequence_parallel(base: Case, **features: Any) -> Case:
    return replace(base, sequence_parallel=True, **features)


CASES = [
    *(sequence_parallel(base) for base in (ZBV, ZB_H2, ONE_F_ONE_B)),
    sequence_parallel(ZBV, llama=True, dtype=torch.bfloat16),
    sequence_parallel(ZB_H2, llama=True, recompute="full"),
]


@pytest.mark.claims(
    "Parallelism",
    "sequence parallelism; W gathers its input again",
    "works, bit for bit",
)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.18)
def test_sequence_parallel_has_the_bits_of_the_unpipelined_model(four_ranks: RankPool, case: Case) -> None:
    assert_near(four_ranks.run(compare, case), case)


@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)
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
    also=("wgrad/test_sharing.py",),
)
@pytest.mark.parametrize("case", [ZBV, ZB_H2, sequence_parallel(ZBV)], ids=str)
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
        store = trainer.built.store
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


# -- sequences in parts -------------------------------------------------------------------------------------------------------
