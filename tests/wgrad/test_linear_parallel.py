"""The split linear under tensor and sequence parallelism vs. megatron-core's own linear."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import RankPool

SEQUENCE, BATCH, IN, OUT, MICROBATCHES = 8, 2, 16, 24, 3


@dataclass(frozen=True)
class Case:
    """One column-parallel linear: the weight [out/t, in] is sharded, the input whole or, in sequence parallelism, in slices."""

    tensor_parallel: int
    sequence_parallel: bool
    reduce_input_grad: bool
    bias: bool
    contiguous: bool

    def __str__(self) -> str:
        flags = ("sequence_parallel", "reduce_input_grad", "bias", "contiguous")
        return "-".join([f"t{self.tensor_parallel}", *(flag for flag in flags if getattr(self, flag))])


CASES = [
    Case(t, sequence, reduce, bias, contiguous)
    for t, (sequence, reduce), bias, contiguous in itertools.product(
        (2, 4), ((True, False), (False, True), (False, False)), (False, True), (True, False)
    )
]


@pytest.fixture(scope="module")
def results(four_ranks: RankPool) -> dict[Case, list[dict[str, Any]]]:
    """Every case on every rank; the cases run in one call, the parallel state is built twice."""
    by_rank = four_ranks.run(run_cases, CASES)
    return {case: [rank[case] for rank in by_rank] for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_and_collectives_as_megatron_core(case: Case, results: dict[Case, list[dict[str, Any]]]) -> None:
    """Both sides add the same numbers in the same order, collectives included: nothing may differ."""
    for rank in results[case]:
        assert rank["differs from megatron-core"] == []
        assert rank["collectives in W"] == MICROBATCHES * int(case.sequence_parallel), "W gathers a sharded input, nothing else"
        assert rank["collectives in F and B"] == MICROBATCHES * (2 if case.sequence_parallel else int(case.reduce_input_grad))


# -- on the ranks -------------------------------------------------------------------------------------------------------


def run_cases(rank: int, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """Runs on every rank."""
    from megatron.core import parallel_state

    results = {}
    for t in sorted({case.tensor_parallel for case in cases}):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=t)
        for case in cases:
            if case.tensor_parallel == t:
                results[case] = run_case(case, parallel_state.get_tensor_model_parallel_group())
        parallel_state.destroy_model_parallel()
    return results


def run_case(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    """Ours and megatron-core's of one case."""
    ours, (in_b, in_w) = run_ours(case, group)
    stock = run_stock(case, group)
    return {
        "differs from megatron-core": [
            name for name in ours if not all(itertools.starmap(torch.equal, zip(ours[name], stock[name], strict=True)))
        ],
        "collectives in F and B": in_b,
        "collectives in W": in_w,
    }


def shards(case: Case, group: dist.ProcessGroup) -> tuple[Tensor, Tensor | None]:
    """This rank's weight [out/t, in] and bias [out/t]."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(OUT, IN, generator=generator)
    bias = torch.randn(OUT, generator=generator)
    t, mine = dist.get_world_size(group), dist.get_rank(group)
    return weight.chunk(t)[mine].clone(), bias.chunk(t)[mine].clone() if case.bias else None


def microbatch(case: Case, index: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The whole input x_sbi and the whole output's gradient y_sbo, the same on every rank."""
    generator = torch.Generator().manual_seed(10 + index)
    x_sbi = torch.randn(SEQUENCE, BATCH, IN, generator=generator)
    if case.contiguous:
        return x_sbi, torch.randn(SEQUENCE, BATCH, OUT, generator=generator)
    return x_sbi, torch.randn(BATCH, SEQUENCE, OUT, generator=generator).transpose(0, 1)


def mine_of(case: Case, index: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """What this rank has of it: its slice of the sequence, its columns of the gradient."""
    x_sbi, grad_sbo = microbatch(case, index, group)
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    if case.sequence_parallel:
        x_sbi = x_sbi.chunk(t)[rank].clone()
    grad = grad_sbo.chunk(t, dim=-1)[rank]
    return x_sbi.requires_grad_(), grad.clone(memory_format=torch.contiguous_format) if case.contiguous else grad


def run_ours(case: Case, group: dist.ProcessGroup) -> tuple[dict[str, list[Tensor]], tuple[int, int]]:
    """F and B of every microbatch, then every W. Any warning of ours is an error."""
    from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
    from megatron.zerobubble.wgrad.linear import LinearSplit, split_linear
    from megatron.zerobubble.wgrad.split_weight import SplitWeight
    from megatron.zerobubble.wgrad.store import WeightGradStore

    weight, bias = shards(case, group)
    parameter = torch.nn.Parameter(weight)
    bias = None if bias is None else torch.nn.Parameter(bias)
    store = WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate))
    how = LinearSplit(SplitWeight("weight", parameter), store)
    outputs, input_grads = [], []
    with warnings.catch_warnings(), CollectiveCount() as during_b:
        warnings.simplefilter("error")
        for index in range(MICROBATCHES):
            x, grad_output = mine_of(case, index, group)
            output = split_linear(
                x,
                parameter,
                bias,
                how,
                reduce_input_grad=case.reduce_input_grad,
                sequence_parallel=case.sequence_parallel,
                group=group,
            )
            store.begin(0, index, fused=False)
            output.backward(grad_output)
            store.end()
            outputs.append(output.detach())
            input_grads.append(x.grad)
    with CollectiveCount() as during_w:
        for index in range(MICROBATCHES):
            store.run(0, index)
    gathered = {"output": outputs, "input": input_grads, "weight": [parameter.grad]}
    if bias is not None:
        gathered["bias"] = [bias.grad]
    return gathered, (during_b.count, during_w.count)


def run_stock(case: Case, group: dist.ProcessGroup) -> dict[str, list[Tensor]]:
    """megatron-core's fused backward."""
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    weight, bias = shards(case, group)
    weight.requires_grad_()
    if bias is not None:
        bias.requires_grad_()
    outputs, input_grads = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls collectives by names that torch 2.13 has deprecated
        for index in range(MICROBATCHES):
            x, grad_output = mine_of(case, index, group)
            output = linear_with_grad_accumulation_and_async_allreduce(
                x,
                weight,
                bias,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=case.reduce_input_grad,
                sequence_parallel=case.sequence_parallel,
                tp_group=group,
            )
            output.backward(grad_output)
            outputs.append(output.detach().clone())
            input_grads.append(x.grad)
    gathered = {"output": outputs, "input": input_grads, "weight": [weight.grad]}
    if bias is not None:
        gathered["bias"] = [bias.grad]
    return gathered


class CollectiveCount:
    """Counts the collectives that the split linear starts, by standing in front of the names it calls."""

    def __enter__(self) -> CollectiveCount:
        from megatron.zerobubble.wgrad import sharing

        self.count = 0
        self._places = [(dist, "all_reduce"), (sharing, "_all_gather"), (sharing, "_reduce_scatter")]
        self._before = [getattr(owner, name) for owner, name in self._places]
        for (owner, name), function in zip(self._places, self._before, strict=True):
            setattr(owner, name, self._counting(function))
        return self

    def __exit__(self, *_: Any) -> None:
        for (owner, name), function in zip(self._places, self._before, strict=True):
            setattr(owner, name, function)

    def _counting(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return counted
