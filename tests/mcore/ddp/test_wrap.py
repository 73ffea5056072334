"""Gradients are reduced and weights gathered bucket by bucket while passes run, on every rank and in every chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.reduce_scatter_with_fp32_accumulation import _ReduceScatterWithFP32AccumulationWorkHandle

from megatron.zerobubble.mcore.ddp.record_buckets import ended
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.tail import final_ops, tail_of
from megatron.zerobubble.plan.timeline import Activity, Bucket, RankTimeline
from megatron.zerobubble.profiling.recorder import Exchange
from tests.support.comparisons import assert_near, compare, record
from tests.support.gpt import Case, Trainer
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER

pytestmark = pytest.mark.claims(
    "Parallelism",
    "2 data-parallel replicas; `--overlap-grad-reduce`: buckets are reduced all along the Ws behind a "
    "stage's last B; `--overlap-param-gather`: "
    "beside the first forward passes; distributed optimizer; seen in the trace",
    "works, 4e-6",
)


OVERLAPPED = Case(
    "zb-h2",
    2,
    4,
    distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    different_data=True,
    adam_eps=1.0,
)
BY_PARAMETER = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""How megatron-core stores the distributed optimizer's state so that runs with other buckets can load it."""
OVERLAPPED_V = replace(OVERLAPPED, schedule="zbv", num_chunks=2)
CASES = [OVERLAPPED, OVERLAPPED_V, replace(OVERLAPPED, schedule="zb-interleaved", num_chunks=2)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.5)
def test_gathering_while_forwards_run_changes_nothing(four_ranks: RankPool, case: Case) -> None:
    """The mean over two replicas is summed in another order than in the reference, which has four: 4e-6."""
    assert_near(four_ranks.run(compare, case), case, OTHER_ORDER)


def _badly_saved(rank: int, case: Case) -> tuple[int, list[str]]:
    """The number of optimizer state tensors that this rank saves, and the names of those saved for the wrong parameter."""
    trainer = Trainer(case)
    trainer.train()
    marks = {id(parameter): float(mark) for mark, (_, parameter) in enumerate(trainer.parameters(), start=1)}
    for part in trainer.optimizer.chained_optimizers:
        for parameter in part.model_param_group_index_map:
            part._get_main_param_and_optimizer_states(parameter)["exp_avg"].fill_(marks[id(parameter)])
    with trainer.host.on_host(), torch.no_grad():
        models = [chunk.module for chunk in trainer.chunks]
        model = {f"model{index}": each.sharded_state_dict(metadata={}) for index, each in enumerate(models)}
        kept = {
            (tensor.key, tensor.global_offset): marks[id(tensor.data)]
            for state in model.values()
            for tensor in state.values()
            if id(getattr(tensor, "data", None)) in marks
        }
        saved = trainer.optimizer.sharded_state_dict(dict(model), metadata=dict(BY_PARAMETER))
    tensors = [tensor for tensor in nested_values(saved) if getattr(tensor, "key", "").startswith("optimizer.state.exp_avg.")]
    before = [kept[each.key.removeprefix("optimizer.state.exp_avg."), each.global_offset] for each in tensors]
    wrong = [each.key for each, mark in zip(tensors, before, strict=True) if not (each.data == mark).all()]
    trainer.close()
    return len(tensors), wrong


def test_every_parameter_is_saved_with_its_own_state(four_ranks: RankPool) -> None:
    """Norms of 32 numbers leave padding between buckets."""
    results = four_ranks.run(_badly_saved, replace(OVERLAPPED, num_steps=1))
    assert max(count for count, _ in results) > 20
    assert all(wrong == [] for _, wrong in results)


@pytest.mark.parametrize("case", [OVERLAPPED, OVERLAPPED_V], ids=str)
def test_buckets_are_reduced_and_gathered_while_passes_run(four_ranks: RankPool, case: Case) -> None:
    timeline = four_ranks.run(record, replace(case, num_steps=4))[0]
    for rank, stages in zip(timeline.ranks, timeline.plan.placement.rank_to_stages, strict=True):
        for stage in stages:
            _check_reductions(rank, stage)
            _check_gathers(rank, stage)


