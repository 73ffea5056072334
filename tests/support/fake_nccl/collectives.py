"""What collectives do to the data: functions of the inputs and the outputs of all ranks, lists of as many tensors on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PerRank = Sequence[Sequence[Tensor]]


def _reduce(values: Sequence[Tensor], operation: str) -> Tensor:
    if operation in ("MAX", "MIN"):
        stacked = torch.stack(list(values))
        return stacked.amax(0) if operation == "MAX" else stacked.amin(0)
    if operation not in ("SUM", "AVG"):
        raise NotImplementedError(f"the fake NCCL has no {operation}")
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total / len(values) if operation == "AVG" else total


def all_reduce(operation: str) -> Callable[[PerRank, PerRank], None]:
    def carry(inputs: PerRank, outputs: PerRank) -> None:
        results = [_reduce(values, operation) for values in zip(*inputs, strict=True)]
        for tensors in outputs:
            for tensor, result in zip(tensors, results, strict=True):
                tensor.copy_(result)

    return carry


def broadcast(root: int) -> Callable[[PerRank, PerRank], None]:
    def carry(inputs: PerRank, outputs: PerRank) -> None:
        for place, tensors in enumerate(outputs):
            for tensor, given in zip(tensors, inputs[root], strict=True):
                if place != root:
                    tensor.copy_(given)

    return carry


def all_gather(inputs: PerRank, outputs: PerRank) -> None:
    for tensors in outputs:
        for tensor, (given,) in zip(tensors, inputs, strict=True):
            tensor.copy_(given)


def all_gather_single(inputs: PerRank, outputs: PerRank) -> None:
    gathered = [torch.cat([given.reshape(-1) for given in each]) for each in zip(*inputs, strict=True)]
    for tensors in outputs:
        for tensor, whole in zip(tensors, gathered, strict=True):
            tensor.copy_(whole.view(tensor.shape))


def reduce_scatter_single(operation: str) -> Callable[[PerRank, PerRank], None]:
    def carry(inputs: PerRank, outputs: PerRank) -> None:
        results = [_reduce(values, operation) for values in zip(*inputs, strict=True)]
        for place, tensors in enumerate(outputs):
            for tensor, result in zip(tensors, results, strict=True):
                tensor.copy_(result.reshape(-1).chunk(len(outputs))[place].view(tensor.shape))

    return carry
