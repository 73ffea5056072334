"""Flags of the gradient reduction, and those that gradient sharding excludes."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.training.initialize import choose_device
from megatron.zerobubble.training.models.mcore_config import ddp_config
from tests.training.test_arguments import settings

P2 = "--pipeline-model-parallel-size 2 --global-batch-size 8 "
SHARD = P2 + "--zero-bubble-v-schedule --use-distributed-optimizer --untie-embeddings-and-output-weights "
SHARD_2 = SHARD + "--zero-bubble-shard-gradients 2 "
STOCK_2 = P2 + "--use-distributed-optimizer --zero-bubble-shard-gradients 2"


def test_they_reach_megatron_core_and_the_schedule() -> None:
    made = settings(SHARD_2 + "--ddp-bucket-size 1000 --ddp-average-in-collective")
    assert made.schedule_spec.shard_gradients == 2
    config = ddp_config(made)
    assert (config.bucket_size, config.average_in_collective, config.grad_reduce_in_fp32) == (1000, True, False)
    assert not ddp_config(settings("--bf16 --grad-reduce-in-bf16")).grad_reduce_in_fp32
    assert ddp_config(settings("--bf16")).grad_reduce_in_fp32
    assert ddp_config(settings("--accumulate-allreduce-grads-in-fp32")).grad_reduce_in_fp32
    assert settings(SHARD).schedule_spec.shard_gradients is None


@pytest.mark.claims(
    "Parallelism",
    "`--zero-bubble-shard-gradients` with tied embeddings, sequence parallelism, experts, Transformer Engine; more than one "
    "distributed-optimizer instance",
    "rejected",
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (SHARD + "--zero-bubble-shard-gradients 0", "--zero-bubble-shard-gradients 0 must be greater than 0"),
        (STOCK_2, "needs a schedule of this package.* not stock: add"),
        (STOCK_2 + " --zero-bubble-schedule auto", "needs a schedule of this package.* not auto: add"),
        (SHARD_2 + "--zero-bubble-memory-limit 1", "--zero-bubble-memory-limit has no headroom .*, or give groups of 1"),
        (SHARD_2.replace("--use-distributed-optimizer ", ""), "gradients 2 needs --use-distributed-optimizer"),
        (SHARD_2.replace("--untie-embeddings-and-output-weights ", ""), "gradients 2 needs --untie-embeddings"),
        (SHARD_2 + "--pipeline-model-parallel-size 4", "shards over data-parallel ranks, and there is 1"),
        ("--ddp-bucket-size 1000", "--ddp-bucket-size needs --overlap-grad-reduce"),
        ("--ddp-average-in-collective --calculate-per-token-loss", "averages over ranks and .* over tokens; leave one"),
    ],
)
def test_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(flags)


@pytest.mark.claims("Parallelism", "`--ddp-average-in-collective`", "NCCL only, not tried; rejected on gloo")
def test_gloo_cannot_average() -> None:
    made = settings("--ddp-average-in-collective --distributed-backend gloo")
    with pytest.raises(ConfigError, match="gloo sums and cannot average; leave it out"):
        choose_device(made, Launch(rank=0, local_rank=0, ranks_on_host=4, world_size=4, has_threads_set=True))
