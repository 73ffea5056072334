"""With recomputed activations: a forward runs a second time in B and only there, and W uses the activations that B recomputed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.zerobubble.plan.ir import Op, OpKind
from tests.mcore.test_zb_schedules import _gemms_per_op
from tests.support.gpt import Case, Trainer
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Layers",
    "recomputation, full (uniform, block) and selective (core_attn, mlp, moe, shared_experts): a layer runs again once, in B;"
    " W multiplies what B recomputed",
    "works, bit for bit",
    also=("mcore/test_equivalence.py", "mcore/model/test_layers.py"),
)

ZBV = Case("zbv", 2, 3, num_chunks=2, num_layers=8)
ZB_H2 = Case("zb-h2", 2, 3, num_layers=8)


def _forwards_per_op(rank: int, case: Case) -> list[tuple[Op, list[int]]]:
    """After every op, how often each layer of its stage ran forward in it."""
    trainer = Trainer(case)
    counts: dict[int, int] = {}
    seen = []
    placement = case.spec.placement

    def count(layer: Any, *_: Any) -> None:
        counts[layer.layer_number] = counts.get(layer.layer_number, 0) + 1

    for chunk in trainer.built.chunks:
        for layer in chunk.module.decoder.layers:
            layer.register_forward_pre_hook(count)

    def observe(_: Any, op: Op) -> None:
        layers = trainer.built.chunks[placement.chunk_of(op.stage)].module.decoder.layers
        seen.append((op, [counts.pop(layer.layer_number, 0) for layer in layers]))
        assert not counts, "a layer of another stage ran"

    trainer.schedule.hooks.observe = observe
    trainer.forward_backward(0)
    trainer.close()
    return seen


@pytest.mark.parametrize("case", [ZBV, ZB_H2], ids=str)
@pytest.mark.parametrize(("recompute", "in_b"), [("full", "all"), ("block", "first"), ("selective", "none")])
@pytest.mark.sampled(0.33)
def test_a_layer_runs_again_in_b_and_nowhere_else(four_ranks: RankPool, case: Case, recompute: str, in_b: str) -> None:
    for seen in four_ranks.run(_forwards_per_op, replace(case, recompute=recompute)):
        for op, counts in seen:
            again = {"all": [1] * len(counts), "first": [1] + [0] * (len(counts) - 1), "none": [0] * len(counts)}[in_b]
            expected = {OpKind.F: [1] * len(counts), OpKind.B: again, OpKind.W: [0] * len(counts)}
            assert counts == expected[op.kind], op


@pytest.mark.parametrize("case", [ZBV, ZB_H2], ids=str)
@pytest.mark.sampled(0.34)
def test_w_uses_the_activations_that_b_recomputed(four_ranks: RankPool, case: Case) -> None:
    """GEMMs of linears: F and W as without recomputation, B those of the layers' forward in addition."""
    plain = four_ranks.run(_gemms_per_op, case)
    again = four_ranks.run(_gemms_per_op, replace(case, recompute="full"))
    last = case.spec.placement.num_stages - 1
    for before, after in zip(plain, again, strict=True):
        assert before.keys() == after.keys()
        for text, count in before.items():
            head = text.startswith(str(last))  # the head is no layer, and is kept
            more = before[text.replace("B", "F")] - head if "B" in text else 0
            assert after[text] == count + more, text
