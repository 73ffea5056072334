"""Models beside the one that a schedule trains: without DDP they run forward-only; a pipeline of one rank, models beside the
pipeline and stages that a loop runs itself are left alone.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

import megatron.zerobubble
from megatron.zerobubble.errors import ConfigError
from tests.support.loops import Loop, with_loss
from tests.support.ranks import RankPool
from tests.support.stock import example, installed, train, warnings_of_package

pytestmark = pytest.mark.claims(
    "Your own script",
    "in a loop of your own: a pipeline of one rank (one warning), a model without a pipeline beside it, stages whose "
    "`backward()` the loop calls itself",
    "works, bit for bit",
)


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


SIZES = "--num-layers 4 --hidden-size 32"
TWO_RANKS = f"{SIZES} --pipeline-model-parallel-size 2"


def _train_on_one_rank(rank: int, flags: str, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """What the loop logs, and our warnings."""
    with warnings_of_package() as warnings, mock.patch.object(logging.getLogger("megatron.zerobubble"), "propagate", False):
        return train(rank, flags, **options), warnings


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--tensor-model-parallel-size 2 --tie-embeddings-and-output-weights", {"schedule": "zb-h1"}),
        ("--bf16 --use-distributed-optimizer", {"schedule": "zbv"}),
        ("--overlap-grad-reduce --clip-grad 0.5", {"schedule": "zb-h2", "optimizer_post_validation": True}),
    ],
    ids=["zb-h1", "zbv", "post-validation"],
)
@pytest.mark.sampled(0.33)
def test_a_pipeline_of_one_rank_trains_as_without_install(four_ranks: RankPool, flags: str, options: dict[str, Any]) -> None:
    flags = f"{SIZES} --train-iters 3 {flags}"
    expected = four_ranks.run(_train_on_one_rank, flags, {})
    actual = four_ranks.run(_train_on_one_rank, flags, options)
    assert [history for history, _ in actual] == [history for history, _ in expected]
    for (history, warnings), (_, without) in zip(actual, expected, strict=True):
        assert len(history) == 3
        (warning,) = [each for each in warnings if each not in without]
        assert f"schedule {options['schedule']} is installed and the pipeline has one rank" in warning


def _ddp(config: Any, module: nn.Module, *, overlaps: bool) -> DistributedDataParallel:
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlaps)
    return DistributedDataParallel(config=config, ddp_config=ddp_config, module=module)


def _gradients(chunks: list[DistributedDataParallel], backward: Any) -> list[Tensor]:
    """The reduced gradients of two microbatches."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for microbatch in range(2):
            with chunk.no_sync() if microbatch == 0 else nullcontext():
                backward(chunk, microbatch)
        chunk.finish_grad_sync()
    return [parameter.main_grad.clone() for chunk in chunks for parameter in chunk.module.parameters()]


Loops = tuple[list[DistributedDataParallel], Callable[[Any, int], None]]
"""Chunks that DDP has wrapped, and what runs a microbatch of one forward and backward."""


def _model_beside_the_pipeline(args: Any, overlaps: bool) -> Loops:
    """Wider, and without a pipeline."""
    loop = example()
    wider = {"pipeline_model_parallel_size": 1, "hidden_size": 48}
    with mock.patch.object(loop, "TransformerConfig", lambda **given: TransformerConfig(**given | wider)):
        config = loop.transformer_config(args)
    with (
        mock.patch.object(loop.parallel_state, "is_pipeline_first_stage", return_value=True),
        mock.patch.object(loop.parallel_state, "is_pipeline_last_stage", return_value=True),
        mock.patch.object(loop, "DistributedDataParallel", lambda *, module, **_: module),
    ):
        (model,) = loop.build_model(args, config)
    batches = loop.batches(args)

    def run(chunk: Any, _: int) -> None:
        output, loss_function = loop.forward_step(args, batches, chunk)
        loss_function(output)[0].backward()

    return [_ddp(config, model, overlaps=overlaps)], run


def _stage_of_the_pipeline(args: Any, overlaps: bool) -> Loops:
    """It was split when DDP wrapped it, and never saw the schedule."""
    args.overlap_grad_reduce = overlaps
    chunks = example().build_model(args, example().transformer_config(args))
    return chunks, functools.partial(_run_stage, example(), args)


def _run_stage(loop: ModuleType, args: Any, chunk: Any, microbatch: int) -> None:
    generator = torch.Generator().manual_seed(microbatch)
    set_input = get_attr_wrapped_model(chunk, "set_input_tensor")
    activation = torch.randn(args.seq_length, args.micro_batch_size, args.hidden_size, generator=generator)
    set_input([None if get_attr_wrapped_model(chunk, "pre_process") else activation.requires_grad_()])
    output, _ = loop.forward_step(args, loop.batches(args), chunk)
    output.square().sum().backward()


class _Tower(nn.Module):
    """A module that no pipeline schedule can run, with a weight that no linear of megatron-core has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)


def _module_that_is_no_stage(args: Any, overlaps: bool) -> Loops:
    torch.manual_seed(3)
    chunk = _ddp(example().transformer_config(args), _Tower(), overlaps=overlaps)
    image = torch.randn(2, 3, 8, 8)
    return [chunk], lambda chunk, number: chunk.module.conv(image * (number + 1)).square().sum().backward()


def _by_hand(rank: int, build: Callable[[Any, bool], Loops], schedule: str | None, overlaps: bool) -> list[Tensor]:
    with installed(TWO_RANKS, schedule) as args:
        return _gradients(*build(args, overlaps))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("build", [_model_beside_the_pipeline, _stage_of_the_pipeline, _module_that_is_no_stage])
@pytest.mark.sampled(0.5)
def test_what_the_loop_runs_itself_has_its_gradients(four_ranks: RankPool, build: Any, overlaps: bool) -> None:
    expected, actual = (four_ranks.run(_by_hand, build, schedule, overlaps) for schedule in (None, "zb-h1"))
    for own, reference in zip(actual, expected, strict=True):
        assert all(map(torch.equal, own, reference))
        assert all(each.any() for each in own if each.dim() > 1)


def _after_the_schedule(rank: int, flags: str, schedule: str) -> bool:
    """Whether a backward pass by hand adds the same gradients before and after an iteration of the schedule."""
    with installed(flags, schedule) as args:
        loop = example()
        chunks = loop.build_model(args, loop.transformer_config(args))
        run_stage = functools.partial(_run_stage, loop, args)
        by_hand = [_gradients(chunks, run_stage) for _ in range(2)]
        loop.get_forward_backward_func()(
            forward_step_func=lambda data, chunk: loop.forward_step(args, data, chunk),
            data_iterator=loop.batches(args),
            model=chunks,
            num_microbatches=2,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
        )
        by_hand.append(_gradients(chunks, run_stage))
        return all(all(map(torch.equal, by_hand[0], each)) for each in by_hand)


def test_a_backward_by_hand_after_the_schedule_is_right(four_ranks: RankPool) -> None:
    assert four_ranks.run(_after_the_schedule, TWO_RANKS, "zb-h1") == [True] * 4
