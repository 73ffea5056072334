"""Gradients reduced in buckets, their checkpoints, and process groups in a call that are not those of the loop."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.stock_loop.adoption import stores_by_parameter
from megatron.zerobubble.optimizer.parts import parts_of
from tests.support.loops import SIZES, Loop
from tests.support.ranks import RankPool
from tests.support.stock import example, installed

CHUNKS = {None: "", "zb-h1": "", "zbv": "--virtual-pipeline-model-parallel-size 2"}


class _Strategy(TorchDistSaveShardedStrategy):
    """megatron-core's format, written in this process: a rank of a pool must not fork writers."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's part of the state."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        save(mcore_to_pyt_state_dict(state, False), storage_writer=FileSystemWriter(checkpoint_dir), planner=planner)


def _train(rank: int, schedule: str | None, flags: str, folder: str | None = None, **options: Any) -> dict[str, Any]:
    """Three iterations; with a folder, save to it after the second one, or instead of stepping load what was saved there.

    Returns:
        Per chunk the number of buckets, and the losses, gradients and weights after the third iteration.
    """
    flags = f"{SIZES} {CHUNKS[schedule]} --overlap-grad-reduce {flags}"
    small = functools.partial(DistributedDataParallelConfig, bucket_size=2000)
    loads = folder is not None and any(Path(folder).iterdir())
    given = None if schedule is None else {"schedule": schedule, **options}
    with mock.patch.object(example(), "DistributedDataParallelConfig", small), installed(flags, given) as args:
        loop = Loop(args)
        loop.overlap_reductions(is_aligned=False)
        for _ in range(2):
            loop.zero()
            loop.passes()
            if not loads:
                loop.optimizer.step()
        if folder is not None:
            _checkpoint(loop, folder, saves=not loads)
        loop.train()
        buckets = [len(chunk.bucket_groups) for chunk in loop.model]
        return {"buckets": buckets, "losses": loop.seen[-1:], **loop.state()}


@torch.no_grad()
def _checkpoint(loop: Loop, folder: str, *, saves: bool) -> None:
    state: dict[str, Any] = {f"model{number}": chunk.module.sharded_state_dict() for number, chunk in enumerate(loop.model)}
    if not saves:
        _allocate(loop.optimizer)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    state["optimizer"] = loop.optimizer.sharded_state_dict(dict(state), is_loading=not saves, metadata=metadata)
    if saves:
        dist_checkpointing.save(state, folder, _Strategy("torch_dist", 1))
        return
    loaded = dist_checkpointing.load(state, folder)
    for number, chunk in enumerate(loop.model):
        chunk.module.load_state_dict(loaded[f"model{number}"])
    loop.optimizer.load_state_dict(loaded["optimizer"])
    for part in parts_of(loop.optimizer):
        for values in part.optimizer.state.values():
            values["step"] = values["step"].clone()  # megatron-core loads one tensor for all


