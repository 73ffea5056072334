"""What a schedule does on real ranks beyond its result: which GEMMs run where, what stays in memory, evaluation."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.zb_schedules import program_of
from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.validate import live_timeline
from tests.support.after_each_op import after_each_op
from tests.support.comparisons import unpipelined
from tests.support.gpt import Case, Trainer
from tests.support.plans import receive_buffers
from tests.support.ranks import RankPool
from tests.wgrad.test_linear import GemmCount

ALL = [
    ("1f1b", 1),
    ("interleaved-1f1b", 2),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("zbv", 2),
    ("v-half", 2),
    ("v-min", 2),
    ("zb-interleaved", 2),
]


def _gemms_per_op(rank: int, case: Case) -> dict[str, int]:
    trainer = Trainer(case)
    counts: dict[str, int] = {}
    mode = GemmCount({"mm", "addmm", "addmm_"})  # of linears: those of attention are batched

    def observe(_: Any, op: Any) -> None:
        counts[str(op)] = mode.count
        mode.count = 0

    after_each_op(trainer.schedule, observe)
    with mode:
        trainer.forward_backward(0)
    trainer.close()
    return counts


@pytest.mark.claims(
    "Schedules", "B runs no wgrad GEMM, W runs all; live microbatches and receive buffers are the plan's", "works"
)
@pytest.mark.parametrize("case", [Case("zbv", 4, 3, num_chunks=2), Case("zb-h1", 2, 3)], ids=str)
def test_b_computes_no_weight_gradient_and_w_computes_all(four_ranks: RankPool, case: Case) -> None:
    stages = case.num_ranks * case.num_chunks
    for counts in four_ranks.run(_gemms_per_op, case):
        for text, count in counts.items():
            stage = int(text.rstrip("0123456789").rstrip("FBW"))
            linears = 4 * case.num_layers // stages + (stage == stages - 1)  # qkv, projection, two of the MLP; the head
            assert count == linears, f"{text} ran {count} GEMMs, its stage has {linears} linears"


class _CountedLinks:
    """Counts receives that are posted and not yet taken."""

    def __init__(self, links: Any) -> None:
        self._links, self.open, self.peak = links, 0, 0

    def send(self, message: Message, tensor: torch.Tensor) -> Any:
        return self._links.send(message, tensor)

    def receive(self, message: Message, buffer: torch.Tensor) -> Any:
        self.open += 1
        self.peak = max(self.peak, self.open)
        handle, counted = self._links.receive(message, buffer), self

        class _Handle:
            def wait(self) -> None:
                counted.open -= 1
                handle.wait()

        return _Handle()

    def close(self) -> None:
        self._links.close()


def _memory(rank: int, case: Case) -> dict[str, Any]:
    trainer = Trainer(case)
    schedule = trainer.schedule
    live: list[int] = []
    full_outputs: list[str] = []
    links: Any = _CountedLinks(schedule._links)
    assert schedule._runner is not None
    schedule._links = schedule._runner._links = links

    def observe(work: Any, op: Any) -> None:
        live.append(len(frozenset(work._inflight) | work._store.pending))
        for key, (_, output) in work._inflight.items():
            if output.numel() > 1:
                full_outputs.append(f"{key} after {op}")

    after_each_op(schedule, observe)
    trainer.forward_backward(0)
    program = schedule.program(case.num_microbatches)
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    assert trainer.store is not None
    pending = trainer.store.pending
    trainer.close()
    return {
        "live": live,
        "planned": list(live_timeline(program.plan)[pipeline_rank]),
        "receives": (links.peak, receive_buffers(program)[pipeline_rank]),
        "full_outputs": full_outputs,
        "pending": len(pending),
    }


@pytest.mark.parametrize(("schedule", "num_chunks"), ALL)
@pytest.mark.parametrize("num_microbatches", [2, 12])
@pytest.mark.sampled(0.25)
def test_memory_is_what_the_plan_predicts(four_ranks: RankPool, schedule: str, num_chunks: int, num_microbatches: int) -> None:
    case = Case(schedule, 4, num_microbatches, num_chunks=num_chunks)
    for rank, result in enumerate(four_ranks.run(_memory, case)):
        assert result["live"] == result["planned"], f"rank {rank}: live microbatches after each op"
        measured, planned = result["receives"]
        assert measured == planned <= case.num_ranks, f"rank {rank}: receive buffers"
        assert result["full_outputs"] == [], f"rank {rank}: a stage output was kept after it had been handed on"
        assert result["pending"] == 0


def _evaluate(rank: int, case: Case) -> tuple[list[float], list[float]]:
    initial, _ = unpipelined(case.unpipelined)
    reference = Trainer(case.unpipelined, initial)
    expected = reference.forward_backward(7, forward_only=True)
    reference.close()
    trainer = Trainer(case, initial)
    actual = trainer.forward_backward(7, forward_only=True)
    trainer.close()
    return actual, expected


@pytest.mark.claims(
    "Layers",
    "dropout (attention's, too), evaluation, frozen layers",
    "works",
    also=("mcore/test_pairwise.py", "mcore/ddp/test_frozen_weights.py"),
)
@pytest.mark.parametrize(("schedule", "num_chunks"), ALL)
@pytest.mark.sampled(0.25)
def test_evaluation_under_every_placement(four_ranks: RankPool, schedule: str, num_chunks: int) -> None:
    case = Case(schedule, 4, 6, num_chunks=num_chunks)
    results = four_ranks.run(_evaluate, case)
    reported = [actual for actual, _ in results if actual]
    assert reported == [results[0][1]], "one rank reports, and the losses are those of the unpipelined model"


def _misuse(rank: int) -> list[str]:
    trainer = Trainer(Case("zbv", 4, 2, num_chunks=2))
    run = trainer.schedule.forward_backward_func
    chunks = trainer.chunks
    good: dict[str, Any] = {
        "forward_step_func": trainer.forward_step,
        "data_iterator": [iter(()), iter(())],
        "model": chunks,
        "num_microbatches": 2,
        "seq_length": 8,
        "micro_batch_size": 1,
    }
    messages = []
    for wrong in ({"data_iterator": iter(())}, {"data_iterator": [None]}, {"model": chunks[0]}, {"p2p_communicator": object()}):
        try:
            run(**{**good, **wrong})
        except ConfigError as error:
            messages.append(str(error))
    trainer.close()
    return messages


def test_misuse_raises_a_helpful_error(four_ranks: RankPool) -> None:
    for messages in four_ranks.run(_misuse):
        assert [
            next(word for word in ("list, one", "1 data iterators", "model given", "p2p_communicator") if word in message)
            for message in messages
        ]
        assert len(messages) == 4


def test_a_program_that_can_deadlock_is_refused() -> None:
    """None of ours does. Here, messages that rank 1 has to wait for until it has validated the last step are behind its fence."""
    plan = build_plan("1f1b", num_ranks=2, num_microbatches=4)
    assert program_of(plan).plan is plan
    with pytest.raises(ConfigError, match=r"can deadlock on a GPU \(rank 0 at 0F1, sending .* choose another schedule"):
        program_of(plan, fence=(3, 2))


def _timed_passes(rank: int, device: str) -> set[bool]:
    """Whether passes have timers where tensors are said to be on `device`, over all iterations."""
    trainer = Trainer(Case("zb-h1", 4, 2))
    seen: list[bool] = []
    schedule = trainer.schedule
    schedule.device = torch.device(device)
    assert schedule._runner is not None
    run = schedule._runner.run

    def observed(*args: Any) -> Any:
        seen.append(trainer.config.timers is timers)
        return run(*args)

    schedule._runner.run = observed  # type: ignore[method-assign]
    timers = trainer.config.timers = mock.MagicMock()
    trainer.train()
    assert trainer.config.timers is timers
    trainer.close()
    return set(seen)


@pytest.mark.parametrize(("device", "has_timers"), [("cpu", True), ("cuda", False)])
def test_passes_have_no_timers_on_cuda(four_ranks: RankPool, device: str, has_timers: bool) -> None:
    assert four_ranks.run(_timed_passes, device) == [{has_timers}] * 4