def _check_reductions(rank: RankTimeline, stage: int) -> None:
    """Buckets start, from the last layers to the first, all along the ops in which the stage's gradients become final."""
    row = [timed.op for timed in rank.ops]
    final = [timed for timed in rank.ops if timed.op in final_ops(row, stage, tail_of(row))]
    starts = _starts(rank, Activity.REDUCE, stage)
    assert len(starts) > 3
    assert sorted(starts.values()) == list(starts.values())
    assert final[0].start_ms < starts[0]
    assert max(starts.values()) < final[-1].end_ms
    if len(final) > 1:
        assert starts[0] < final[0].end_ms
    if len(final) > 1 and final[0].op.kind is OpKind.W:  # else the last op is a W that has run with its B
        assert final[-1].start_ms < max(starts.values())


def _check_gathers(rank: RankTimeline, stage: int) -> None:
    """The first layers' bucket before anything else, the others one by one while the first forward runs."""
    first = next(timed for timed in rank.ops if timed.op.stage == stage)
    starts = list(reversed(_starts(rank, Activity.GATHER, stage).values()))
    assert len(starts) > 3
    assert starts[0] < min(timed.start_ms for timed in rank.ops)
    assert sorted(starts) == starts
    assert first.start_ms < starts[1]
    assert starts[-1] < first.end_ms


def _starts(rank: RankTimeline, activity: Activity, stage: int) -> dict[int, float]:
    """Of each bucket, by its index from the last layers on; every one of them ended."""
    spans = [span for span in rank.spans if span.activity is activity and span.bucket and span.bucket.stage == stage]
    assert all(span.end_ms > span.start_ms for span in spans)
    return dict(sorted((span.bucket.index, span.start_ms) for span in spans if span.bucket))


class CudaMarks:
    """Marks as on CUDA: numbers that count up."""

    on_cuda = True

    def __init__(self) -> None:
        self.count = 0

    def now(self) -> int:
        self.count += 1
        return self.count


class Work:
    """torch's Work, which is over when `complete` is called."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()
        self.waits = 0

    def get_future(self) -> torch.futures.Future[None]:
        return self.future

    def complete(self) -> None:
        self.future.set_result(None)

    def wait(self) -> None:
        self.waits += 1


class Coalesced:
    """torch's coalescing manager."""

    def __init__(self, work: Work) -> None:
        self.works = [work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def exchange() -> Exchange:
    marks: Any = CudaMarks()
    return Exchange(Activity.REDUCE, Bucket(stage=0, index=0, num_bytes=8), marks)


@pytest.mark.parametrize("handle_of", [lambda work: work, Coalesced], ids=["work", "coalesced"])
def test_a_record_on_cuda_ends_with_the_collective(handle_of: Any) -> None:
    work, record = Work(), exchange()
    handle = ended(record, handle_of(work))
    assert record.end is None
    work.complete()
    assert record.end is not None
    handle.wait()
    assert work.waits == 1


def test_a_reduce_scatter_accumulated_in_fp32_ends_when_it_has_been_waited_for() -> None:
    work, record, shard = Work(), exchange(), torch.zeros(2)
    received = torch.tensor([1.0, 2.0, 10.0, 20.0])
    handle = ended(record, _ReduceScatterWithFP32AccumulationWorkHandle(work, received, shard, 2))
    work.complete()
    assert record.end is None, "the sum over ranks comes after the all-to-all"
    handle.wait()
    assert record.end is not None
    assert work.waits == 1
    assert torch.equal(shard, torch.tensor([11.0, 22.0]))


def test_a_layer_wise_all_gather_ends_when_it_has_been_waited_for() -> None:
    kind = getattr(param_and_grad_buffer, "_LayerwiseAllGatherHandle", None)
    if kind is None:
        pytest.skip("this megatron-core has no layer-wise all-gathers")
    works, record = [Work(), Work()], exchange()
    handle = ended(record, kind(works))
    assert record.end is None
    handle.wait()
    assert record.end is not None
    assert [work.waits for work in works] == [0, 1]
