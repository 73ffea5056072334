"""Weights that stay in B: value heads, adapters and towers train as under megatron-core's 1F1B, or are refused by name."""

from __future__ import annotations

import functools
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from megatron.zerobubble.errors import SplitError
from megatron.zerobubble.mcore.model.wgrad_split import split_weight_gradients, split_weights
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.support.loops import SIZES, Loop, merged
from tests.support.ranks import RankPool
from tests.support.stock import installed, warnings_of_package

H = 16
CHUNKS = {None: None, "zb-h1": None, "zbv": 2}
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce"


class _ValueHead(nn.Linear):
    """As RL loops have one in place of the output layer."""

    def __init__(self) -> None:
        super().__init__(H, 1, bias=False)

    def forward(self, x: Tensor, **_: Any) -> Any:
        return super().forward(x).float(), None


class _Adapted(nn.Module):
    """A frozen linear with an adapter beside it, of megatron-core's linears, of `nn.Linear` or of parameters."""

    def __init__(self, base: Any, kind: str) -> None:
        super().__init__()
        rank, (outs, ins) = 4, base.weight.shape
        self.base, self.kind = base, kind
        if kind == "core":
            how: dict[str, Any] = {"config": base.config, "init_method": nn.init.zeros_, "bias": False, "gather_output": False}
            self.a, self.b = (ColumnParallelLinear(*sizes, **how) for sizes in ((ins, rank), (rank, outs)))
        elif kind == "linears":
            self.a, self.b = nn.Linear(ins, rank, bias=False), nn.Linear(rank, outs, bias=False)
        else:
            self.a, self.b = nn.Parameter(torch.empty(ins, rank)), nn.Parameter(torch.empty(rank, outs))
        for number, weight in enumerate(parameter for parameter in self.parameters() if parameter is not base.weight):
            generator = torch.Generator().manual_seed(number)
            weight.data.normal_(0.0, 0.1, generator=generator)

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Any:
        y, bias = self.base(x, *args, **named)
        if self.kind == "core":
            return y + self.b(self.a(x)[0])[0], bias
        return y + (self.b(self.a(x)) if self.kind == "linears" else x @ self.a @ self.b), bias


class _Tower(nn.Module):
    """A convolution, torch's linears, megatron-core's, and a parameter of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        initialize = functools.partial(nn.init.constant_, val=0.01)
        how: dict[str, Any] = {"config": config, "init_method": initialize, "bias": False}
        self.patch = nn.Conv1d(H, H, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H), nn.GELU()) for _ in range(2))
        self.up = ColumnParallelLinear(H, 2 * H, gather_output=False, **how)
        self.down = RowParallelLinear(2 * H, H, input_is_parallel=True, skip_bias_add=False, **how)
        self.query = nn.Parameter(torch.full((1, H), 0.1))
        for weight in (*self.patch.parameters(), *self.blocks.parameters()):
            weight.data.fill_(0.05)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch((x + self.query).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = x + self.down(torch.relu(self.up(x)[0]))[0]
        return y


def _value_head(chunk: Any) -> None:
    if chunk.post_process:
        chunk.output_layer = _ValueHead()
        chunk.output_layer.weight.data.fill_(0.1)


def _adapters(chunk: Any, *, kind: str, is_head_trained: bool = False) -> None:
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        for module, name in (
            (layer.self_attention, "linear_qkv"),
            (layer.self_attention, "linear_proj"),
            (layer.mlp, "linear_fc1"),
            (layer.mlp, "linear_fc2"),
        ):
            setattr(module, name, _Adapted(getattr(module, name), kind))
    if is_head_trained and chunk.post_process:
        chunk.output_layer.requires_grad_(True)


def _tower(chunk: Any, *, is_declared: bool = True) -> None:
    if chunk.pre_process:
        chunk.tower = _Tower(chunk.config)
        if is_declared:
            chunk.tower.wgrad_in_backward = True
        embed = chunk.embedding.forward
        chunk.embedding.forward = lambda *args, **named: (lambda x: x + chunk.tower(x))(embed(*args, **named))


def _parameter_of_the_model(chunk: Any) -> None:
    """Learned tokens that are added in front, a weight of the model itself."""
    if chunk.pre_process:
        chunk.prompt = nn.Parameter(torch.full((1, H), 0.1))
        embed = chunk.embedding.forward
        chunk.embedding.forward = lambda *args, **named: embed(*args, **named) + chunk.prompt


def _one_linear_in_b(chunk: Any) -> None:
    """Declared by the parameter, and by a module around all but one of a layer's linears."""
    for layer in chunk.decoder.layers:
        layer.self_attention.linear_qkv.weight.wgrad_in_backward = True
        layer.mlp.wgrad_in_backward = True
        layer.mlp.linear_fc2.wgrad_in_backward = False


