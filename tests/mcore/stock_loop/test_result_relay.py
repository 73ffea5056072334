"""The results of the loss function, sent from the first to the last pipeline rank, and questions for the running stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage

import megatron.zerobubble
from megatron.zerobubble.mcore.compat import destroy_model_parallel
from megatron.zerobubble.mcore.model.stage_layout import embedding_ranks
from megatron.zerobubble.mcore.stock_loop.result_relay import ResultRelay
from megatron.zerobubble.mcore.stock_loop.stage_questions import StageQuestions
from megatron.zerobubble.plan.ir import Placement
from tests.support.gpt import _destroy_groups
from tests.support.ranks import RankPool


def _relayed(rank: int) -> list[list[Any]]:
    """Two pipelines of two ranks: what each rank has after each call."""
    _destroy_groups()
    pipelines = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    relay = ResultRelay(pipelines[rank % 2], torch.device("cpu"))
    losses = torch.arange(6.0, requires_grad=True) * (rank + 1)
    sent: list[list[Any]] = [
        [{"lm loss": losses[2 * i : 2 * i + 2], "tokens": torch.tensor(i, dtype=torch.int32)} for i in range(3)],
        [{"lm loss": 1.5, "note": "as text", "none": None, "flags": torch.tensor([True, False])}],
        [],
        [{"empty": torch.empty(0, 3), "two": (losses.bfloat16(), [losses])}],
    ]
    received = [relay(each if rank < 2 else []) for each in sent]
    relay.close()
    _destroy_groups()
    return received


def test_any_results_arrive_on_the_last_rank(four_ranks: RankPool) -> None:
    first, second, first_end, second_end = four_ranks.run(_plain)
    assert first == first_end
    assert second == second_end
    assert first != second


def _plain(rank: int) -> str:
    torch.set_printoptions(precision=8)
    return repr(_detached(_relayed(rank)))


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().tolist(), tuple(value.shape)
    if isinstance(value, dict):
        return {name: _detached(each) for name, each in value.items()}
    return [_detached(each) for each in value] if isinstance(value, (list, tuple)) else value


def _asked(rank: int) -> list[Any]:
    _destroy_groups()
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

        loop = _installed()
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
        _destroy_groups()


def ends_by_rank(group: Any) -> tuple[bool, bool]:
    answers = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    assert (is_pp_first_stage(group), is_pp_last_stage(group)) == answers
    return answers


def _installed() -> Any:
    from megatron.zerobubble.mcore.stock_loop import patches

    return patches._installed()


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
    _destroy_groups()
    answers = []
    for placement in (Placement.linear(4), Placement.v(4)):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4, **embedding_ranks(placement))
        answers.append(parallel_state.is_rank_in_embedding_group())
        destroy_model_parallel()
        answers.append(parallel_state.is_rank_in_embedding_group())
    _destroy_groups()
    return answers


def test_destroying_the_groups_forgets_the_ranks_with_an_embedding(four_ranks: RankPool) -> None:
    none = [False] * 4
    assert four_ranks.run(_embedding_ranks) == [[True, False, True, False], none, none, [True, False, False, False]]
