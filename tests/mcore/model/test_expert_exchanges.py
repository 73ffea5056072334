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

from megatron.zerobubble.mcore.expert_pairs import wgrad_beside
from megatron.zerobubble.mcore.model.dispatchers import token_dispatchers
from megatron.zerobubble.mcore.model.expert_exchanges import why_exposed
from megatron.zerobubble.mcore.replanner import Replanner, Window
from megatron.zerobubble.plan.ir import OpKind, Plan
from megatron.zerobubble.plan.registry import plan_of
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import Activity, Timeline
from megatron.zerobubble.profiling.profile import RankProfile
from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.profiling.report import report
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
    """A schedule with every legal pair of its order, or with those that a run chooses by what it measures."""

    overlap: bool = False
    share: float | None = None
    """Of F and of B in which tokens travel, in place of what is measured in the first iteration; None: the plan is loaded."""

    @property
    def spec(self) -> ScheduleSpec:
        if self.share is not None:
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
    replanner: Replanner | None = None
    measured: RankProfile | None = None

    def forward_backward(self, step: int, *, forward_only: bool = False) -> list[float]:
        """With overlap and a share, the first iteration is profiled and behind it the run is planned again."""
        case, m = self.case, self.case.num_microbatches
        if not case.overlap or case.share is None:
            return super().forward_backward(step, forward_only=forward_only)
        if self.replanner is None:
            options, searches = SearchOptions(budget=0.1 * Effort.FAST.budget), case.schedule == "zbv"
            self.replanner = Replanner(self.schedule, Window(start=1, end=1), options, num_microbatches=m, searches=searches)
        self.replanner.before(step + 1, m)
        losses = super().forward_backward(step)
        if self.replanner.is_due(step + 1):
            assert isinstance(self.schedule.hooks.profiler, Profiler)
            self.measured = self.schedule.hooks.profiler.profile()
            times, traveling = dict.fromkeys(self.measured.times_ms, 1.0), dict.fromkeys(self.measured.all_to_all_ms, case.share)
            profile = RankProfile(times_ms=times, memory={}, all_to_all_ms=traveling)
            with (
                mock.patch.object(Profiler, "profile", return_value=profile),
                mock.patch.object(self.schedule, "link_times", return_value={}),
            ):
                self.replanner.after(step + 1, m)
        return losses

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

    def counted(store: WeightGradStore, most: int) -> int:
        elements = ahead(store, most)
        seen["ahead"] += elements > 0
        return elements

    with flex.doubles(), mock.patch.object(Pair, "leave", delayed):
        apart = _trained(case)
        assert seen["turns"] == 0
        with mock.patch.object(WeightGradStore, "run_ahead", counted):
            beside = _trained(replace(case, overlap=True))
    return _Seen(_unequal(apart, beside), **seen)


def _unequal(apart: Outcome, beside: Outcome) -> tuple[str, ...]:
    """What differs in any bit."""
    unequal = [name for name in ("losses", "grad_norms") if getattr(apart, name) != getattr(beside, name)]
    for name in ("gradients", "weights"):
        ours, theirs = getattr(beside, name), getattr(apart, name)
        unequal += [f"{name} of {each}" for each in theirs if not torch.equal(ours[each], theirs[each])]
    return tuple(unequal)


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


def _replanned(rank: int, case: OverlappedMoe) -> dict[str, Any]:
    """A run that is planned again behind its first iteration, beside one without overlap."""
    apart = _trained(case)
    trainer: Any = replace(case, overlap=True).trainer()
    with mock.patch("megatron.zerobubble.mcore.replanner._log.info") as logged:
        unequal = _unequal(apart, trainer.train())
    seen = {
        "unequal": unequal,
        "measured": trainer.measured,
        "plan": trainer.schedule.plan(case.num_microbatches).to_json(),
        "costs": trainer.replanner.costs,
        "lines": [line for call in logged.call_args_list if "all-to-alls" in (line := call.args[0] % call.args[1:])],
        "recorded": trainer.schedule.timelines(),
    }
    trainer.close()
    return seen


