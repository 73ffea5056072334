"""Weights that others than their own linear read, hook or differentiate: the gradients are those of megatron-core's 1F1B.

Autograd adds up the gradients of all readers before it adds the sum to the gradient of earlier microbatches; the split adds a
reader's gradient in B and the linear's in W, in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.loops import SIZES, Loop, plain
from tests.support.ranks import RankPool
from tests.support.stock import installed
from tests.support.tolerances import OTHER_ORDER

pytestmark = pytest.mark.claims(
    "Your own script",
    "weights with other readers than their linear (fused linear cross entropy, penalties, absorbed projections), hooks on "
    "weights, `torch.autograd.grad` and `backward(inputs=)` in forward and loss: ZB-H1, ZBV; distributed optimizer, overlapped "
    "reduction",
    "the gradients of 1F1B, but for the order of sums",
)

MICROBATCHES = 4
STEPS = 3
LEARNING_RATE = 0.1

CHUNKS = {None: None, "zb-h1": None, "zbv": 2}
Uses = dict[str, Callable[["Readers"], None]]
USES: Uses = {}


def use(function: Callable[[Readers], None]) -> Callable[[Readers], None]:
    USES[function.__name__] = function
    return function


class Readers(Loop):
    """A loop in which a use changes what reads the weights.

    `loss` gets the output of the last stage, the labels and the number of the microbatch.
    """

    def __init__(self, args: Any, change: Callable[[Readers], None], **options: Any) -> None:
        self.prepare: Callable[[Any], None] = lambda chunk: None
        self.has_labels = True
        self.loss: Callable[[Tensor, Tensor, int], Tensor] = lambda output, labels, number: output.mean()
        self.wrapped: Callable[[], None] = lambda: None
        self.before_iteration: Callable[[int], None] = lambda number: None
        self.seen_by_hooks: list[Any] = []
        change(self)
        super().__init__(args, lambda chunk: self.prepare(chunk), **options)
        self.wrapped()

    def forward_step(self, data_iterator: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
        number, text = next(data_iterator)
        labels = text[:, 1:].contiguous()
        positions = torch.arange(labels.size(1)).expand(len(text), -1)
        output = model(text[:, :-1].contiguous(), positions, None, labels=labels if self.has_labels else None)

        def loss(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
            value = self.loss(output, labels, number)
            return value, {"loss": value.detach()}

        return output, loss

    def iterate(self, number: int) -> None:
        self.before_iteration(number)
        self.zero()
        data = [enumerate(self.batches(seed=number)) for _ in self.model]
        self.passes(MICROBATCHES, forward_step_func=self.forward_step, data_iterator=self.one_or_list(data))


def layers_of(chunk: Any) -> Any:
    return chunk.decoder.layers


# -- weights that others read -----------------------------------------------------------------------------------------------


def _of_last_stage(loop: Readers, of: Callable[[Any], Any] = lambda chunk: [chunk.output_layer.weight]) -> list[nn.Parameter]:
    """Weights of the last stage, by default its head's, once the model is built."""
    weights: list[nn.Parameter] = []
    loop.prepare = lambda chunk: weights.extend(of(chunk)) if chunk.post_process else None
    return weights


def _without_head(loop: Readers, then: Callable[[Tensor, Tensor, int, nn.Parameter], Tensor]) -> None:
    def head_of(chunk: Any) -> list[nn.Parameter]:
        chunk.output_layer.forward = lambda x, weight=None, runtime_gather_output=None: (x, None)
        return [chunk.output_layer.weight]

    head, loop.has_labels = _of_last_stage(loop, head_of), False
    loop.loss = lambda output, labels, number: then(output, labels, number, head[0])


def _with_forward(loop: Readers, name: str, forward: Callable[[Any, Any, Tensor], Any]) -> None:
    """In place of a linear's forward in each layer: (MLP, its own forward, input)."""

    def prepare(chunk: Any) -> None:
        for layer in layers_of(chunk):
            linear = getattr(layer.mlp, name)
            linear.forward = functools.partial(forward, layer.mlp, linear.forward)

    loop.prepare = prepare


def _scaled(mlp: Any, forward: Any, x: Tensor) -> Any:
    output, bias = forward(x)
    return output * (1.0 + mlp.linear_fc1.weight.square().mean()), bias


