"""Post-validation of megatron-core's optimizer: what it rejects, what a rewind restores, and the number of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from megatron.zerobubble.mcore.post_validation.optimizer import post_validation
from megatron.zerobubble.mcore.post_validation.token_count import TokenCount
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.runtime.watch import Watch
from tests.optimizer.support import BASE
from tests.support.after_each_op import after_each_op
from tests.support.gpt import Case, Trainer
from tests.support.process_groups import destroy_groups
from tests.support.ranks import RankPool

with quiet_third_parties():
    from megatron.zerobubble.mcore.compat import router_loss_entries, router_loss_sums
    from megatron.zerobubble.mcore.post_validation.optimizer import MegatronRollbackOptimizer
    from megatron.zerobubble.mcore.post_validation.rewind import Habits, Replayed, Rewind

pytestmark = pytest.mark.claims(
    "Precision and the optimizer",
    "post-validation with `--calculate-per-token-loss`: the first rank steps while the last is in its passes, ZB-H2 and ZBV",
    "works, bit for bit; **not run on a GPU**",
)


def _split(parameter: torch.Tensor, **options: Any) -> None:
    optimizer = SimpleNamespace(config=SimpleNamespace(**options), get_parameters=lambda: [parameter])
    MegatronRollbackOptimizer(optimizer, snapshot_on_host=False)


@pytest.mark.parametrize(
    "options",
    [{"use_precision_aware_optimizer": True}, {"optimizer_cpu_offload": True}, {"grad_norm_skip_threshold": 10.0}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_stock_step_are_rejected_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} works with the stock schedule only"):
        _split(torch.nn.Parameter(torch.zeros(1)), **options)


def test_parameters_with_a_norm_of_their_own_are_rejected() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(1))
    parameter.grad_norm_group = "mtp"
    with pytest.raises(ConfigError, match="mtp_detach_heads clips MTP layers by a norm of their own"):
        _split(parameter, grad_norm_skip_threshold=math.inf)


@pytest.fixture
def _no_router_losses() -> Iterator[None]:
    """megatron-core's sums of router losses, empty before and afterwards."""
    with HostDevice():
        router_loss_entries().clear()
        yield
        router_loss_entries().clear()


def record(name: str, loss: float, *, layer_number: int) -> None:
    """As a router does in its forward pass, with two layers."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker as tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

        save_to_aux_losses_tracker(name, torch.tensor(loss), layer_number, 2)
    else:
        tracker().record(name, torch.tensor(loss), layer_number, 2)


@pytest.mark.usefixtures("_no_router_losses")
def test_everything_is_restored() -> None:
    chunk = torch.nn.BatchNorm1d(2)
    chunk.fp8_meta = {"scaling_fwd": SimpleNamespace(scale=torch.ones(2), amax_history=torch.zeros(1, 2))}  # type: ignore[assignment]
    history = chunk.fp8_meta["scaling_fwd"].amax_history  # type: ignore[union-attr,operator,index]
    iterator = Replayed(iter(range(5)), Habits())
    record("known", 2.0, layer_number=1)
    rewind = Rewind([iterator, None], [chunk])

    def forwards() -> tuple[list[int], float]:
        taken = [next(iterator), next(iterator)]
        drawn = torch.rand(4, 2)
        chunk(drawn)
        history[0, 0] = float("nan")  # of an input, after a step that went wrong
        record("known", 5.0, layer_number=1)
        record("new", 7.0, layer_number=2)
        return taken, float(drawn.sum())

    first = forwards()
    written = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    rewind.before_step()
    history[0, 1] = 3.0  # of a weight in FP8, from the step that is done again
    rewind.rewind()
    assert history.tolist() == [[0.0, 3.0]]
    assert int(chunk.num_batches_tracked) == 0
    assert router_loss_sums()["known"].tolist() == [2.0, 0.0]
    assert router_loss_sums()["new"].tolist() == [0.0, 0.0]
    assert forwards() == first
    assert all(torch.equal(buffer, written[name]) for name, buffer in chunk.named_buffers())
    assert router_loss_sums()["known"].tolist() == [7.0, 0.0]
    assert router_loss_sums()["new"].tolist() == [0.0, 7.0]
    assert next(iterator) == 2


PATIENCE = timedelta(seconds=30)
"""How long a rank is waited for before the test fails."""


def _first_rank_steps_first(rank: int, case: Case) -> list[str | None]:
    """The slowest rank ends its passes only once the fastest has taken its optimizer step: a barrier between them would hang.

    Returns what this rank reported while it waited for the number.
    """
    store = dist.distributed_c10d._get_default_store()
    trainer = Trainer(case)
    schedule = trainer.schedule
    post = post_validation(trainer.optimizer, optimistic=True)

    def before_gradients() -> bool:
        with trainer.host.on_host():
            verdict = post.validate()
        trainer.zero_gradients()
        return verdict is not None and verdict.is_redone

    schedule.hooks.before_gradients = before_gradients
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    slowest = case.num_ranks - 1
    last_op = schedule.plan(case.num_microbatches).ops[slowest][-1]
    assert last_op.kind is OpKind.W, "nobody waits for it"

    def wait(_: Any, op: Any) -> None:
        if pipeline_rank == slowest and op == last_op:
            store.wait([f"{case} {iteration} {replica}" for replica in range(4 // case.num_ranks)], PATIENCE)

    after_each_op(schedule, wait)
    watch = schedule.hooks.watch = Watch(torch.device("cpu"))
    total, reported = TokenCount.total, []

    def seen(counts: TokenCount) -> int:
        doing = watch.last()
        reported.append(doing and doing.text)
        return total(counts)

    for iteration in range(2):
        with mock.patch.object(TokenCount, "total", seen):
            trainer.forward_backward(iteration)
        with trainer.host.on_host():
            post.step()
        if pipeline_rank == 0:
            store.set(f"{case} {iteration} {parallel_state.get_data_parallel_rank()}", "stepped")
    with trainer.host.on_host():
        post.validate()
    post.close()
    trainer.close()
    return reported


@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, schedule="zb-h2", per_token_loss=True),
        Case("zb-h2", 4, 8, per_token_loss=True),
        replace(BASE, schedule="zbv", num_chunks=2, per_token_loss=True),
    ],
    ids=str,
)
def test_the_first_rank_steps_while_the_last_is_in_its_passes(four_ranks: RankPool, case: Case) -> None:
    reported = four_ranks.run(_first_rank_steps_first, case)
    assert reported == [["waits for the number of tokens of the global batch"] * 2] * 4


def _sent(rank: int) -> list[int]:
    """Two pipelines of two ranks, whose replicas count 3 + r and 10 + r tokens in iteration r."""
    destroy_groups()
    pipeline, replicas = ([0, 2], [1, 3])[rank % 2], ([0, 1], [2, 3])[rank // 2]
    counts = TokenCount(pipeline=pipeline, replicas=replicas, rank=rank // 2, source=1, device=torch.device("cpu"))
    found = []
    for iteration in range(3):
        if rank // 2 == 1:
            count = torch.tensor((3, 10)[rank % 2] + iteration, dtype=torch.int)
            counts.send(count)
            count.zero_()  # what is sent is a copy
        found.append(counts.total())
    counts.close()
    return found


def test_every_rank_gets_the_sum_over_replicas(four_ranks: RankPool) -> None:
    assert four_ranks.run(_sent) == [[13, 15, 17]] * 4
