"""The results of the loss function, sent from the first to the last pipeline rank, and questions for the running stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage

import megatron.zerobubble
from megatron.zerobubble.mcore.compat import destroy_model_parallel
from megatron.zerobubble.mcore.model.stage_layout import embedding_ranks
from megatron.zerobubble.mcore.stock_loop import patches
from megatron.zerobubble.mcore.stock_loop.result_relay import ResultRelay
from megatron.zerobubble.mcore.stock_loop.stage_questions import StageQuestions
from megatron.zerobubble.plan.ir import Placement
from tests.support.process_groups import destroy_groups
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Your own script",
    "in a loop of your own, under V: results of the loss function of any type that can be pickled, nested and sparse tensors "
    "among them, and its error in an evaluation, on the last pipeline rank",
    "works; **not run on a GPU**",
)


@dataclass
class _Scores:
    """What a loss function may return beside dictionaries."""

    values: torch.Tensor
    count: int


def _unusual() -> list[Any]:
    values = torch.arange(1.0, 6.0)
    jagged = torch.nested.nested_tensor([values[:2], values[2:]], layout=torch.jagged)
    return [
        {"jagged": jagged, "with a gradient": (torch.nn.Parameter(values) * 2).view(5, 1), "number": torch.tensor(3)},
        [torch.diag(values).to_sparse(), values.to(torch.float8_e4m3fn), values > 2, values.to(torch.uint16), values[::2]],
        (_Scores(values, 2), np.arange(3), None, {1, 2}, b"bytes"),
        {"differentiated jagged": jagged.detach().requires_grad_() * 1},
    ]


def _relayed(rank: int) -> None:
    """Several calls in two pipelines of two ranks; the last rank of each has what the loss function returned on its first one."""
    destroy_groups()
    pipelines = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    relay = ResultRelay(pipelines[rank % 2], torch.device("cpu"))
    losses = torch.arange(6.0, requires_grad=True) * (rank % 2 + 1)
    sent: list[Any] = [
        [{"lm loss": losses[2 * i : 2 * i + 2], "tokens": torch.tensor(i, dtype=torch.int32)} for i in range(3)],
        [{"lm loss": 1.5, "note": "as text", "none": None, "flags": torch.tensor([True, False])}],
        [],
        [{"empty": torch.empty(0, 3), "two": (losses.bfloat16(), [losses])}],
        _unusual(),
    ]
    for each in sent:
        received = relay(each if rank < 2 else [])
        if rank >= 2:
            _check(received, each)
    relay.close()
    destroy_groups()


def _check(received: Any, sent: Any) -> None:
    """Types, layouts and values arrive; gradients do not."""
    assert type(received) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert (received.dtype, received.layout, received.requires_grad) == (sent.dtype, sent.layout, False)
        rows = [list(each.unbind()) if sent.is_nested else [each.to_dense()] for each in (received, sent.detach())]
        np.testing.assert_equal(*([each.to(torch.float32).numpy() for each in one] for one in rows))
    elif isinstance(sent, _Scores):
        _check(vars(received), vars(sent))
    elif isinstance(sent, (dict, list, tuple)):
        assert len(received) == len(sent)
        for key in sent if isinstance(sent, dict) else range(len(sent)):
            _check(received[key], sent[key])
    else:
        assert np.array_equal(received, sent)


def test_results_of_any_type_arrive_on_the_last_rank(four_ranks: RankPool) -> None:
    four_ranks.run(_relayed)


def _relayed_errors(rank: int) -> list[tuple[str, str, list[str]]]:
    """What each rank raised: results that cannot be pickled, and errors that can and cannot."""
    destroy_groups()
    relay = ResultRelay(dist.new_group(), torch.device("cpu"))
    unpicklable = KeyError("no such token")
    unpicklable.callback = lambda: None  # type: ignore[attr-defined]
    caught = []
    for error in (None, FloatingPointError("loss is nan"), unpicklable):
        try:
            if rank == 0 and error is not None:
                relay.fail(error)
            else:
                relay([lambda: None])
        except Exception as raised:  # noqa: BLE001 -- all of them are looked at
            caught.append((type(raised).__name__, str(raised), getattr(raised, "__notes__", [])))
    assert relay([rank]) == ([0] if rank in (0, 3) else [rank]), "it goes on"
    relay.close()
    destroy_groups()
    return caught


def test_an_error_arrives_in_place_of_results(four_ranks: RankPool) -> None:
    first, *middle, last = four_ranks.run(_relayed_errors)
    assert middle == [[], []]
    assert [name for name, *_ in first] == ["ConfigError"]
    assert "the loss function returned" in first[0][1]
    assert last[0][:2] == first[0][:2]
    assert last[1] == ("FloatingPointError", "loss is nan", ["raised on rank 0, in the last stage of this pipeline"])
    assert last[2][0] == "ExecutionError"
    assert "KeyError: 'no such token' on rank 0" in last[2][1]


def _asked(rank: int) -> list[Any]:
    destroy_groups()
    megatron.zerobubble.install(schedule="zbv")
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=4,
            virtual_pipeline_model_parallel_size=2,
            get_embedding_ranks=lambda pipeline: [pipeline[0], pipeline[-1]],
        )
        group = parallel_state.get_pipeline_model_parallel_group()
        chunks = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]

        def ends(*_: object) -> Any:
            answers = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
            assert (is_pp_first_stage(group), is_pp_last_stage(group)) == answers
            assert answers[1] == parallel_state.is_pipeline_last_stage(ignore_virtual=False)
            return answers

        loop: Any = patches._installed()
        forward_step = loop.questions.answering(lambda data, chunk: (ends(), ends), chunks)
        answers: list[Any] = [ends_by_rank(group)]
        for number, chunk in enumerate(chunks):
            output, loss_function = forward_step(None, chunk)
            assert output == loss_function(None) == loop.ends(number)
            answers.append(output)
        assert ends_by_rank(group) == answers[0], "nothing runs any more"
        assert parallel_state.is_rank_in_embedding_group() == (rank == 0), "whatever the loop passes"
        return answers
    finally:
        megatron.zerobubble.uninstall()
        destroy_groups()


def ends_by_rank(group: Any) -> tuple[bool, bool]:
    answers = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    assert (is_pp_first_stage(group), is_pp_last_stage(group)) == answers
    return answers


def test_questions_are_about_the_running_chunk(four_ranks: RankPool) -> None:
    neither = (False, False)
    assert four_ranks.run(_asked) == [
        [(True, False), (True, False), (False, True)],
        [neither, neither, neither],
        [neither, neither, neither],
        [(False, True), neither, neither],
    ]


def test_a_chunk_that_fails_runs_no_longer() -> None:
    def failing(data: object, chunk: object) -> Any:
        raise ValueError("no data")

    questions = StageQuestions(lambda vp_stage: (True, False))
    chunk: Any = SimpleNamespace()
    with pytest.raises(ValueError, match="no data"):
        questions.answering(failing, [chunk])(None, chunk)
    assert questions._running is None


def _embedding_ranks(rank: int) -> list[bool]:
    """Whether this rank has an embedding: under a linear placement, without groups, and under a V afterwards."""
    destroy_groups()
    answers = []
    for placement in (Placement.linear(4), Placement.v(4)):
        named = partial(embedding_ranks, placement)
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4, get_embedding_ranks=named)
        answers.append(parallel_state.is_rank_in_embedding_group())
        destroy_model_parallel()
        answers.append(parallel_state.is_rank_in_embedding_group())
    destroy_groups()
    return answers


def test_destroying_the_groups_forgets_the_ranks_with_an_embedding(four_ranks: RankPool) -> None:
    none = [False] * 4
    assert four_ranks.run(_embedding_ranks) == [[True, False, True, False], none, none, [True, False, False, False]]