@pytest.mark.claims(
    "Planning and measuring",
    "the shares of F and B that are all-to-alls of experts, measured in a run; pairs chosen by them in re-planning, also in an "
    "order that is not searched, and none where they do not pay",
    "works, bit for bit the run without; **not run on a GPU**",
)
@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 0.5), ("zb-h1", 0.4), ("zbv", 0.3), ("zbv", 0.001)])
@pytest.mark.sampled(0.5)
def test_a_run_pairs_passes_by_the_share_that_it_measured(four_ranks: RankPool, schedule: str, share: float) -> None:
    """1F1B has pairs then, and ZB-H1 another order, with Ws that wait; ZBV, which is searched, hides enough beside W.

    All ranks have one plan, and the second iteration, which ran it, has spans of its exposed all-to-alls, all inside of ops.
    """
    case = replace(SCHEDULES[schedule], share=share, num_microbatches=8, layer_freq=(1, 0, 1, 1), gradient_step=1)
    results = four_ranks.run(_replanned, case)
    assert [each["unequal"] for each in results] == [()] * 4
    (text,), (costs,) = {each["plan"] for each in results}, {each["costs"] for each in results}
    plan = Plan.from_json(text)
    assert bool(plan.pairs) == (schedule == "1f1b")
    now, before = (simulate(each, costs).makespan_ms for each in (plan, plan_of(case.spec, 8)))
    assert now <= before if schedule == "zbv" else now < 0.99 * before
    layers = 4 // costs.num_stages
    experts = [stage for stage in range(costs.num_stages) if any(case.layer_freq[stage * layers :][:layers])]
    assert costs.all_to_all == pytest.approx((share * len(experts) / costs.num_stages,) * 2)
    assert [len(each["lines"]) for each in results] == [1, 0, 0, 0]
    assert "ms hidden, on average" in results[0]["lines"][0]
    backward = OpKind.BW if schedule == "1f1b" else OpKind.B
    for rank, each in enumerate(results):
        profile, stages = each["measured"], case.spec.placement.rank_to_stages[rank // 2]
        assert profile.all_to_all_ms.keys() == {
            (stage, kind) for stage in {*experts} & {*stages} for kind in (OpKind.F, backward)
        }
        assert all(0 < elapsed < profile.times_ms[key] for key, elapsed in profile.all_to_all_ms.items())
        (timeline,) = each["recorded"]
        assert timeline.plan == plan
        for row in timeline.ranks:
            spans = [span for span in row.spans if span.activity is Activity.ALL_TO_ALL]
            assert spans
            assert all(any(op.start_ms <= span.start_ms < span.end_ms <= op.end_ms for op in row.ops) for span in spans)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 1.0),
        ({"sequence_parallel": True}, 0.5),
        ({"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": True, "sequence_parallel": True}, 1.0),
        ({"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": True, "add_bias_linear": True}, 0.0),
        ({"transformer_impl": "transformer_engine"}, 0.0),
    ],
)
def test_how_much_of_a_w_can_be_computed_early_follows_from_the_configuration(changes: dict[str, Any], share: float) -> None:
    usual = {"transformer_impl": "local", "sequence_parallel": False, "gradient_accumulation_fusion": False}
    config = SimpleNamespace(**usual | {"add_bias_linear": False} | changes)
    assert wgrad_beside(config) == share


def _recorded(rank: int, case: OverlappedMoe) -> tuple[list[Timeline], set[str]]:
    """The recorded iteration of a run, and the methods of their own that dispatchers have behind it."""
    trainer: Any = case.trainer()
    trainer.train()
    own = {name for chunk in trainer.chunks for each in token_dispatchers(chunk) for name in vars(each)}
    recorded = trainer.schedule.timelines()
    trainer.close()
    return recorded, own


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.sampled(0.5)
def test_megatron_cores_own_schedule_is_measured_alike(four_ranks: RankPool, dispatcher: str) -> None:
    """With recomputation of the experts B has both the all-to-alls of F and its own."""
    case = replace(SCHEDULES["1f1b"], schedule="stock", share=0.0, dispatcher=dispatcher, recompute="moe")
    for (timeline,), own in four_ranks.run(_recorded, case):
        assert not {name for name in own if name.startswith("token_")}
        for row in timeline.ranks:
            spans = [span for span in row.spans if span.activity is Activity.ALL_TO_ALL]
            inside = [op.kind for op, start, end in row.ops for each in spans if start <= each.start_ms < each.end_ms <= end]
            assert inside.count(OpKind.BW) == 2 * inside.count(OpKind.F) == 2 * 2 * 2 * case.num_microbatches
        assert all(0 < share < 1 for share in report(timeline).simulation.costs.all_to_all)


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