def _penalized(loop: Readers, weights: list[nn.Parameter], factor: Callable[[int], float] = lambda number: 0.1) -> None:
    loop.loss = lambda output, labels, number: output.mean() + factor(number) * sum(each.square().sum() for each in weights)


USES |= {
    "a_head_that_only_the_loss_reads": lambda loop: _without_head(
        loop, lambda hidden, labels, _, head: _cross_entropy(functional.linear(hidden, head), labels)
    ),
    "a_head_that_the_loss_reads_in_some_microbatches": lambda loop: _without_head(
        loop,
        lambda hidden, labels, number, head: (
            _cross_entropy(functional.linear(hidden, head), labels) if number % 2 else hidden.square().mean()
        ),
    ),
    "a_penalty_on_all_weights_of_the_last_layer_and_the_head": lambda loop: _penalized(
        loop, _of_last_stage(loop, lambda chunk: [*layers_of(chunk)[-1].parameters(), *chunk.output_layer.parameters()])
    ),
    "a_penalty_in_the_first_microbatch": lambda loop: _penalized(loop, _of_last_stage(loop), lambda number: float(number == 0)),
    # a layer reads the weight, and its linear's forward never runs
    "a_projection_that_is_absorbed": lambda loop: _with_forward(
        loop, "linear_fc2", lambda mlp, forward, x: (functional.linear(x, mlp.linear_fc2.weight), mlp.linear_fc2.bias)
    ),
    "a_weight_that_its_layer_reads_twice": lambda loop: _with_forward(loop, "linear_fc1", _scaled),
    # its linear is given what is computed from the weight, and from that of another layer
    "a_weight_that_is_computed": lambda loop: _with_forward(
        loop,
        "linear_fc1",
        lambda mlp, forward, x: forward(x, weight=mlp.linear_fc1.weight * 0.9 + 0.1 * mlp.linear_fc2.weight.t()),
    ),
}


# -- hooks ----------------------------------------------------------------------------------------------------------------


def _hooked_head(hook: Callable[[Tensor], Tensor]) -> Callable[[Any], list[nn.Parameter]]:
    def of(chunk: Any) -> list[nn.Parameter]:
        chunk.output_layer.weight.register_hook(hook)
        return [chunk.output_layer.weight]

    return of


USES |= {
    "a_hook_that_masks_rows": lambda loop: _of_last_stage(
        loop, _hooked_head(lambda gradient: torch.cat([torch.zeros_like(gradient[:-8]), gradient[-8:]]))
    ),
    "a_hook_and_a_penalty": lambda loop: _penalized(
        loop, _of_last_stage(loop, _hooked_head(lambda gradient: gradient.clamp(-0.01, 0.01)))
    ),
}


@use
def a_hook_for_some_iterations(loop: Readers) -> None:
    """Registered after DDP has wrapped the model, and removed again."""
    handles: list[Any] = []

    def before_iteration(number: int) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        if number == 1:
            for name, weight in loop.named():
                if "linear_qkv" in name or "linear_fc2" in name:
                    handles.append(weight.register_hook(functools.partial(torch.mul, 0.5)))

    loop.before_iteration = before_iteration


@use
def a_hook_behind_the_accumulation(loop: Readers) -> None:
    def seen(name: str, weight: Any) -> None:
        loop.seen_by_hooks.append((name, plain(weight.grad), plain(weight.main_grad)))
        weight.grad.mul_(2.0)

    def wrapped() -> None:
        for name, weight in loop.named():
            if name.endswith("linear_proj.weight"):
                weight.register_post_accumulate_grad_hook(functools.partial(seen, name))

    loop.wrapped = wrapped


# -- gradients that the loss computes -----------------------------------------------------------------------------------------


