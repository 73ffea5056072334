"""Weights that are frozen and trained again between iterations: the gradients of megatron-core without a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron.zerobubble.errors import ConfigError
from tests.support.gpt import Case, Tensors, Trainer
from tests.support.moe import MoeCase
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER

STEPS = 5


def _is_frozen(name: str, step: int) -> bool:
    """All trained; the head alone; the upper half of the layers; all but some weights of each layer; all again."""
    words = name.split(".")
    is_head = words[0] == "output_layer" or "final_layernorm" in name
    if step == 1:
        return not is_head
    if step == 2:
        return not is_head and not (words[:2] == ["decoder", "layers"] and int(words[2]) >= 4)
    return step == 3 and any(each in name for each in ("linear_fc1", "linear_qkv", "router", "word_embeddings"))


def _freeze(parameters: Iterator[tuple[str, nn.Parameter]], step: int) -> None:
    for name, parameter in parameters:
        parameter.requires_grad_(not _is_frozen(name, step))


def _train(case: Case, initial: Tensors | None) -> tuple[Tensors, list[Tensors], list[list[float]]]:
    """(first weights, all gradients of each step, losses)."""
    trainer = case.trainer(initial)
    first, gradients, losses = trainer.snapshot(), [], []
    for step in range(STEPS):
        _freeze(trainer.parameters(), step)
        trainer.zero_gradients()
        losses.append(trainer.forward_backward(step))
        gradients.append({name: parameter.main_grad.clone() for name, parameter in trainer.parameters()})
        with trainer.host.on_host():
            trainer.optimizer.step()
    trainer.close()
    return first, gradients, losses


@functools.lru_cache(maxsize=2)
def _reference(case: Case) -> tuple[Tensors, list[Tensors], list[list[float]]]:
    return _train(case, None)


def _unequal(rank: int, case: Case) -> list[str]:
    """Gradients with other bits than those of the model without a pipeline, and gradients that a frozen weight got."""
    initial, expected, own_losses = _reference(case.unpipelined)
    _, actual, losses = _train(case, initial)
    wrong = [
        f"step {step}: {name}"
        for step, gradients in enumerate(actual)
        for name, gradient in gradients.items()
        if not torch.equal(gradient, expected[step][name]) or (_is_frozen(name, step) and gradient.abs().sum() > 0)
    ]
    assert any(_is_frozen(name, step) for step in range(STEPS) for name in expected[0])
    assert all(step == reference for step, reference in zip(losses, own_losses, strict=True) if step)
    return wrong


ZB_H1, ZBV = Case("zb-h1", 4, 4), Case("zbv", 2, 4, num_chunks=2)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(ZB_H1, marks=pytest.mark.smoke),
        ZBV,
        Case("1f1b", 2, 4),
        replace(ZBV, tensor_parallel=2, sequence_parallel=True, llama=True),
        replace(ZBV, tensor_parallel=2),
        MoeCase("zb-h1", 2, 4),
    ],
    ids=str,
)
@pytest.mark.sampled(0.33)
@pytest.mark.claims(
    "Layers",
    "weights frozen and trained again between iterations (a head alone, layer by layer), adapters on a frozen base: ZB-H1, "
    "ZBV, 1F1B, tensor parallel, experts, tied embeddings, Transformer Engine's Python, a loop of your own",
    "works, bit for bit (tied: 4e-6)",
    also=("mcore/model/test_kept_in_b.py", "mcore/stock_loop/test_legal_uses.py"),
)
def test_frozen_weights_get_no_gradient_and_the_others_the_same_bits(four_ranks: RankPool, case: Case) -> None:
    assert four_ranks.run(_unequal, case) == [[]] * 4


def _engine_case(kind: str) -> Case:
    from tests.support.transformer_engine.gpt import EngineCase, EngineMoeCase

    if kind == "experts":
        return EngineMoeCase("zb-h1", 2, 4)
    return EngineCase(kind, 2, 4, num_chunks=2 if kind == "zbv" else 1, fuses=kind == "zbv")


def _unequal_engine(rank: int, kind: str) -> list[str]:
    return _unequal(rank, _engine_case(kind))


@pytest.mark.parametrize("kind", ["zb-h1", "zbv", "experts"])
@pytest.mark.sampled(0.5, group="long loops")
def test_modules_that_defer_weight_gradients_themselves_are_left_out_while_they_are_frozen(
    engine_ranks: RankPool, kind: str
) -> None:
    assert engine_ranks.run(_unequal_engine, kind) == [[]] * 4


# -- tied embeddings ----------------------------------------------------------------------------------------------------


def _tied(rank: int, case: Case, frozen: tuple[str, ...]) -> dict[str, float]:
    """Largest difference of the two copies of the embedding's gradients from the unpipelined one's, with these copies frozen."""
    reference = replace(case.unpipelined).trainer()
    initial = reference.snapshot()
    reference.zero_gradients()
    if len(frozen) == 2:
        _freeze_copies(reference, ("embedding",))
    reference.forward_backward(0)
    key = "embedding.word_embeddings.weight"
    expected = dict(reference.parameters())[key].main_grad.clone()
    reference.close()
    trainer = case.trainer(initial)
    _freeze_copies(trainer, frozen)
    trainer.zero_gradients()
    trainer.forward_backward(0)
    found = {
        f"{index}": float((parameter.main_grad - expected).abs().max())
        for index, (name, parameter) in enumerate(trainer.parameters())
        if name == key
    }
    gradients = [parameter.main_grad.clone() for name, parameter in trainer.parameters() if name == key]
    trainer.close()
    if len(gradients) == 2:
        assert torch.equal(*gradients), "or the two copies drift apart"
    return found if len(frozen) in (0, 2) else {}


def _freeze_copies(trainer: Trainer, frozen: tuple[str, ...]) -> None:
    for chunk in trainer.chunks:
        for name, parameter in chunk.module.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                parameter.requires_grad_(not name.startswith(frozen) if frozen else True)


@pytest.mark.parametrize("frozen", [(), ("embedding",), ("embedding", "output_layer")], ids=len)
@pytest.mark.parametrize("case", [replace(ZBV, tied=True), replace(ZB_H1, tied=True)], ids=str)
@pytest.mark.sampled(0.33)
def test_both_copies_of_a_tied_embedding_get_one_gradient(four_ranks: RankPool, case: Case, frozen: tuple[str, ...]) -> None:
    """4e-6: the unpipelined model adds the two shares in another order."""
    for differences in four_ranks.run(_tied, case, frozen):
        assert all(difference < OTHER_ORDER for difference in differences.values())


# -- refused ------------------------------------------------------------------------------------------------------------


def _refusals(rank: int) -> dict[str, str]:
    messages = {}
    for name, options in (
        ("reduce", {"overlap_grad_reduce": True}),
        ("gather", {"overlap_grad_reduce": True, "overlap_param_gather": True, "distributed_optimizer": True}),
    ):
        trainer = replace(ZBV, **options).trainer()
        dict(trainer.parameters())[f"decoder.layers.{rank // 2 * 2}.mlp.linear_fc2.weight"].requires_grad_(False)
        with pytest.raises(ConfigError) as caught:
            trainer.forward_backward(0)
        messages[name] = str(caught.value)
        trainer.close()
    return messages


@pytest.mark.claims(
    "Layers",
    "weights frozen and trained again with `--overlap-grad-reduce` or `--overlap-param-gather` after DDP wrapped the model; "
    "one of a Transformer Engine module's weight and bias",
    "rejected",
)
def test_freezing_under_overlapped_reductions_is_refused_before_the_first_pass(four_ranks: RankPool) -> None:
    """megatron-core's own schedule ends in an assertion in its second iteration."""
    for messages in four_ranks.run(_refusals):
        assert "linear_fc2.weight was frozen" in messages["reduce"]
        assert messages["reduce"].endswith("turn overlap_grad_reduce off")
        assert messages["gather"].endswith("turn overlap_grad_reduce and overlap_param_gather off")


