"""Gradients that stay sharded while the pipeline accumulates them: the same training as ZeRO-1, in less memory.

The reference is the same schedule with the same buckets and ZeRO-1. With one group of all microbatches the sums are taken in the
same order, and every bit is the same. With smaller groups a group is summed over the data-parallel ranks before the next one is
added to it, where ZeRO-1 adds all microbatches first: the sums differ by rounding, and so do the weights, by 4e-6 in fp32.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zerobubble.mcore.ddp import wrap, zero2
from megatron.zerobubble.mcore.ddp.zero2 import Reductions, ShardedGradientsDDP
from megatron.zerobubble.mcore.state_memory import state_bytes
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.registry import known_schedules
from megatron.zerobubble.plan.timeline import Activity
from tests.optimizer.support import BASE, Scenario
from tests.optimizer.support import compare as compare_optimistic
from tests.support.comparisons import record, refusal
from tests.support.fake_nccl.communicators import Communicator
from tests.support.fake_nccl.engine import FakeNcclError
from tests.support.fake_nccl.megatron import run_megatron
from tests.support.fake_nccl.tracing import TracedOps
from tests.support.gpt import Case, Outcome, Trainer
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER

pytestmark = pytest.mark.claims(
    "Parallelism",
    "`--zero-bubble-shard-gradients K`: ZeRO-2 in the pipeline",
    "works: one group bit for bit ZeRO-1, smaller ones 4e-6",
)


ZERO1 = Case(
    "zb-h2", 2, 5, distributed_optimizer=True, overlap_grad_reduce=True, different_data=True, adam_eps=1.0, clip_grad=0.5
)
ZERO1_V = replace(ZERO1, schedule="zbv", num_chunks=2, overlap_param_gather=True)

CASES = (
    # ZeRO-1, group size, tolerance relative to a weight's largest entry
    (ZERO1, 5, 0.0),
    (ZERO1, 1, OTHER_ORDER),
    (ZERO1_V, 8, 0.0),
    (ZERO1_V, 2, OTHER_ORDER),
    (replace(ZERO1, schedule="1f1b", per_token_loss=True), 3, OTHER_ORDER),
    (replace(ZERO1, tensor_parallel=2, different_data=False), 5, 0.0),
    (replace(ZERO1_V, dtype=torch.bfloat16), 5, 0.0),
    (replace(ZERO1, dtype=torch.float16), 5, 0.0),
)


def _train(case: Case) -> Outcome:
    trainer = Trainer(case)
    outcome = trainer.train()
    trainer.close()
    return outcome


def _apart(rank: int, case: Case, group_size: int) -> tuple[float, list[float], list[float]]:
    """How far weights are from ZeRO-1's, relative to a tensor's largest entry, and the gradient norms of both."""
    expected, actual = _train(case), _train(replace(case, shard_gradients=group_size))
    assert actual.losses[0] == expected.losses[0]
    apart = [
        float((actual.weights[name] - weight).abs().max() / (weight.abs().max() or 1.0))
        for name, weight in expected.weights.items()
    ]
    return max(apart), expected.grad_norms, actual.grad_norms


@pytest.mark.parametrize(("case", "group_size", "tolerance"), CASES, ids=str)
@pytest.mark.sampled(0.25)
def test_the_same_training_as_zero1(four_ranks: RankPool, case: Case, group_size: int, tolerance: float) -> None:
    for rank, (apart, expected, actual) in enumerate(four_ranks.run(_apart, case, group_size)):
        assert apart <= tolerance, rank
        assert actual == (expected if tolerance == 0.0 else pytest.approx(expected, rel=1e-5)), rank
        assert min(expected) > 0.0


class _ReadTwice(Trainer):
    """The loss reads weights of the last stage, and a user's hook masks the gradient of its head."""

    def forward_step(self, iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        output, loss = super().forward_step(iterator, model)
        weights = dict(self.parameters())
        head = weights.get("output_layer.weight")
        if head is not None and not head._backward_hooks:
            head.register_hook(lambda gradient: gradient.tril())

        def penalized(per_token: torch.Tensor) -> tuple[Any, ...]:
            value, *others = loss(per_token)
            read = [head, *(weight for name, weight in weights.items() if name.endswith("linear_fc2.weight"))]
            return value + 0.1 * sum(weight.square().sum() for weight in read if weight is not None), *others

        return output, penalized


def _apart_where_read(rank: int, case: Case, group_size: int) -> tuple[float, list[float], list[float]]:
    outcomes = []
    for each in (case, replace(case, shard_gradients=group_size)):
        trainer = _ReadTwice(each)
        outcomes.append(trainer.train())
        trainer.close()
    expected, actual = outcomes
    apart = max(float((actual.weights[name] - weight).abs().max()) for name, weight in expected.weights.items())
    return apart, expected.grad_norms, actual.grad_norms


@pytest.mark.parametrize("group_size", [5, 2])
def test_gradients_of_other_readers_and_hooks_reach_the_shards(four_ranks: RankPool, group_size: int) -> None:
    """The last stage is that of one layer, with its head; weights of up to 1 that are summed in another order."""
    for apart, expected, actual in four_ranks.run(_apart_where_read, replace(ZERO1, schedule="zb-h1"), group_size):
        assert apart <= 1e-6
        assert actual == pytest.approx(expected, rel=1e-5)


class _Counted(Reductions):
    """Counts the bytes of full buckets that are reduced, and the most of them, with their parts, when a reduction starts."""

    reduced = peak = 0

    def started(self, reduction: Any) -> None:
        super().started(reduction)
        self.reduced += reduction.full.nbytes
        self.peak = max(self.peak, sum(each.full.nbytes + each.part.nbytes for each in self._in_flight))


def _measure(rank: int, case: Case) -> list[tuple[int, int, int, int]]:
    """Per chunk: bytes of ZeRO-1's buffer, persistent bytes, peak of full buckets, and bytes reduced per iteration."""
    with mock.patch.object(wrap, "Reductions", _Counted):
        trainer = Trainer(case)
    trainer.train()
    results = []
    for chunk in trainer.built.chunks:
        assert isinstance(chunk, ShardedGradientsDDP)
        assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in chunk.buffers)
        buffer_bytes = sum(buffer.grad_data.nbytes for buffer in chunk.buffers)
        weights_bytes = sum(buffer.param_data.nbytes for buffer in chunk.buffers)
        counted = chunk.reductions
        assert isinstance(counted, _Counted)
        persistent_bytes = state_bytes([chunk], None) - weights_bytes
        results.append((buffer_bytes, persistent_bytes, counted.peak, counted.reduced // trainer.case.num_steps))
    trainer.close()
    return results


@pytest.mark.parametrize(("group_size", "num_groups"), [(1, 5), (3, 2)])
def test_memory_is_that_of_the_shards_and_volume_is_per_group(four_ranks: RankPool, group_size: int, num_groups: int) -> None:
    """The largest bucket here is one weight of the MLP, 4096 elements, and a small gradient of B or two."""
    case = replace(ZERO1, shard_gradients=group_size, num_steps=2)
    for results in four_ranks.run(_measure, case):
        for buffer_bytes, persistent, temporary, reduced in results:
            full = 4 * 6 * 1024
            assert buffer_bytes / 2 <= persistent < 0.65 * buffer_bytes, "half of it is the shard; the gradients of B come on top"
            assert 0 < temporary <= 2.5 * full, "one bucket is filled, one and its part are in flight"
            assert (num_groups - 0.2) * buffer_bytes < reduced <= num_groups * buffer_bytes, "B's are reduced once"


def test_reductions_overlap_with_wgrad_gemms_of_other_weights(four_ranks: RankPool) -> None:
    """Every group's buckets are reduced inside that group's Ws, and a group's Ws share its time."""
    case = replace(ZERO1_V, shard_gradients=2, num_steps=2)
    timeline = four_ranks.run(record, case)[0]
    for rank, stages in zip(timeline.ranks, timeline.plan.placement.rank_to_stages, strict=True):
        for stage in stages:
            weights = [timed for timed in rank.ops if timed.op.stage == stage and timed.op.kind is OpKind.W]
            starts = [
                span.start_ms
                for span in rank.spans
                if span.activity is Activity.REDUCE and span.bucket and span.bucket.stage == stage
            ]
            for group in (weights[0:2], weights[2:4], weights[4:5]):
                inside = [start for start in starts if group[0].start_ms < start < group[-1].end_ms]
                assert len(inside) > 3
                assert len(group) == 1 or any(start < group[1].start_ms for start in inside), "the first W ran its share"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"distributed_optimizer": False, "overlap_param_gather": False}, "--use-distributed-optimizer"),
        ({"tied": True}, "--untie-embeddings-and-output-weights"),
    ],
)
def test_options_that_need_full_gradients_are_rejected(four_ranks: RankPool, changes: dict[str, Any], why: str) -> None:
    for message in four_ranks.run(refusal, replace(ZERO1_V, shard_gradients=2, **changes)):
        assert why in message