def _with_hidden(loop: Readers, then: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A loss of the logits' cross entropy and the hidden states in front of the head."""
    hidden: list[Tensor] = []

    def watched(chunk: Any) -> list[nn.Parameter]:
        chunk.decoder.register_forward_hook(lambda module, given, output: hidden.append(output))
        return []

    _of_last_stage(loop, watched)
    loop.has_labels = False
    loop.loss = lambda logits, labels, _: then(_cross_entropy(logits, labels), hidden.pop())


def _with_head(loop: Readers, then: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A loss of the logits' cross entropy and its gradient by the head's weight."""
    weights, loop.has_labels = _of_last_stage(loop), False

    def loss(logits: Tensor, labels: Tensor, number: int) -> Tensor:
        value = _cross_entropy(logits, labels)
        return then(value, _gradient(value, weights[0], create_graph=True))

    loop.loss = loss


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over tokens of logits [b, s, v], or of [s, b, v] if labels [b, s] are of that shape transposed."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _gradient(value: Tensor, by: Tensor, **how: bool) -> Tensor:
    return torch.autograd.grad(value, by, **how)[0]


def _backward_alone(value: Tensor, hidden: Tensor) -> Tensor:
    hidden.retain_grad()
    value.backward(retain_graph=True, inputs=[hidden])
    norm = hidden.grad.norm()
    hidden.grad = None
    return value / norm


USES |= {
    "a_loss_weighted_by_the_norm_of_a_gradient": lambda loop: _with_hidden(
        loop, lambda value, hidden: value / _gradient(value, hidden, retain_graph=True).norm()
    ),
    "a_penalty_on_a_gradient": lambda loop: _with_hidden(
        loop, lambda value, hidden: value + _gradient(value, hidden, create_graph=True).square().sum()
    ),
    "backward_for_an_activation_alone": lambda loop: _with_hidden(loop, _backward_alone),
    # as losses are balanced by the norms of their gradients by the last shared weight
    "the_gradient_of_a_weight": lambda loop: _with_head(loop, lambda value, gradient: value / gradient.norm().detach()),
    "a_penalty_on_the_gradient_of_a_weight": lambda loop: _with_head(
        loop, lambda value, gradient: value + gradient.square().sum()
    ),
}


# -- the tests ------------------------------------------------------------------------------------------------------------


def run_use(rank: int, name: str, schedule: str | None, flags: str) -> dict[str, Any]:
    """Gradients (or with replicas weights) after each iteration, norms and losses of a use on one rank."""
    chunks = CHUNKS[schedule]
    flags = f"{SIZES} {flags}" if chunks is None else f"{SIZES} {flags} --virtual-pipeline-model-parallel-size {chunks}"
    found: dict[str, Any] = {}
    with installed(flags, schedule) as args:
        has_replicas = args.use_distributed_optimizer or args.overlap_grad_reduce
        loop = Readers(args, USES[name], optimizer={"lr": LEARNING_RATE, "adam_eps": 1.0})  # steps are near lr * gradient
        if args.overlap_grad_reduce:
            loop.overlap_reductions(is_aligned=False)
        for step in range(STEPS):
            loop.iterate(step)
            if not has_replicas:
                found |= {f"{step} {key}": plain(weight.main_grad) for key, weight in loop.named()}
            _, norm, _ = loop.optimizer.step()
            found[f"{step} norm"] = np.float32(norm)
            if has_replicas:
                found |= {f"{step} {key}": plain(weight) for key, weight in loop.named()}
        for key, *each in loop.seen_by_hooks:
            found.setdefault(f"hook {key}", []).append(np.array(each))
        if loop.seen:
            found["losses"] = np.array([[report["loss"] for report in results] for results in loop.seen])
    return found


@functools.cache
def _all_ranks(pool: RankPool, name: str, schedule: str | None, flags: str) -> dict[str, Any]:
    return functools.reduce(dict.__or__, pool.run(run_use, name, schedule, flags))


def _compare(pool: RankPool, name: str, schedule: str, flags: str) -> None:
    expected, actual = (_all_ranks(pool, name, which, flags) for which in (None, schedule))
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        for one, other in zip(np.atleast_1d(value), np.atleast_1d(actual[key]), strict=True):
            largest = max(float(np.abs(each).max()) for each in np.atleast_1d(value))
            assert float(np.abs(one - other).max()) <= OTHER_ORDER * largest, f"{key}: {one} and {other}"


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
@pytest.mark.sampled(0.3)
def test_all_readers_add_to_a_gradient(two_ranks: RankPool, name: str, schedule: str) -> None:
    _compare(two_ranks, name, schedule, "")


_OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce"


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize(("schedule", "flags"), [("zb-h1", _OVERLAPPED), ("zbv", _OVERLAPPED), ("zbv", "--overlap-grad-reduce")])
@pytest.mark.sampled(0.12)
def test_a_bucket_is_reduced_when_the_last_reader_has_added(four_ranks: RankPool, name: str, schedule: str, flags: str) -> None:
    _compare(four_ranks, name, schedule, flags)
