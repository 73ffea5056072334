"""Twelve iterations of a small real GPT with optimistic or synchronous steps, inside the ranks of a `RankPool`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer

from megatron.zerobubble.mcore.post_validation.optimizer import post_validation
from megatron.zerobubble.optimizer.post_validation import PostValidation, Verdict
from tests.support.gpt import Case, Trainer
from tests.support.moe import MoeCase, MoeTrainer
from tests.support.mtp import MtpCase, MtpTrainer
from tests.support.transformer_engine.gpt import EngineCase, EngineMoeCase, EngineMoeTrainer, EngineTrainer

ITERATIONS = 12
BASE = Case(schedule="zb-h2", num_ranks=2, num_microbatches=4, num_layers=4, dropout=0.1, clip_grad=1e3)


@dataclass(frozen=True)
class Scenario:
    name: str
    case: Case = BASE
    spikes: dict[tuple[int, int], float] = field(default_factory=dict)
    """(iteration, pipeline rank) -> what is added to a gradient there."""
    hooks: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """(iteration, pipeline rank, microbatch) -> factor on the gradient of that rank's first stage's output."""
    redone: tuple[int, ...] = ()
    """Iterations whose optimistic step has to be redone."""
    patience: int = 0
    loss_scale: float | None = None
    """A constant one; None: dynamic."""
    zeros: bool = False
    frozen: bool = False
    chained: bool = False
    """An optimizer of its own for each chunk, in one ChainedOptimizer."""

    def __str__(self) -> str:
        return f"{self.name}-{self.case}"


def _count(module: Any, _: Any) -> None:
    module.forwards.add_(1.0)


@dataclass
class History:
    """The observable results of a run, all of them compared bit for bit."""

    steps: list[tuple[Any, ...]]
    """Per step (stepped, norm, zeros, learning rate, loss scale)."""
    losses: list[list[float]]
    weights: dict[str, torch.Tensor]
    state: list[torch.Tensor]
    """Master weights and optimizer state."""
    random: list[torch.Tensor]
    """Random states at the end, and how many forwards every chunk has counted."""
    redone: list[int]


class _Trainer(Trainer):
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        super().__init__(scenario.case)
        self.iteration = 0

    def _optimizer_config(self) -> Any:
        config = super()._optimizer_config()
        return replace(
            config,
            loss_scale=self.scenario.loss_scale,
            initial_loss_scale=2.0**10,
            min_loss_scale=1.0,
            loss_scale_window=3,
            hysteresis=1,
            log_num_zeros_in_grad=self.scenario.zeros,
        )

    def _optimizer(self) -> Any:
        if not self.scenario.chained:
            return super()._optimizer()
        each = [get_megatron_optimizer(self._optimizer_config(), [chunk]) for chunk in self.chunks]
        return ChainedOptimizer([part for chain in each for part in chain.chained_optimizers])

    def _provide(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
        model = super()._provide(pre_process, post_process, vp_stage)
        # What a router does: count in a buffer, forward by forward.
        model.register_buffer("forwards", torch.zeros(1))
        model.register_forward_pre_hook(_count)
        if self.scenario.frozen and pre_process:
            for parameter in model.embedding.parameters():
                parameter.requires_grad_(False)
        return model

    def batches(self, step: int) -> Iterator[Any]:
        return ((microbatch, batch) for microbatch, batch in enumerate(super().batches(step)))

    def forward_step(self, iterator: Any, model: Any) -> Any:
        microbatch, batch = next(iterator)
        output, loss_func = super().forward_step(iter([batch]), model)
        factor = self.scenario.hooks.get((self.iteration, parallel_state.get_pipeline_model_parallel_rank(), microbatch))
        if factor is not None and model is self.chunks[0] and output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)
        return output, loss_func

    def spike(self) -> None:
        """Into one weight of this rank, where the scenario says so."""
        value = self.scenario.spikes.get((self.iteration, parallel_state.get_pipeline_model_parallel_rank()))
        if value is not None:
            parameters = [parameter for _, parameter in self.parameters() if parameter.requires_grad]
            parameters[0].main_grad.view(-1)[0] += value


class _MoeTrainer(_Trainer, MoeTrainer):
    def spike(self) -> None:
        """Into an expert that only the first of the expert-parallel ranks holds."""
        value = self.scenario.spikes.get((self.iteration, parallel_state.get_pipeline_model_parallel_rank()))
        if value is not None and parallel_state.get_expert_model_parallel_rank() == 0:
            experts = [parameter for name, parameter in self.parameters() if ".local_experts." in name]
            experts[0].main_grad.view(-1)[0] += value


class _MtpTrainer(_Trainer, MtpTrainer):
    """Its history has the MTP losses, too."""


class _EngineTrainer(_Trainer, EngineTrainer):
    """Of Transformer Engine's layers."""


