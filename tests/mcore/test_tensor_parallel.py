"""Tensor and sequence parallelism with split B and W: all-gather policies and overlapped GEMMs change no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.wgrad import sharing
from megatron.zerobubble.wgrad.sharing import WgradGather, WgradPolicy
from tests.support.gpt import MICRO_BATCH, SEQUENCE, Case, Difference, Trainer, compare
from tests.support.ranks import RankPool

ZBV = Case("zbv", 2, 4, num_chunks=2, tensor_parallel=2, num_steps=2)
ZB_H2 = Case("zb-h2", 2, 4, tensor_parallel=2, num_steps=2)
ONE_F_ONE_B = Case("1f1b", 2, 4, tensor_parallel=2, num_steps=2)


def sequence_parallel(base: Case, gather: WgradGather = WgradGather.INPUT, **features: Any) -> Case:
    return replace(base, sequence_parallel=True, wgrad=WgradPolicy(gather=gather), **features)


CASES = [
    *(sequence_parallel(base, gather) for base in (ZBV, ZB_H2) for gather in WgradGather),
    sequence_parallel(ONE_F_ONE_B, WgradGather.BOTH),
    sequence_parallel(ZBV, WgradGather.BOTH, llama=True, dtype=torch.bfloat16),
    sequence_parallel(ZB_H2, WgradGather.INPUT, llama=True, recompute="full"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.18)
def test_sequence_parallel_has_the_bits_of_the_unpipelined_model(four_ranks: RankPool, case: Case) -> None:
    _assert_same_bits(four_ranks.run(compare, case))


@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)
@pytest.mark.sampled(0.5)
def test_sequence_parallel_is_tensor_parallel(four_ranks: RankPool, base: Case) -> None:
    """Against a model without it, whose norms see the whole sequence: a norm's or a bias' gradient is summed in two parts over
    the ranks, and everything after a reduce-scatter in another order: 1e-5 of float32 sums. A norm that was not marked would
    miss half of its gradient."""
    case = replace(base, adam_eps=1.0)
    for difference in four_ranks.run(compare, sequence_parallel(case), case.unpipelined):
        assert difference.losses < 1e-5
        assert difference.gradients < 1e-5, difference.gradient_name
        assert difference.weights < 1e-5, difference.weight_name


def _assert_same_bits(differences: list[Difference]) -> None:
    for rank, difference in enumerate(differences):
        assert (difference.losses, difference.gradients, difference.weights) == (0.0, 0.0, 0.0), (rank, difference)


# -- wgrad GEMMs beside B's all-reduce ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [ZBV, ZB_H2, sequence_parallel(ZBV)], ids=str)
@pytest.mark.sampled(0.33)
def test_wgrad_gemms_of_other_microbatches_overlap_with_all_reduces_of_b(four_ranks: RankPool, case: Case) -> None:
    """In every B while a W is waiting, and never while passes are profiled."""
    for running, measured, off in four_ranks.run(gemms_in_flight, case):
        assert running["gemms"] == measured["gemms"] == off["gemms"] > 0
        assert running["collectives"] == measured["collectives"] == off["collectives"] > 0
        assert (measured["in flight"], off["in flight"]) == (0, 0)
        assert running["collectives"] / 2 < running["in flight"] <= running["collectives"], (
            "one GEMM per all-reduce, while a W waits"
        )


def gemms_in_flight(rank: int, case: Case) -> list[dict[str, int]]:
    """Numbers of GEMMs and all-reduces of a normal iteration, of a profiled one, and of one without overlap."""
    counts = []
    for mode in ("running", "measured", "off"):
        case = replace(case, wgrad=replace(case.wgrad, runs_ahead=mode != "off"))
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


# -- memory of a microbatch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)
@pytest.mark.sampled(0.5)
def test_measured_memory_after_backward_depends_on_the_gather_policy(four_ranks: RankPool, base: Case) -> None:
    """With `input`, each column-parallel linear (two per layer, and the head) saves a slice of its input less; with `both`, each
    row-parallel one also a slice of the output gradient less. All are hidden size wide; with t = 2 half of each is saved. Twelve
    microbatches: gloo's threads free a tensor a moment after its transfer is done, so now and then an op seems to hold one more,
    and the typical value needs more than the median of three."""
    half = SEQUENCE * MICRO_BATCH * 32 * 4 // 2
    heads = set()
    for rank in four_ranks.run(held_after_backward, replace(base, num_microbatches=12)):
        assert rank["keep"] - rank["input"] == rank["column"] * half
        assert rank["input"] - rank["both"] == rank["row"] * half
        heads.add((rank["column"], rank["row"]))
    assert heads == {(8, 8), (9, 8)}


def held_after_backward(rank: int, base: Case) -> dict[str, int]:
    """Bytes saved for W per microbatch of this rank's stages, for each gather policy; and the number of linears."""
    found = {}
    for gather in WgradGather:
        trainer = Trainer(sequence_parallel(base, gather))
        profiler = trainer.schedule.hooks.profiler = Profiler(trainer.schedule.device)
        trainer.forward_backward(0)
        found[gather.value] = int(sum(memory.after_backward for memory in profiler.profile().memory.values()))
        modules = [module for chunk in trainer.built.chunks for module in chunk.modules()]
        found["column"] = sum(isinstance(module, ColumnParallelLinear) for module in modules)
        found["row"] = sum(isinstance(module, RowParallelLinear) for module in modules)
        del modules
        trainer.close()
    return found


# -- sequences in parts -------------------------------------------------------------------------------------------------------

ATTENTION_FREE = {"context_parallel": 2, "attention": False, "adam_eps": 1.0}
CONTEXT = [replace(base, tensor_parallel=1, **ATTENTION_FREE) for base in (ZBV, ZB_H2, replace(ZBV, per_token_loss=True))]


@pytest.mark.parametrize("case", CONTEXT, ids=str)
@pytest.mark.sampled(0.5)
def test_context_parallel_does_not_break(four_ranks: RankPool, case: Case) -> None:
    """The schedule's part of it (shapes, scale of the loss, reduction of gradients), with layers that need no attention, against
    whole sequences: sums over a sequence are taken in two halves, 1e-5."""
    for difference in four_ranks.run(compare, case, replace(case.unpipelined, context_parallel=1)):
        assert difference.gradients < 1e-5, difference.gradient_name
        assert difference.weights < 1e-5, difference.weight_name