def _computed_weights(chunk: Any, *, is_declared: bool = True) -> None:
    """torch's weight normalization."""
    for layer in chunk.decoder.layers:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # parametrizations took its place
            nn.utils.weight_norm(layer.mlp.linear_fc1)
        if is_declared:
            layer.mlp.linear_fc1.wgrad_in_backward = True


def _rounded_weights(chunk: Any, *, is_declared: bool = True) -> None:
    """Training for a quantized model: GEMMs with rounded weights, by an own implementation on the module."""

    def rounded(stock: Any, input: Tensor, weight: Tensor, *args: Any, **named: Any) -> Any:
        return stock(input, weight + (weight * 64).round().detach() / 64 - weight.detach(), *args, **named)

    for layer in chunk.decoder.layers:
        linear = layer.mlp.linear_fc1
        linear._forward_impl = functools.partial(rounded, linear._forward_impl)
        if is_declared:
            linear.wgrad_in_backward = True


def _train(
    rank: int, prepare: Callable[[Any], None], schedule: str | None, more: str, has_values: bool
) -> tuple[dict[str, Any], list[str], list[str]]:
    """What training comes to, the package's warnings, and names of the linears that are split."""
    chunks = CHUNKS[schedule]
    flags = f"{SIZES} {more} {'' if chunks is None else f'--virtual-pipeline-model-parallel-size {chunks}'}"
    with warnings_of_package() as warned, installed(flags, schedule) as args:
        loop = Loop(args, prepare)
        if args.overlap_grad_reduce:
            loop.overlap_reductions(is_aligned=False)
        for _ in range(2):
            loop.train(**({"forward_step_func": _values} if has_values else {}))
        split = [each.name for chunk in loop.model for each in split_weights(chunk)]
        return {"results": loop.seen, **loop.state()}, list(warned), split


