"""Number formats under zero bubble: main gradients, loss scales, kernels that add in the accumulator's precision.

bf16, fp16 and fp32 with fp32 main gradients are in test_equivalence.py, corrected steps in optimizer/test_post_validation.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.zerobubble.training.models import mcore_config
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, addmm_accumulate
from tests.support.gpt import Case, Tensors, Trainer, compare, unpipelined
from tests.support.ranks import RankPool
from tests.training.test_arguments import settings

ZBV = Case("zbv", 2, 4, num_chunks=2)
ZB_H2 = Case("zb-h2", 2, 4)
FIRST_SCALE = 2.0**30
"""Overflows in every gradient."""
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(BF16, 0.0), (FP16, 2.0**-10)])
@pytest.mark.sampled(0.34)
def test_main_gradients_in_the_weights_precision(four_ranks: RankPool, base: Case, dtype: torch.dtype, tolerance: float) -> None:
    """Every addition is rounded to 16 bits on both sides, microbatch by microbatch in one order. In fp16 the smallest numbers
    have fewer bits, and dividing by the number of data-parallel replicas (2, and 4 in the reference) loses some: a last bit,
    2^-10."""
    case = replace(base, dtype=dtype, reduce_in_fp32=False, adam_eps=1.0)
    for difference in four_ranks.run(compare, case):
        assert max(difference.gradients, difference.weights) <= tolerance, difference
        assert difference.losses <= 10 * tolerance, difference


@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)
@pytest.mark.parametrize(
    ("scale", "scales"),
    [(64.0, [64.0] * 3), (None, [FIRST_SCALE / 2, FIRST_SCALE / 4, FIRST_SCALE / 8])],
    ids=["constant", "dynamic"],
)
@pytest.mark.sampled(0.34)
def test_loss_scales(four_ranks: RankPool, base: Case, scale: float | None, scales: list[float]) -> None:
    """A constant scale stays. A dynamic one that is far too large halves at every step, and such a step leaves weights alone."""
    case = replace(base, dtype=FP16, loss_scale=scale, initial_loss_scale=FIRST_SCALE)
    for expected, actual, moved, equal in four_ranks.run(scaled_steps, case):
        assert actual == expected == scales
        assert equal
        assert moved is (scale is not None)


def scaled_steps(rank: int, case: Case) -> tuple[list[float], list[float], bool, bool]:
    """The loss scale after each step without and with the pipeline, whether weights moved, and whether they are equal."""
    reference, initial, expected = steps_of(case.unpipelined)
    scales, before, actual = steps_of(case, initial)
    moved = any(not torch.equal(before[name], actual[name]) for name in actual)
    return reference, scales, moved, all(torch.equal(actual[name], expected[name]) for name in actual)


def steps_of(case: Case, initial: Tensors | None = None) -> tuple[list[float], Tensors, Tensors]:
    """The loss scale after each step; weights before and after."""
    trainer = Trainer(case, initial)
    before, scales = trainer.snapshot(), []
    for step in range(case.num_steps):
        trainer.zero_gradients()
        trainer.forward_backward(step)
        with trainer.host.on_host():
            trainer.optimizer.step()
        scales.append(float(trainer.optimizer.get_loss_scale().item()))
    after = trainer.snapshot()
    trainer.close()
    return scales, before, after


@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.sampled(0.34)
def test_kernels_that_accumulate_inside(four_ranks: RankPool, base: Case, dtype: torch.dtype) -> None:
    """As fused kernels on a GPU: the wgrad GEMM accumulates in the fp32 main gradient before rounding. In fp32 only the order of
    the sum differs; in bf16 a result that the reference rounds to 8 bits is not rounded: 2^-8 of it."""
    tolerance = 1e-5 if dtype is torch.float32 else 2.0**-7
    for error, num_gemms in four_ranks.run(with_addmm, replace(base, dtype=dtype, num_steps=1)):
        assert 0 < error < tolerance if dtype is BF16 else error < tolerance
        assert num_gemms > 0


def with_addmm(rank: int, case: Case) -> tuple[float, int]:
    """Largest difference of a gradient, relative to its largest entry, and the number of GEMMs that the kernel ran."""
    initial, expected = unpipelined(case.unpipelined)
    trainer = Trainer(case, initial)
    assert trainer.built.store is not None
    shapes = []

    def accumulate(accumulator: torch.Tensor, grad_output: torch.Tensor, input_: torch.Tensor) -> None:
        assert accumulator.dtype is torch.float32
        assert input_.dtype is case.dtype
        shapes.append(accumulator.shape)
        addmm_accumulate(accumulator, grad_output.float(), input_.float())  # the CPU has no addmm of mixed dtypes

    trainer.built.store.kernel = WgradKernel(KernelKind.ADDMM, accumulate)
    actual = trainer.train().gradients
    trainer.close()
    errors = [
        float((actual[name] - expected.gradients[name]).abs().max() / expected.gradients[name].abs().max()) for name in actual
    ]
    return max(errors), len(shapes)


@pytest.mark.parametrize(
    ("flags", "in_fp32"),
    [
        ("", False),  # of fp32 weights: nothing to choose
        ("--accumulate-allreduce-grads-in-fp32", True),
        ("--bf16", True),
        ("--bf16 --grad-reduce-in-bf16", False),
        ("--fp16", False),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", True),
    ],
)
def test_flags_choose_the_dtype_of_main_gradients(flags: str, in_fp32: bool) -> None:
    assert mcore_config.ddp_config(settings(flags)).grad_reduce_in_fp32 is in_fp32


def test_flags_configure_the_loss_scale() -> None:
    dynamic = "--fp16 --initial-loss-scale 1024 --min-loss-scale 2 --loss-scale-window 5 --hysteresis 1"
    config = mcore_config.optimizer_config(settings(dynamic))
    assert (config.fp16, config.loss_scale, config.initial_loss_scale, config.min_loss_scale) == (True, None, 1024, 2)
    assert (config.loss_scale_window, config.hysteresis) == (5, 1)
    assert mcore_config.optimizer_config(settings("--fp16 --loss-scale 8")).loss_scale == 8