def _engine_refusals(rank: int) -> tuple[str, str]:
    from tests.support.transformer_engine.gpt import EngineTrainer

    trainer = _engine_case("zb-h1").trainer()
    linear = trainer.chunks[0].module.decoder.layers[0].mlp.linear_fc1
    linear.bias.requires_grad_(False)
    with pytest.raises(ConfigError) as part:
        trainer.forward_backward(0)
    trainer.close()

    provide = EngineTrainer._provide

    def freezing(self: EngineTrainer, *args: Any) -> Any:
        model = provide(self, *args)
        model.decoder.layers[0].mlp.linear_fc1.requires_grad_(False)
        return model

    with mock.patch.object(EngineTrainer, "_provide", freezing):
        trainer = _engine_case("zb-h1").trainer()
    trainer.forward_backward(0)
    trainer.chunks[0].module.decoder.layers[0].mlp.linear_fc1.requires_grad_(True)
    with pytest.raises(ConfigError) as since:
        trainer.forward_backward(0)
    trainer.close()
    return str(part.value), str(since.value)


def test_a_deferring_module_that_is_frozen_in_part_or_trained_since_is_named(engine_ranks: RankPool) -> None:
    for part, since in engine_ranks.run(_engine_refusals):
        assert "mlp.linear_fc1.bias was frozen after" in part
        assert "linear_fc1.weight was not" in part
        assert "mlp.linear_fc1 (TE" in since
        assert since.endswith("Wrap the model again")
