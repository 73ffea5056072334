"""Models that no schedule runs: a pipeline of one rank, models beside the pipeline, stages that a loop runs itself."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from tests.support.ranks import RankPool
from tests.support.stock import example, installed, train

pytestmark = pytest.mark.claims(
    "Your own script",
    "in a loop of your own: a pipeline of one rank (one warning), a model without a pipeline beside it, stages whose "
    "`backward()` the loop calls itself",
    "works, bit for bit",
)

SIZES = "--num-layers 4 --hidden-size 32"
TWO = f"{SIZES} --pipeline-model-parallel-size 2"


def _train_on_one_rank(rank: int, flags: str, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """What the loop logs, and our warnings."""
    warnings: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler, logger = Handler(logging.WARNING), logging.getLogger("megatron.zerobubble")
    logger.addHandler(handler)
    try:
        with mock.patch.object(logger, "propagate", False):
            return train(rank, flags, **options), warnings
    finally:
        logger.removeHandler(handler)


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


def _tower(rank: int, schedule: str | None, overlaps: bool) -> list[Tensor]:
    """A model without a pipeline beside one with, trained by hand."""
    with installed(TWO, schedule) as args:
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
        chunk = _ddp(config, model, overlaps=overlaps)
        batches = loop.batches(args)

        def backward(chunk: Any, _: int) -> None:
            output, loss_function = loop.forward_step(args, batches, chunk)
            loss_function(output)[0].backward()

        return _gradients([chunk], backward)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_model_beside_the_pipeline_has_its_gradients(four_ranks: RankPool, overlaps: bool) -> None:
    expected, actual = (four_ranks.run(_tower, schedule, overlaps) for schedule in (None, "zb-h1"))
    for own, reference in zip(actual, expected, strict=True):
        assert all(map(torch.equal, own, reference))
        assert any(each.any() for each in own)


def _stage_by_hand(rank: int, flags: str, schedule: str | None, overlaps: bool) -> list[Tensor]:
    """Every stage of a pipeline, run by the loop itself."""
    with installed(flags, schedule) as args:
        loop = example()
        args.overlap_grad_reduce = overlaps
        chunks = loop.build_model(args, loop.transformer_config(args))
        return _gradients(chunks, lambda chunk, number: _run_stage(loop, args, chunk, number))


def _run_stage(loop: ModuleType, args: Any, chunk: Any, microbatch: int) -> None:
    generator = torch.Generator().manual_seed(microbatch)
    set_input = get_attr_wrapped_model(chunk, "set_input_tensor")
    activation = torch.randn(args.seq_length, args.micro_batch_size, args.hidden_size, generator=generator)
    set_input([None if get_attr_wrapped_model(chunk, "pre_process") else activation.requires_grad_()])
    output, _ = loop.forward_step(args, loop.batches(args), chunk)
    output.square().sum().backward()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
@pytest.mark.sampled(0.5)
def test_a_stage_that_the_loop_runs_itself_has_its_gradients(four_ranks: RankPool, schedule: str, overlaps: bool) -> None:
    """Bit for bit. Such a model was split when DDP wrapped it, and never saw the schedule."""
    expected, actual = (four_ranks.run(_stage_by_hand, TWO, name, overlaps) for name in (None, schedule))
    for own, reference in zip(actual, expected, strict=True):
        assert all(map(torch.equal, own, reference))
        assert all(each.any() for each in own if each.dim() > 1)


class _Tower(nn.Module):
    """A module that no pipeline schedule can run, with a weight that no linear of megatron-core has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)


def _plain(rank: int, schedule: str | None) -> list[Tensor]:
    with installed(TWO, schedule) as args:
        loop = example()
        torch.manual_seed(3)
        chunk = _ddp(loop.transformer_config(args), _Tower(), overlaps=False)
        image = torch.randn(2, 3, 8, 8)
        return _gradients([chunk], lambda chunk, number: chunk.module.conv(image * (number + 1)).square().sum().backward())


def test_a_module_that_is_no_stage_is_left_alone(four_ranks: RankPool) -> None:
    expected, actual = (four_ranks.run(_plain, schedule) for schedule in (None, "zb-h1"))
    for own, reference in zip(actual, expected, strict=True):
        assert all(map(torch.equal, own, reference))


def _after_the_schedule(rank: int, flags: str, schedule: str) -> bool:
    """Whether a backward pass by hand adds the same gradients before and after an iteration of the schedule."""
    with installed(flags, schedule) as args:
        loop = example()
        chunks = loop.build_model(args, loop.transformer_config(args))
        by_hand = [_gradients(chunks, lambda chunk, number: _run_stage(loop, args, chunk, number)) for _ in range(2)]
        loop.get_forward_backward_func()(
            forward_step_func=lambda data, chunk: loop.forward_step(args, data, chunk),
            data_iterator=loop.batches(args),
            model=chunks,
            num_microbatches=2,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
        )
        by_hand.append(_gradients(chunks, lambda chunk, number: _run_stage(loop, args, chunk, number)))
        return all(all(map(torch.equal, by_hand[0], each)) for each in by_hand)


def test_a_backward_by_hand_after_the_schedule_is_right(four_ranks: RankPool) -> None:
    assert four_ranks.run(_after_the_schedule, TWO, "zb-h1") == [True] * 4
