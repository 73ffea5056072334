"""Pairs of passes that compute beside each other's all-to-alls of experts: the bits of the same plan one pass after the other.

Ranks wait for random times around their all-to-alls, each of them others. Everything else is that of the run without pairs.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zerobubble.mcore.model.expert_exchanges import why_exposed
from megatron.zerobubble.plan.registry import plan_of
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.runtime.turns import Pair
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.support import flex
from tests.support.gpt import Case, Outcome
from tests.support.moe import MoeCase, MoeTrainer
from tests.support.mtp import MtpCase, MtpTrainer
from tests.support.plans import paired
from tests.support.ranks import RankPool


@dataclass(frozen=True)
class Overlapped(Case):
    """A schedule with every legal pair of its order, or with those that a run chooses."""

    overlap: bool = False
    is_loaded: bool = True
    """Whether both runs have the plan; else the one without overlap has that of its schedule."""

    @property
    def spec(self) -> ScheduleSpec:
        if not self.is_loaded:
            return super().spec
        return replace(super().spec, loaded_plan=paired(plan_of(super().spec, self.num_microbatches)))


@dataclass(frozen=True)
class OverlappedMoe(Overlapped, MoeCase):
    """With experts."""

    backend: str = "deepep"
    """Of the flex dispatcher."""


class OverlappedMoeTrainer(MoeTrainer, trains=OverlappedMoe):
    """Trains an `OverlappedMoe`."""

    case: Any

    def _schedule_options(self) -> dict[str, Any]:
        return {"overlap_moe": self.case.overlap}

    def _config_changes(self) -> dict[str, Any]:
        return super()._config_changes() | {"moe_flex_dispatcher_backend": self.case.backend}


@dataclass(frozen=True)
class OverlappedMtp(OverlappedMoe, MtpCase):
    """And with MTP layers, which have experts, too."""


class OverlappedMtpTrainer(OverlappedMoeTrainer, MtpTrainer, trains=OverlappedMtp):
    """Trains an `OverlappedMtp`."""

    _layers = MtpTrainer._layers
    _model_options = MtpTrainer._model_options

    def _config_changes(self) -> dict[str, Any]:
        return MtpTrainer._config_changes(self) | MoeTrainer._config_changes(self)


@dataclass(frozen=True)
class _Seen:
    """What a rank saw of a case with overlap, and without."""

    unequal: tuple[str, ...]
    """Losses, gradients, weights and norms that differ in any bit."""
    turns: int
    """How often a pass computed beside an all-to-all of the other one."""
    ahead: int
    """GEMMs of W that were computed beside one."""


def _trained(case: Case) -> Outcome:
    trainer = case.trainer()
    outcome = trainer.train()
    trainer.close()
    return outcome


def _compare(rank: int, case: OverlappedMoe) -> _Seen:
    chance, leave, ahead = random.Random(rank), Pair.leave, WeightGradStore.run_ahead
    seen = {"turns": 0, "ahead": 0}

    def delayed(pair: Pair, side: Any) -> None:
        time.sleep(chance.random() * 5e-3)
        leave(pair, side)
        seen["turns"] += 1
        time.sleep(chance.random() * 5e-3)

    def counted(store: WeightGradStore, most: int) -> bool:
        ran = ahead(store, most)
        seen["ahead"] += ran
        return ran

    with flex.doubles(), mock.patch.object(Pair, "leave", delayed):
        apart = _trained(case)
        assert seen["turns"] == 0
        with mock.patch.object(WeightGradStore, "run_ahead", counted):
            beside = _trained(replace(case, overlap=True))
    unequal = [name for name in ("losses", "grad_norms") if getattr(apart, name) != getattr(beside, name)]
    for name in ("gradients", "weights"):
        ours, theirs = getattr(beside, name), getattr(apart, name)
        unequal += [f"{name} of {each}" for each in theirs if not torch.equal(ours[each], theirs[each])]
    return _Seen(tuple(unequal), **seen)


BASE: dict[str, Any] = {"different_data": True, "expert_parallel": 2, "num_layers": 4}
SCHEDULES = {
    "1f1b": OverlappedMoe("1f1b", 2, 4, **BASE),
    "zb-h1": OverlappedMoe("zb-h1", 2, 4, **BASE),
    "zbv": OverlappedMoe("zbv", 2, 4, num_chunks=2, **BASE),
}
SHARDED: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1}
FEATURES: list[dict[str, Any]] = [
    {"shared": True, "layer_freq": (1, 0, 1, 1), "z_loss_coeff": 0.01, "dropout": 0.1},
    {"tied": True, "dtype": torch.bfloat16, "per_token_loss": True},
    {"recompute": "core_attn shared_experts", "shared": True, "dropout": 0.1, "overlap_grad_reduce": True},
    {"layer_freq": (1, 1, 0, 1), "dropout": 0.1, **SHARDED},
    {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "num_microbatches": 6},
    {"dispatcher": "flex", "shared": True, "layer_freq": (1, 0, 1, 1), "dropout": 0.1},
    {"dispatcher": "flex", "backend": "hybridep", "layer_freq": (1, 1, 0, 1), **SHARDED},
]


@pytest.mark.claims(
    "Layers",
    "all-to-alls of experts beside the other pass of a pair, or beside W (`--zero-bubble-overlap-moe`): 1F1B, ZB-H1 and ZBV; "
    "shared experts, dense layers in between, MTP layers, tied embeddings, dropout, bf16, recomputation of modules, tensor and "
    "sequence parallelism, distributed optimizer, the flex dispatcher with doubles of DeepEP and HybridEP, with random delays",
    "works, bit for bit; **not run on a GPU**",
)
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(features))
@pytest.mark.parametrize("base", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.sampled(0.2)
def test_a_pair_has_the_bits_of_its_passes(four_ranks: RankPool, base: OverlappedMoe, features: dict[str, Any]) -> None:
    case = replace(base, **features)
    seen = four_ranks.run(_compare, case)
    assert [each.unequal for each in seen] == [()] * 4
    plan = case.spec.loaded_plan
    assert plan is not None
    for each, row in zip(seen, (plan.ops[rank // 2] for rank in range(4)), strict=True):
        assert bool(each.turns) == bool(plan.pairs & set(row))
    assert any(each.ahead for each in seen) == (case.schedule != "1f1b")


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
@pytest.mark.sampled(0.5)
def test_with_mtp_layers(four_ranks: RankPool, schedule: str) -> None:
    """The head of tied embeddings is also an embedding, to which autograd adds in B: its GEMM stays in its W."""
    given = SCHEDULES[schedule]
    case = OverlappedMtp(**vars(given), num_mtp_layers=2)
    seen = four_ranks.run(_compare, replace(case, layer_freq=(1, 0, 1, 1), shared=True, tied=schedule == "zb-h1"))
    assert [each.unequal for each in seen] == [()] * 4
    assert any(each.turns for each in seen)


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
@pytest.mark.sampled(0.5)
def test_with_the_pairs_that_a_run_chooses(four_ranks: RankPool, schedule: str) -> None:
    """In another order than that of the schedule, too."""
    seen = four_ranks.run(_compare, replace(SCHEDULES[schedule], is_loaded=False, num_microbatches=8, shared=True))
    assert [each.unequal for each in seen] == [()] * 4
    assert all(each.turns for each in seen)


CONFIG: dict[str, Any] = {
    "num_moe_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "recompute_granularity": None,
    "recompute_modules": None,
    "moe_shared_expert_overlap": False,
    "fp8": None,
    "fp4": None,
    "tp_comm_overlap": False,
    "cuda_graph_impl": "none",
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_moe_experts": None}, "no experts"),
    ({"expert_model_parallel_size": 1}, "each rank has all experts"),
    ({"moe_token_dispatcher_type": "allgather"}, "dispatcher 'allgather'"),
    ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"}, "dispatcher 'ncclep'"),
    ({"recompute_granularity": "full"}, "recompute_granularity='full'"),
    ({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}, "recompute_modules with 'moe'"),
    ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap"),
    ({"fp8": "hybrid"}, "fp8"),
    ({"tp_comm_overlap": True}, "tp_comm_overlap"),
    ({"cuda_graph_impl": "transformer_engine"}, "CUDA graphs"),
]


def test_models_whose_passes_cannot_be_paired_are_named() -> None:
    for backend in ("deepep", "hybridep"):
        flexible = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
        assert why_exposed(SimpleNamespace(**CONFIG | flexible)) is None
    assert why_exposed(SimpleNamespace(**CONFIG)) is None
    assert why_exposed(SimpleNamespace(**CONFIG), num_slices=2) is not None
    for changes, reason in REFUSED:
        assert reason in str(why_exposed(SimpleNamespace(**CONFIG | changes)))


def _line(rank: int, case: OverlappedMoe) -> list[str]:
    with mock.patch("megatron.zerobubble.mcore.expert_pairs._log.warning") as warned:
        seen = _compare(rank, case)
    assert (seen.unequal, seen.turns) == ((), 0)
    return [call.args[0] % call.args[1:] for call in warned.call_args_list]


def test_passes_that_cannot_be_paired_run_one_after_the_other_after_one_line(four_ranks: RankPool) -> None:
    lines = four_ranks.run(_line, replace(SCHEDULES["zb-h1"], dispatcher="allgather", num_steps=1))
    assert [len(each) for each in lines] == [1, 0, 0, 0]
    assert "all-to-alls of experts stay exposed" in lines[0][0]


def _methods(rank: int, case: OverlappedMoe) -> tuple[set[str], set[str]]:
    """The methods of their own that dispatchers have while the schedule exists, and behind it."""
    trainer: Any = replace(case, overlap=True).trainer()
    dispatchers = [each for chunk in trainer.schedule._runner._dispatchers for each in chunk]
    found = []
    for end in (lambda: None, trainer.schedule.restore_model):
        end()
        found.append({name for each in dispatchers for name in vars(each) if name.startswith("token_")})
    trainer.close()
    return found[0], found[1]


def test_dispatchers_get_their_own_methods_back(four_ranks: RankPool) -> None:
    assert four_ranks.run(_methods, SCHEDULES["zbv"]) == [({"token_dispatch", "token_combine"}, set())] * 4