def _values(data_iterator: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    text = next(data_iterator)[:, :-1].contiguous()
    output = model(text, torch.arange(text.size(1)).expand(len(text), -1), None)

    def loss(values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        squares = (values - 1.0).square().mean()
        return squares, {"value": squares.detach()}

    return output, loss


USES: dict[str, tuple[Callable[[Any], None], str]] = {
    "value head": (_value_head, "_ValueHead"),
    "adapters of megatron-core's linears": (functools.partial(_adapters, kind="core"), ""),
    "adapters of nn.Linear": (functools.partial(_adapters, kind="linears"), "torch.nn.modules.linear.Linear"),
    "adapters of parameters": (functools.partial(_adapters, kind="parameters"), "_Adapted"),
    "adapters and a head": (
        functools.partial(_adapters, kind="linears", is_head_trained=True),
        "torch.nn.modules.linear.Linear",
    ),
    "parameter of the model": (_parameter_of_the_model, "GPTModel"),
    "declared tower": (_tower, ""),
    "declared linears": (_one_linear_in_b, ""),
    "declared computed weights": (_computed_weights, ""),
    "declared rounded weights": (_rounded_weights, ""),
}


@pytest.mark.claims(
    "Your own script",
    "weights that nobody can defer: a value head, adapters (LoRA) of megatron-core's linears, of `nn.Linear` and of parameters, "
    "with a trained head too, a tower or linears with `wgrad_in_backward` on a module around them, weights that are computed "
    "(`weight_norm`, rounding) too; ZB-H1, ZBV, with the distributed optimizer and overlapped reduction; above 5 % of a stage, "
    "without the attribute: refused",
    "works, bit for bit",
)
@pytest.mark.parametrize("more", ["", SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize("name", USES)
@pytest.mark.sampled(0.5)
def test_weights_in_b_train_as_under_1f1b(two_ranks: RankPool, name: str, more: str) -> None:
    prepare, kind = USES[name]
    results = {
        schedule: two_ranks.run(_train, prepare, schedule, f"{more} --num-microbatches 3", name == "value head")
        for schedule in CHUNKS
    }
    expected = merged([state for state, *_ in results[None]])
    for schedule in ("zb-h1", "zbv"):
        actual = merged([state for state, *_ in results[schedule]])
        np.testing.assert_equal(actual, expected, err_msg=schedule)
        texts = [text for _, warned, _ in results[schedule] for text in warned if "computed in B" in text]
        assert [kind in text for text in texts] == [True] * len(texts)
        assert bool(texts) == bool(kind), texts
        split = {word for *_, names in results[schedule] for word in names}
        assert "adapters" in name or any("linear_fc2" in each for each in split)
        assert "core" not in name or any(".b.weight" in each for each in split)
        if name.startswith("declared") and "tower" not in name:
            assert not any(each.endswith("linear_fc1.weight") for each in split)
        if name == "declared linears":
            assert not any("linear_qkv" in each for each in split)
        assert not any("tower" in each for each in split)


def test_each_kind_is_logged_once_per_stage_with_its_share(two_ranks: RankPool) -> None:
    prepare, _ = USES["adapters of nn.Linear"]
    for rank, (_, warned, _) in enumerate(two_ranks.run(_train, prepare, "zb-h1", "", False)):
        (text,) = [text for text in warned if "computed in B" in text]
        # 2 layers with 4 adapters of 2 weights: 2 * 1024 elements beside 2 * 3072, and on the last stage a head of 96 * 16
        share = 2048 / (2048 + 6144 + (1536 if rank else 0))
        assert text.startswith(f"pipeline rank {rank}: decoder.layers.0.self_attention.linear_proj.a.weight and 15 more (torch.")
        assert f"{share:.1%} of the stage's weights" in text


def _refused(_rank: int, prepare: Callable[[Any], None], schedule: str) -> list[str]:
    flags = f"{SIZES} {'' if schedule == 'zb-h1' else '--virtual-pipeline-model-parallel-size 2'}"
    store, messages = WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate)), []
    with installed(flags, schedule) as args:
        for chunk in Loop(args, prepare, has_ddp=False).model:
            try:
                split_weight_gradients(chunk, store)
            except SplitError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_a_large_part_is_refused_in_one_line_with_the_attribute(two_ranks: RankPool, schedule: str) -> None:
    (message,), others = two_ranks.run(_refused, functools.partial(_tower, is_declared=False), schedule)
    assert not others
    header, line = message.split("\n")
    assert header == "the backward pass of this model cannot be split into B and W:"
    own = 3 * H * H + H
    size = own + 4 * H * H + (6144 if schedule == "zb-h1" else 3072)
    assert re.search(r"tower\.query \(.*\._Tower, \d", line)
    assert re.search(r"tower\.blocks\.0\.1\.weight and 1 more \(torch\.nn\.modules\.linear\.Linear, \d", line)
    assert f"at most 5% are left in B unasked, here {own / size:.1%}" in line
    assert "set wgrad_in_backward = True on the module, on one around it or on the parameter" in line


FUNCTION = "linear_with_grad_accumulation_and_async_allreduce"


def _replaced(name: str) -> Any:
    """Inside, a function around one of `layers` stands in its place."""
    stock = operator.attrgetter(name)(layers)
    return mock.patch(f"{layers.__name__}.{name}", functools.wraps(stock)(lambda *args, **named: stock(*args, **named)))


def _refused_with_own_function(rank: int, name: str) -> list[str]:
    """As `_refused`, where something else stands in place of megatron-core's function."""
    with _replaced(name):
        return _refused(rank, lambda chunk: None, "zb-h1")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (functools.partial(_computed_weights, is_declared=False), "a weight that is computed from other parameters"),
        (functools.partial(_rounded_weights, is_declared=False), "_forward_impl, set on the module"),
        (FUNCTION, f"layers.{FUNCTION}, replaced"),
        ("ColumnParallelLinear._forward_impl", "ColumnParallelLinear._forward_impl, replaced"),
    ],
)
def test_a_gemm_that_is_not_megatron_cores_is_refused_with_the_reason(two_ranks: RankPool, prepare: Any, reason: str) -> None:
    job = (_refused_with_own_function, prepare) if isinstance(prepare, str) else (_refused, prepare, "zb-h1")
    for (message,) in two_ranks.run(*job):
        assert f"Their GEMM is not megatron-core's own ({reason})" in message
        assert "decoder.layers.0." in message


def _replaced_later(_rank: int) -> str:
    """The error of a run whose GEMMs were replaced after its chunks were wrapped, and before its first iteration."""
    with installed(SIZES, "zb-h1") as args:
        loop = Loop(args)
        with _replaced(FUNCTION), pytest.raises(SplitError) as error:
            loop.train()
        return str(error.value)


def test_a_gemm_that_is_replaced_later_is_refused_before_the_first_pass(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_replaced_later):
        assert f"was replaced (layers.{FUNCTION}, replaced) after DistributedDataParallel had wrapped the chunk" in message