class _EngineMoeTrainer(_Trainer, EngineMoeTrainer):
    """With experts."""


def _trainer(scenario: Scenario) -> _Trainer:
    kinds: dict[type[Case], type[_Trainer]] = {MoeCase: _MoeTrainer, MtpCase: _MtpTrainer, EngineCase: _EngineTrainer}
    kinds[EngineMoeCase] = _EngineMoeTrainer
    return kinds.get(type(scenario.case), _Trainer)(scenario)


def train(rank: int, scenario: Scenario, optimistic: bool) -> History:
    trainer = _trainer(scenario)
    post = post_validation(
        trainer.optimizer,
        optimistic=optimistic,
        patience=scenario.patience,
    )
    history = _run(trainer, post)
    post.close()
    trainer.close()
    return history


def _run(trainer: _Trainer, post: PostValidation) -> History:
    history = History([], [], {}, [], [], [])
    taken: list[tuple[float, float]] = []
    num_stepped = 0

    def note(verdict: Verdict | None) -> bool:
        nonlocal num_stepped
        if verdict is None:
            return False
        num_stepped += verdict.is_stepped
        iteration = len(history.steps)
        history.steps.append((verdict.is_stepped, _bits(verdict.norm), verdict.zeros, *taken.pop()))
        if verdict.is_redone:
            history.redone.append(iteration)
        return verdict.is_redone

    def before_gradients() -> bool:
        with trainer.host.on_host():
            repeats = note(post.validate())
        trainer.zero_gradients()
        return repeats

    trainer.schedule.hooks.before_gradients = before_gradients
    for iteration in range(ITERATIONS):
        trainer.iteration = iteration
        history.losses.append(trainer.forward_backward(iteration))
        trainer.spike()
        lr = 1e-2 / (1 + num_stepped)
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        taken.append((lr, float(trainer.optimizer.get_loss_scale().item())))
        with trainer.host.on_host():
            post.step()
    with trainer.host.on_host():
        note(post.validate())
    if trainer.case.overlap_param_gather:
        for chunk in trainer.chunks:
            chunk.disable_forward_pre_hook(param_sync=True)
    history.weights = trainer.snapshot()
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                history.state.append(parameter.detach().clone())
                history.state += [value.clone() for value in part.optimizer.state[parameter].values()]
    history.random = [
        torch.get_rng_state(),
        *(buffer.clone() for chunk in trainer.chunks for _, buffer in chunk.named_buffers()),
    ]
    return history


def _bits(value: float) -> bytes:
    """NaN is equal to NaN here."""
    return torch.tensor(value, dtype=torch.float64).numpy().tobytes()


def differences(a: History, b: History) -> list[str]:
    found = [name for name in ("steps", "losses") if repr(getattr(a, name)) != repr(getattr(b, name))]
    found += [name for name in a.weights if not _same(a.weights[name], b.weights[name])]
    found += [f"state {i}" for i, (x, y) in enumerate(zip(a.state, b.state, strict=True)) if not _same(x, y)]
    return found + (["random"] if not all(map(torch.equal, a.random, b.random)) else [])


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def compare_with_stock(rank: int, case: Case) -> tuple[list[str], list[tuple[float, float]]]:
    """What differs between our synchronous steps and megatron-core's own, and the norms of both."""
    ours = train(rank, Scenario("", case), optimistic=False)
    trainer = _Trainer(Scenario("", case))
    norms, num_stepped = [], 0
    for iteration in range(ITERATIONS):
        trainer.zero_gradients()
        trainer.forward_backward(iteration)
        for group in trainer.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + num_stepped)
        with trainer.host.on_host():
            is_stepped, norm, _ = trainer.optimizer.step()
        num_stepped += is_stepped
        norms.append((float(norm or 0.0), torch.frombuffer(bytearray(ours.steps[iteration][1]), dtype=torch.float64).item()))
    weights = trainer.snapshot()
    trainer.close()
    return [name for name in weights if not _same(weights[name], ours.weights[name])], norms


def compare(rank: int, scenario: Scenario) -> tuple[list[str], list[int], list[tuple[Any, ...]]]:
    """Differences between optimistic and synchronous steps; which steps were redone; the outcome of each."""
    synchronous = train(rank, scenario, optimistic=False)
    optimistic = train(rank, scenario, optimistic=True)
    assert synchronous.redone == []
    return differences(synchronous, optimistic), optimistic.redone, optimistic.steps
