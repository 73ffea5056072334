"""Features together: in these cases each pair of values that is allowed occurs at least once.

To add a feature, add its values to `FEATURES` under the name of a field of `Case` (or a name that `case_of` translates), what it
excludes to `is_allowed`, and what it does to the order of sums to `PairCase.tolerance`.

A share of them runs each time, drawn at random (`tests/conftest.py` explains how to repeat it), and the others with `-m slow`.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron.zerobubble.mcore.post_validation.optimizer import post_validation
from tests.support.comparisons import Difference, assert_near, difference, unpipelined
from tests.support.gpt import Case, Outcome, Tensors, Trainer
from tests.support.ranks import RankPool

pytestmark = [
    pytest.mark.claims(
        "Precision and the optimizer",
        "features in pairs: 57 cases; a random share per run, its seed printed, all with `make test-slow`",
        "works",
    ),
    pytest.mark.claims("Layers", "GQA, SwiGLU, RMSNorm; rotary and learned positions; per-token loss", "works, bit for bit"),
    pytest.mark.claims("Layers", "tied embeddings", "works, 1e-5"),
    pytest.mark.claims("Parallelism", "sequence parallelism; W gathers its input again", "works, bit for bit"),
]

FEATURES: dict[str, list[Any]] = {
    "schedule": ["1f1b", "zb-h1", "zb-h2", "zb", "zb-interleaved", "1f1b-v", "zbv", "v-half", "v-min"],
    "num_ranks": [2, 4],
    "microbatches": ["few", "odd", "many"],
    "layers": ["even", "uneven"],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "reduce_in_fp32": [True, False],
    "tied": [False, True],
    "llama": [False, True],
    "recompute": [None, "full", "selective", "block", "core_attn mlp"],
    "tensor_parallel": [1, 2],
    "sequence_parallel": [False, True],
    "different_data": [False, True],
    "distributed_optimizer": [False, True],
    "overlap_grad_reduce": [False, True],
    "per_token_loss": [False, True],
    "dropout": [0.0, 0.1],
    "clip_grad": [0.0, 0.1],
    "optimizer": ["adam", "sgd"],
    "post_validation": [False, True],
}

WORLD = 4

Row = dict[str, Any]


def is_allowed(row: Row) -> bool:
    used = row["num_ranks"] * row["tensor_parallel"]
    return (
        used <= WORLD
        and (not row["different_data"] or used < WORLD)
        and (not row["sequence_parallel"] or row["tensor_parallel"] > 1)
        and (row["reduce_in_fp32"] or row["dtype"] is not torch.float32)
        and (not row["distributed_optimizer"] or row["optimizer"] == "adam")
        and (row["llama"] or row["recompute"] != "core_attn mlp")  # megatron-core takes the biases of an MLP for results
    )


def covering_rows() -> list[Row]:
    """Random rows, each the best of some, until many draws in a row have no pair of values that has not occurred."""
    drawn, rows, seen, fruitless = random.Random(0), list[Row](), set[Any](), 0
    while fruitless < 100:
        draws = ({name: drawn.choice(values) for name, values in FEATURES.items()} for _ in range(60))
        new, _, best = max((len(pairs_of(row) - seen), index, row) for index, row in enumerate(draws) if is_allowed(row))
        fruitless = 0 if new else fruitless + 1
        rows += [best] if new else []
        seen |= pairs_of(best)
    return rows


def pairs_of(row: Row) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))


_FUSED = {1: "1f1b", 2: "interleaved-1f1b"}
"""The schedule with the full backward, by chunks per rank; under V it is 1f1b-v."""

_UNEVEN = {2: "Ett|t*6L", 4: "Et|ttt|t*4|L", 8: "E|tt|t|t|t|t|t|tL"}
"""Eight layers, by number of stages."""


@dataclass(frozen=True)
class PairCase(Case):
    """A case with the options of the training loop."""

    post_validation: bool = False

    @property
    def reference(self) -> Case:
        """The case to compare with: the unpipelined model; with dropout, whose RNG streams belong to chunks, the schedule with
        full backwards of the same placement."""
        plain = replace(self, post_validation=False)
        if not self.dropout:
            return plain.unpipelined
        is_v = self.spec.placement.name == "V"
        return replace(plain, schedule="1f1b-v" if is_v else _FUSED[self.num_chunks], max_pending_backward=None)

    def tolerance(self) -> float:
        """Largest difference, relative to a tensor's largest entry: none where sums are taken in the same order."""
        if self.dropout:  # the same ranks on both sides; an optimistic step sums the norm in the order of the relay
            is_exact = not (self.post_validation and self.clip_grad)
        else:  # in fp16 tiny gradients lose bits when they are divided by the number of data-parallel replicas
            is_exact = self.reduce_in_fp32 or self.dtype is not torch.float16
            is_exact = is_exact and not (self.tied or self.clip_grad or self.different_data)
        if is_exact:
            return 0.0
        return 1e-5 if self.dtype is torch.float32 else 2.0**-6


