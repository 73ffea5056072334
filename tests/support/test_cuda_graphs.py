"""The double of `torch.cuda.CUDAGraph`."""

from __future__ import annotations

import pytest
import torch

from tests.support.transformer_engine import graphs


def test_a_replay_runs_on_what_memory_holds_now() -> None:
    given, graph = torch.ones(4), graphs.CUDAGraph()
    with graphs.graph(graph):
        result = given * 2
    given.fill_(3)
    assert result.tolist() == [2.0] * 4
    graph.replay()
    assert result.tolist() == [6.0] * 4


def test_memory_that_no_tensor_holds_is_another_captures() -> None:
    given, first, second = torch.ones(1000), graphs.CUDAGraph(), graphs.CUDAGraph()
    with graphs.graph(first):
        result = given * 2
    late = graphs.make_weak_ref(result)
    del result
    with graphs.graph(second):
        other = given * 5
    first.replay()
    assert torch.equal(other, given * 2)
    second.replay()
    assert torch.equal(late, given * 5)


def test_the_host_reads_nothing_in_a_capture() -> None:
    total = graphs.CUDAGraph()
    with pytest.raises(RuntimeError, match="the host would wait"), graphs.graph(total):
        (torch.ones(2) * 2).sum().item()
