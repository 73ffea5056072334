"""The number of tokens with post-validation: no rank waits for one that is still in its passes.

That losses and weights are those of megatron-core's broadcast is in `tests/optimizer/test_post_validation.py`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zerobubble.mcore.post_validation.optimizer import post_validation
from megatron.zerobubble.mcore.post_validation.token_count import TokenCount
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.runtime.watch import Watch
from tests.optimizer.support import BASE
from tests.support.gpt import Case, Trainer, _destroy_groups
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Precision and the optimizer",
    "post-validation with `--calculate-per-token-loss`: the first rank steps while the last is in its passes, ZB-H2 and ZBV",
    "works, bit for bit; **not run on a GPU**",
)

PATIENCE = timedelta(seconds=30)
"""How long a rank is waited for before the test fails."""


def _first_rank_steps_first(rank: int, case: Case) -> list[str | None]:
    """The slowest rank ends its passes only once the fastest has taken its optimizer step: a barrier between them would hang.

    Returns what this rank reported while it waited for the number.
    """
    store = dist.distributed_c10d._get_default_store()
    trainer = Trainer(case)
    schedule = trainer.schedule
    post = post_validation(trainer.optimizer, optimistic=True, on_host=trainer.host.on_host)

    def before_gradients() -> bool:
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

    schedule.hooks.observe = wait
    watch = schedule.hooks.watch = Watch(torch.device("cpu"))
    total, reported = TokenCount.total, []

    def seen(counts: TokenCount) -> int:
        reported.append(watch.text())
        return total(counts)

    for iteration in range(2):
        with mock.patch.object(TokenCount, "total", seen):
            trainer.forward_backward(iteration)
        post.step()
        if pipeline_rank == 0:
            store.set(f"{case} {iteration} {parallel_state.get_data_parallel_rank()}", "stepped")
    post.flush()
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
    _destroy_groups()
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
