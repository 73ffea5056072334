"""Models that DistributedDataParallel did not wrap, such as reference models, run forward-only under any schedule."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.zerobubble.errors import ConfigError
from tests.support import bridge
from tests.support.ranks import RankPool

TWO = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32"
CHUNKS = f"{TWO} --virtual-pipeline-model-parallel-size 2"


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: models that DDP did not wrap, forward-only, between training steps of another one: ZB-H1, ZB-H2, "
    "interleaved ZB, ZBV, V-Half, ZB-W; other sizes, bf16, groups in the call, `collect_non_loss_data`",
    "works, bit for bit",
)
@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        (TWO, "zb-h1"),
        (f"{TWO} --bf16", "zb-h2"),
        (CHUNKS, "zb-interleaved"),
        (CHUNKS, "zbv"),
        (f"{CHUNKS} --bf16 --tie-embeddings-and-output-weights", "v-half"),
        (f"{TWO} --num-layers 8 --virtual-pipeline-model-parallel-size 4 --tie-embeddings-and-output-weights", "zb-w"),
    ],
)
@pytest.mark.sampled(0.4)
def test_a_model_without_ddp_has_the_losses_of_megatron_cores_schedule(four_ranks: RankPool, flags: str, schedule: str) -> None:
    """Bit for bit, between training steps of another model whose losses do not change either."""
    expected, actual = (four_ranks.run(_train_with_reference, flags, name) for name in (None, schedule))
    assert actual == expected
    assert [bool(each["losses"]) for each in expected] == [False, False, True, True]


def _train_with_reference(rank: int, flags: str, schedule: str | None) -> dict[str, Any]:
    """Losses of a trained model and of wider ones without DDP: as a loop calls them, with the groups, and for other data."""
    with bridge.installed(flags, schedule) as (loop, args):
        model = loop.build_model(args, loop.transformer_config(args))
        config = get_model_config(model[0])
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=args.lr, bf16=args.bf16), model)
        config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
        wider = argparse.Namespace(**vars(args) | {"hidden_size": 48})
        reference, reward = (_bare(loop, each) for each in (wider, wider))
        groups = ProcessGroupCollection.use_mpu_process_groups()
        given = {
            "p2p_communicator": P2PCommunicator(pp_group=groups.pp, config=get_model_config(reward[0])),
            "pg_collection": groups,
        }
        found: dict[str, Any] = {"losses": [], "reference": [], "reward": [], "outputs": []}
        for iteration in range(2):
            with torch.no_grad():
                found["reference"] += _call(loop, args, reference, forward_only=True)
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            found["losses"] += _call(loop, args, model)
            optimizer.step()
            found["reward"] += _call(loop, args, reward, forward_only=True, first_val_step=iteration == 0, **given)
            found["outputs"] += _call(
                loop, args, reference, forward_only=True, collect_non_loss_data=True, num_microbatches=2 * iteration + 2
            )
        return found


def _bare(loop: ModuleType, args: argparse.Namespace) -> list[Any]:
    """The example's chunks without DDP; in bf16 they are Float16Modules."""
    with mock.patch.object(loop, "DistributedDataParallel", lambda *, module, **_: module):
        chunks: list[Any] = loop.build_model(args, loop.transformer_config(args))
    return chunks


def _call(loop: ModuleType, args: argparse.Namespace, model: list[Any], **more: Any) -> list[list[float]]:
    """What one call of the schedule returned for each microbatch, on the rank that reads it."""
    collects = more.get("collect_non_loss_data", False)
    iterators = [loop.batches(args) for _ in model]

    def forward_step(data: Any, chunk: Any) -> Any:
        output, loss_function = loop.forward_step(args, data, chunk)
        return output, (lambda losses, non_loss_data: {"lm loss": losses.detach()}) if collects else loss_function

    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=model if len(model) > 1 else model[0],
        **{"num_microbatches": args.num_microbatches, "forward_only": False} | more,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return [each["lm loss"].flatten().tolist() for each in results] if is_last else []


def _rejected(rank: int, flags: str, schedule: str) -> str:
    with bridge.installed(flags, schedule) as (loop, args), pytest.raises(ConfigError) as caught:
        _call(loop, args, _bare(loop, args))
    return str(caught.value)


@pytest.mark.claims("Your own script", "in a loop of your own: training a model that DDP did not wrap", "rejected")
@pytest.mark.parametrize(("flags", "schedule"), [(TWO, "zb-h1"), (CHUNKS, "zbv")])
def test_training_a_model_without_ddp_is_refused(four_ranks: RankPool, flags: str, schedule: str) -> None:
    for message in four_ranks.run(_rejected, flags, schedule):
        assert f"schedule {schedule} cannot train a GPTModel that" in message
        assert "forward_only=True" in message


def _built_before_install(rank: int, schedule: str) -> Any:
    """The losses of a model that DDP wrapped before `install`, and of the same model without anything installed."""
    import megatron.zerobubble

    with bridge.installed(TWO, None) as (loop, args):
        model = loop.build_model(args, loop.transformer_config(args))
        expected = _call(loop, args, model, forward_only=True)
        megatron.zerobubble.install(schedule=schedule)
        return expected, _call(loop, args, model, forward_only=True)


def test_a_model_wrapped_before_install_runs_forward_only(four_ranks: RankPool) -> None:
    for expected, actual in four_ranks.run(_built_before_install, "zb-h1"):
        assert actual == expected


def _v_refusals(rank: int) -> dict[str, str]:
    messages = {}
    with bridge.installed(CHUNKS, "zbv") as (loop, args):
        chunks = _bare(loop, args)
        unknown = torch.nn.Linear(1, 1)
        unknown.config, unknown.set_input_tensor = get_model_config(chunks[0]), print
        for name, model in {"one chunk": chunks[:1], "exchanged": chunks[::-1], "unknown": [unknown] * 2}.items():
            with pytest.raises(ConfigError) as caught:
                _call(loop, args, model, forward_only=True)
            messages[name] = str(caught.value)
    return messages


def test_a_v_refuses_a_model_of_other_chunks(four_ranks: RankPool) -> None:
    for messages in four_ranks.run(_v_refusals):
        assert "takes a model of 2 chunk(s), got 1" in messages["one chunk"]
        assert "in the order of their vp_stage" in messages["exchanged"]
        assert "was given a Linear without vp_stage" in messages["unknown"]


def _tied(rank: int) -> bool:
    """Whether embedding and output layer of a V without DDP are the same; True where a rank does not have them."""
    with bridge.installed(f"{CHUNKS} --tie-embeddings-and-output-weights", "zbv") as (loop, args):
        with mock.patch.object(loop, "initialize_weights"):
            chunks = _bare(loop, args)
        _call(loop, args, chunks, forward_only=True)
        if not chunks[0].pre_process:
            return True
        return torch.equal(chunks[0].shared_embedding_or_output_weight(), chunks[1].shared_embedding_or_output_weight())


def test_tied_weights_of_a_v_without_ddp_are_equal(four_ranks: RankPool) -> None:
    assert four_ranks.run(_tied) == [True] * 4