def case_of(row: Row) -> PairCase:
    values = dict(row)
    num_ranks, schedule = values["num_ranks"], values["schedule"]
    num_chunks = 2 if schedule in ("zb-interleaved", "1f1b-v", "zbv", "v-half", "v-min") else 1
    num_microbatches = {"few": 2, "odd": num_ranks + 1, "many": 2 * num_ranks}[values.pop("microbatches")]
    layout = _UNEVEN[num_ranks * num_chunks] if values.pop("layers") == "uneven" else None
    return PairCase(
        **values,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        layout=layout,
        max_pending_backward=num_ranks + 1 if schedule == "zb" else None,
        num_steps=2,
        initial_loss_scale=32.0,  # fp16 sums over tokens and replicas overflow with more
        # The usual one would blow a last-bit difference of a tiny gradient up to a whole step; with one as large as for fp32,
        # weights that start at 0 would stay among the smallest numbers of fp16.
        adam_eps=1.0 if values["dtype"] is torch.float32 else 1e-2,
    )


ALL = [case_of(row) for row in covering_rows()]


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("case", ALL, ids=[f"{index:02}-{case}" for index, case in enumerate(ALL)])
def test_every_pair_of_features(four_ranks: RankPool, case: PairCase) -> None:
    assert_near(four_ranks.run(compare_pair, case), case, case.tolerance())


# -- on the ranks -----------------------------------------------------------------------------------------------------------


def compare_pair(rank: int, case: PairCase) -> Difference:
    """Train the reference and the case; returns their difference."""
    initial, expected = unpipelined(case.reference)
    trainer = Trainer(case, initial)
    actual = _train_optimistically(trainer) if case.post_validation else trainer.train()
    trainer.close()
    return difference(actual, expected)


def _train_optimistically(trainer: Trainer) -> Outcome:
    """Like `Trainer.train`, with optimistic steps only."""
    case = trainer.case
    steps = post_validation(trainer.optimizer, optimistic=True, patience=0)
    norms: list[float] = []

    def note() -> bool:
        with trainer.host.on_host():
            verdict = steps.validate()
        if verdict is not None:
            norms.append(verdict.norm)
        return verdict is not None and verdict.is_redone

    def before_gradients() -> bool:
        is_wrong = note()
        trainer.zero_gradients()
        return is_wrong

    trainer.schedule.hooks.before_gradients = before_gradients
    losses, gradients = [], dict[str, torch.Tensor]()
    for step in range(case.num_steps):
        losses.append(trainer.forward_backward(step))
        gradients = gradients or _gradients(trainer)
        with trainer.host.on_host():
            steps.step()
    note()
    steps.close()
    return Outcome(losses, gradients, trainer.snapshot(), norms)


def _gradients(trainer: Trainer) -> Tensors:
    return {name: parameter.main_grad.detach().clone() for name, parameter in trainer.parameters()}