def _allocate(optimizer: Any) -> None:
    """Allocate the state of torch's Adam, of which megatron-core 0.16.1 reads one step count per parameter when it loads."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        for master in (each for group in inner.param_groups for each in group["params"]):
            zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            inner.state[master] = {"step": torch.zeros(()), **zeros}
        part.init_state_fn = lambda *_: None
        part._set_main_param_and_optimizer_states = functools.partial(_copy_states, part)


def _copy_states(part: Any, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    for name, target in part._get_main_param_and_optimizer_states(parameter).items():
        if name in tensors and name != "step":
            target.copy_(tensors[name])


def _agree(results: list[dict[str, Any]], others: list[dict[str, Any]], *, what: str = "") -> bool:
    """Whether losses, and everything whose name ends with `what`, are the same. Each pipeline rank has others."""
    one, other = ({name: value for result in each for name, value in result.items()} for each in (results, others))
    losses = [[repr(result["losses"]) for result in each] for each in (results, others)]
    assert one.keys() == other.keys()
    return losses[0] == losses[1] and all(
        (one[name] == other[name]).all() for name in one.keys() - {"buckets", "losses"} if name.endswith(what)
    )


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own, 2 data-parallel replicas, overlapped reduction: buckets in every chunk of ZB-H1 and ZBV, and a "
    "checkpoint of the distributed optimizer by parameter, saved with them and loaded without and the other way round",
    "works, bit for bit",
)
@pytest.mark.parametrize("saves_with", [True, False], ids=["saved-with", "saved-without"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
@pytest.mark.sampled(0.5)
def test_a_checkpoint_by_parameter_goes_from_buckets_to_none_and_back(
    four_ranks: RankPool, tmp_path: Path, schedule: str, saves_with: bool
) -> None:
    """megatron-core itself saves wrong numbers behind the padding of its buckets: a width of 128 leaves none."""
    flags = f"--use-distributed-optimizer --hidden-size {16 if saves_with else 128}"
    saved, loaded = (
        four_ranks.run(functools.partial(_train, checkpoints_by_parameter=given), schedule, flags, str(tmp_path))
        for given in (saves_with, not saves_with)
    )
    assert _agree(saved, loaded, what="weight")
    in_buckets, not_in_buckets = (saved, loaded) if saves_with else (loaded, saved)
    assert min(number for result in in_buckets for number in result["buckets"]) > 1
    later = [result["buckets"] for result in not_in_buckets[2:]]  # ranks 0 and 1 are the first pipeline rank
    assert later == [[1] * len(numbers) for numbers in later]


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_a_plain_optimizer_always_gets_buckets(four_ranks: RankPool, schedule: str) -> None:
    """Two replicas: a sum of two gradients does not depend on their order."""
    stock, ours = (four_ranks.run(_train, name, "") for name in (None, schedule))
    assert [result["buckets"] for result in stock[2:]] == [[1], [1]]
    assert min(number for result in ours for number in result["buckets"]) > 1
    assert _agree(stock, ours)


def test_megatron_lms_flags_say_how_it_stores_state(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"save": None, "load": None, "ckpt_format": "torch_dist", "dist_ckpt_optim_fully_reshardable": False}

    def stores(**changed: Any) -> bool:
        loop = SimpleNamespace(get_args=lambda: SimpleNamespace(**(flags | changed)))
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", loop)
        return stores_by_parameter()

    assert stores()
    assert not stores(save="there")
    assert not stores(load="there")
    assert stores(save="there", dist_ckpt_optim_fully_reshardable=True)
    assert not stores(save="there", dist_ckpt_optim_fully_reshardable=True, ckpt_format="torch")
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars")
    assert not stores_by_parameter()


TWO = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --train-iters 3"


def _misuse(rank: int, flags: str, schedule: str) -> list[str]:
    """The messages of calls whose groups or communicator are not the ones of `parallel_state`."""

    class OtherCommunicator(P2PCommunicator):
        pass

    with installed(flags, schedule) as args:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        others = ProcessGroupCollection.use_mpu_process_groups()
        others.dp = groups.pp
        loop = Loop(args)
        messages = []
        for wrong in (
            {"pg_collection": others},
            {"pg_collection": object()},
            {"p2p_communicator": P2PCommunicator(pp_group=groups.dp, config=loop.config)},
            {"p2p_communicator": OtherCommunicator(pp_group=groups.pp, config=loop.config)},
            {"adjust_tensor_shapes_fn": len},
        ):
            try:
                loop.passes(**wrong)
            except ConfigError as error:
                messages.append(str(error))
        return messages


def test_other_groups_or_another_communicator_are_named_in_the_error(four_ranks: RankPool) -> None:
    for dp, object_, pp, other, shapes in four_ranks.run(_misuse, TWO, "zb-h1"):  # all ranks end with the line of rank 0
        data, pipeline = [0, 1], [0, 2]
        assert f"pg_collection.dp has the ranks {pipeline}, in parallel_state they are {data}" in dp
        assert "pg_collection is a object" in object_
        assert f"p2p_communicator.pp_group has the ranks {data}, in parallel_state they are {pipeline}" in pp
        assert "OtherCommunicator: schedule 'zb-h1' has links of its own" in other
        assert "adjust_tensor_shapes_fn is not supported" in shapes