STEPS = 2
CHUNKS = {info.name: info.default_num_chunks for info in known_schedules()}
ZERO1_ON_FAKE_NCCL = Case(
    *("zb-h2", 2, 5),
    num_layers=4,
    distributed_optimizer=True,
    overlap_grad_reduce=True,
    different_data=True,
    adam_eps=1.0,
    clip_grad=0.5,
    num_steps=STEPS,
)


def train(rank: int, case: Case) -> Outcome:
    trainer = case.trainer()
    with TracedOps():
        outcome = trainer.train()
    trainer.close()
    return outcome


def _case_of(name: str) -> Case:
    return Case(name, 2, 4, num_chunks=CHUNKS[name], num_layers=max(4, 2 * CHUNKS[name]), num_steps=STEPS)


SHARDED = [replace(ZERO1_ON_FAKE_NCCL, shard_gradients=5), replace(ZERO1_V, shard_gradients=2)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("case", [*map(_case_of, CHUNKS), *SHARDED], ids=str)
@pytest.mark.sampled(0.06)
def test_every_schedule_trains_the_same_in_every_order(case: Case, seed: int) -> None:
    """Two pipeline ranks, and two replicas where gradients are sharded; the bits do not depend on what is late."""
    size = 2 * (1 + case.distributed_optimizer)
    first, second = (run_megatron(size, train, case, seed=3 * seed + lateness) for lateness in (1, 2))
    for ours, theirs in zip(first, second, strict=True):
        assert ours.losses == theirs.losses
        assert ours.grad_norms == theirs.grad_norms
        assert all(torch.equal(weight, theirs.weights[name]) for name, weight in ours.weights.items())


def test_nothing_is_connected_inside_passes() -> None:
    """Each collective's algorithm has been used before, at the size that passes have."""
    inside, connect = [], Communicator.connect

    def watched(self: Communicator, place: int, kind: str, tensors: Any) -> None:
        before = len(self._connected)
        connect(self, place, kind, tensors)
        if len(self._connected) > before and any(frame.filename.endswith("executor.py") for frame in inspect.stack(0)):
            inside.append((self.name, kind))

    with mock.patch.object(Communicator, "connect", watched):
        run_megatron(4, train, replace(ZERO1_ON_FAKE_NCCL, shard_gradients=2), seed=0)
    assert inside == []


def _add_without_waiting(self: Any) -> None:
    self.bucket.shard.add_(self.part)


def _keep_nothing(self: Any, bucket: Any, full: Any, part: Any, handle: Any) -> None:
    self.bucket, self.full, self.part, self.handle = bucket, torch.empty(0), torch.zeros_like(part), handle


@pytest.mark.parametrize(("name", "broken"), [("finish", _add_without_waiting), ("__init__", _keep_nothing)])
def test_a_reduction_that_breaks_a_rule_is_noticed(name: str, broken: Any) -> None:
    with mock.patch.object(zero2._Reduction, name, broken):
        for seed in range(3):
            with pytest.raises(FakeNcclError, match=r"reduce-scatter \d+ of communicator"):
                run_megatron(4, train, replace(ZERO1_ON_FAKE_NCCL, shard_gradients=2), seed=seed)


SCENARIO = Scenario("clipped", replace(BASE, dropout=0.0), spikes={(3, 0): 1e4, (4, 1): 1e5, (11, 1): 1e4}, redone=(3, 4, 11))


@pytest.mark.parametrize(
    "case",
    [
        SCENARIO.case,
        pytest.param(replace(BASE, schedule="zbv", num_chunks=2), marks=pytest.mark.slow),
        pytest.param(replace(BASE, distributed_optimizer=True, overlap_grad_reduce=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.sampled(0.33)
def test_optimistic_steps_of_megatron_cores_optimizer_equal_synchronous_ones(case: Case) -> None:
    """Twelve iterations, with rollbacks, through `mcore.post_validation`."""
    scenario = replace(SCENARIO, case=case)
    size = 4 if case.distributed_optimizer else 2
    for rank, (differences, redone, _, _) in enumerate(run_megatron(size, compare_optimistic, scenario, seed=1)):
        assert differences == [], rank
        assert tuple(redone) == scenario.redone, rank
