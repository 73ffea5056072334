"""Models that DistributedDataParallel did not wrap, such as reference models, run forward-only under any schedule."""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

import megatron.zerobubble
from megatron.zerobubble.errors import ConfigError
from tests.support.loops import Loop, with_loss
from tests.support.ranks import RankPool
from tests.support.stock import example, installed

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
    assert [bool(each["trained"]) for each in expected] == [False, False, True, True]


def _train_with_reference(rank: int, flags: str, schedule: str | None) -> dict[str, Any]:
    """Losses of a trained model and of wider ones without DDP: as a loop calls them, with the groups, and for other data."""
    with installed(flags, schedule) as args:
        trained = Loop(args)
        wider = argparse.Namespace(**vars(args) | {"hidden_size": 48})
        groups = ProcessGroupCollection.use_mpu_process_groups()
        reference, reward = Loop(wider, has_ddp=False), Loop(wider, has_ddp=False, groups=groups)
        for iteration in range(2):
            with torch.no_grad():
                reference.passes(forward_only=True)
            trained.train()
            reward.passes(forward_only=True, first_val_step=iteration == 0)
            reference.passes(
                2 * iteration + 2,
                forward_step_func=with_loss(lambda losses, non_loss_data: {"lm loss": losses.detach()}),
                forward_only=True,
                collect_non_loss_data=True,
            )
        return plain_lists({"trained": trained.seen, "reference": reference.seen, "reward": reward.seen})


def plain_lists(value: Any) -> Any:
    """With lists of numbers in place of arrays, to be compared."""
    if isinstance(value, dict):
        return {name: plain_lists(each) for name, each in value.items()}
    return [plain_lists(each) for each in value] if isinstance(value, list) else value.tolist()


def _rejected(rank: int, flags: str, schedule: str) -> str:
    with installed(flags, schedule) as args, pytest.raises(ConfigError) as caught:
        Loop(args, has_ddp=False).passes()
    return str(caught.value)


@pytest.mark.claims("Your own script", "in a loop of your own: training a model that DDP did not wrap", "rejected")
@pytest.mark.parametrize(("flags", "schedule"), [(TWO, "zb-h1"), (CHUNKS, "zbv")])
def test_training_a_model_without_ddp_is_refused(four_ranks: RankPool, flags: str, schedule: str) -> None:
    for message in four_ranks.run(_rejected, flags, schedule):
        assert f"schedule {schedule} cannot train a GPTModel that" in message
        assert "forward_only=True" in message


def _built_before_install(rank: int, schedule: str) -> Any:
    """The losses of a model that DDP wrapped before `install`, and of the same model without anything installed."""
    with installed(TWO) as args:
        loop = Loop(args)
        loop.passes(forward_only=True)
        loop.restart_data()
        megatron.zerobubble.install(schedule=schedule)
        loop.passes(forward_only=True)
        return plain_lists(loop.seen)


def test_a_model_wrapped_before_install_runs_forward_only(four_ranks: RankPool) -> None:
    *_, (expected, actual) = four_ranks.run(_built_before_install, "zb-h1")
    assert actual == expected


def _v_refusals(rank: int) -> dict[str, str]:
    messages = {}
    with installed(CHUNKS, "zbv") as args:
        loop = Loop(args, has_ddp=False)
        unknown = torch.nn.Linear(1, 1)
        unknown.config, unknown.set_input_tensor = loop.config, print
        for name, model in {"one chunk": loop.model[:1], "exchanged": loop.model[::-1], "unknown": [unknown] * 2}.items():
            with pytest.raises(ConfigError) as caught:
                loop.passes(model=model, data_iterator=loop.one_or_list(loop.data[: len(model)]), forward_only=True)
            messages[name] = str(caught.value)
    return messages


def test_a_v_refuses_a_model_of_other_chunks(four_ranks: RankPool) -> None:
    for messages in four_ranks.run(_v_refusals):
        assert "takes a model of 2 chunk(s), got 1" in messages["one chunk"]
        assert "in the order of their vp_stage" in messages["exchanged"]
        assert "was given a Linear without vp_stage" in messages["unknown"]


def _tied(rank: int) -> bool:
    """Whether embedding and output layer of a V without DDP are the same; True where a rank does not have them."""
    with installed(f"{CHUNKS} --tie-embeddings-and-output-weights", "zbv") as args:
        with mock.patch.object(example(), "initialize_weights"):
            loop = Loop(args, has_ddp=False)
        loop.passes(forward_only=True)
        if not loop.model[0].pre_process:
            return True
        return torch.equal(*(chunk.shared_embedding_or_output_weight() for chunk in loop.model))


def test_tied_weights_of_a_v_without_ddp_are_equal(four_ranks: RankPool) -> None:
    assert four_ranks.run(_tied) == [True] * 4
