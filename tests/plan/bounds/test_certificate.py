"""Certificates: what the planner proves, a checker that shares no code with it finds true; anything changed is refused."""

import ast
import copy
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.zerobubble import verify
from megatron.zerobubble.cli.main import main
from megatron.zerobubble.plan.bounds.certificate import _prices, certificate
from megatron.zerobubble.plan.bounds.instance import Instance
from megatron.zerobubble.plan.bounds.relaxations import derivations
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.costs.microbatch_costs import MicrobatchCosts
from megatron.zerobubble.plan.costs.slice_costs import SliceCosts
from megatron.zerobubble.plan.costs.slicing import Slicing
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.microbatches import MicrobatchPlanner
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import build_plan, schedule_spec
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions, smallest_memory
from megatron.zerobubble.plan.simulate import simulate
from tests.plan.every_order import shortest
from tests.plan.search.test_search import problems

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "certificates: a checker without code of the planner finds plan and bound true, on random placements, costs, limits, "
    "unequal microbatches and links; 25 changes to a certificate are each refused",
    "works, simulated",
)

CHECKER = Path(verify.__file__)


def _certificate(memory_limit: float | None = 1.0, objective: Objective = Objective.SPAN) -> dict[str, Any]:
    """Of ZBV on four ranks with uneven stages, as it is after having been a file."""
    placement = Placement.v(4)
    even = CostModel.uniform(placement, forward_ms=18.5, backward_ms=18.1, wgrad_ms=9.3, comm_ms=0.6)
    costs = replace(even, forward_ms=tuple(each + stage / 10 for stage, each in enumerate(even.forward_ms)))
    plan = build_plan("zbv", num_ranks=4, num_microbatches=8)
    body: dict[str, Any] = json.loads(json.dumps(certificate(simulate(plan, costs), objective, memory_limit)))
    return body


@given(problems(), st.booleans(), st.sampled_from(list(Objective)))
def test_the_checker_finds_what_the_planner_found(
    problem: tuple[Placement, int, CostModel, float], limited: bool, objective: Objective
) -> None:
    placement, m, costs, limit = problem
    within = limit if limited else None
    simulation = simulate(search("any", placement, m, costs, SearchOptions(memory_limit=within, budget=0.0)), costs)
    body = json.loads(json.dumps(certificate(simulation, objective, within)))
    value, bound = verify.check(body)
    assert value == pytest.approx(objective.of(simulation))
    assert bound == pytest.approx(body["bound"]["bound_ms"])
    assert bound <= value * (1 + 1e-6)


@given(problems(), st.booleans())
def test_the_checker_proves_every_bound_not_only_the_largest(
    problem: tuple[Placement, int, CostModel, float], is_uniform: bool
) -> None:
    placement, m, costs, limit = problem
    n = costs.num_slices
    if is_uniform:
        costs = CostModel.uniform(placement, forward_ms=2.0, backward_ms=2.2, comm_ms=0.1, activation_after_backward=0.4)
        costs = costs.divided(n)
        limit = smallest_memory(placement, m, costs) * 1.5
    memory = limit * min(placement.num_ranks, m) * (1 + 1e-9) + 1e-9
    rank_of = list(placement.stage_to_rank)
    checked = verify.read_costs(costs.to_json(), rank_of, [n] * m)
    for found in derivations(Instance(placement, costs, m, memory)):
        rank = found.ranks[-1]
        prices = _prices(costs, placement.rank_to_stages[rank], m, memory)
        proven = verify.bounds(checked, rank_of, rank, memory, prices, "span", [n] * m)
        assert proven[found.name] >= found.value_ms * (1 - 1e-9) - 1e-9, found.name


@st.composite
def tiny_problems(draw: st.DrawFn) -> tuple[list[int], int, dict[str, Any]]:
    """Any placement of a few stages, with odd costs: times of 0, more memory after B than before, unequal microbatches, links."""
    rank_of = draw(st.sampled_from([[0], [0, 0], [0, 1], [1, 0], [0, 1, 0], [0, 1, 1], [0, 1, 2], [0, 1, 1, 0], [0, 1, 0, 1]]))
    n = draw(st.sampled_from([n for n in (1, 1, 2, 3) if n == 1 or n * len(rank_of) <= 6]))
    m = draw(st.integers(1, (5 if n == 1 else 6) // len(rank_of) // n))
    is_equal = draw(st.booleans())
    numbers = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 5.0])
    tables = {}
    width = m if n == 1 else n
    for name in verify.NAMES:
        rows = [draw(st.lists(numbers, min_size=width, max_size=width)) for _ in rank_of]
        tables[name] = [[rows[0][0]] * width for _ in rank_of] if is_equal else rows
    p = max(rank_of) + 1
    if n > 1:
        keys = {name: [0.0 if is_equal else draw(numbers) for _ in rank_of] for name in verify.KEYS}
        slices: Any = tables | keys
        if draw(st.booleans()):  # microbatches of their own lengths
            m = draw(st.integers(1, 6 // len(rank_of) - (n - 1)))
            slices = [_first_slices(slices, draw(st.integers(1, n)) if i else n, draw(numbers)) for i in range(m)]
            m = next(m for m in range(m, 0, -1) if sum(_slices({"slices": slices[:m]}, m)) * len(rank_of) <= 6)
            slices = slices[:m]
        return rank_of, m, {"slices": slices, "comm_ms": draw(st.sampled_from([0.0, 1.0, 4.0]))}
    if p == 1 or draw(st.booleans()):
        return rank_of, m, {"microbatches": tables, "comm_ms": draw(st.sampled_from([0.0, 1.0, 4.0]))}
    latency, speed = ([[draw(each) for _ in range(p)] for _ in range(p)] for each in (numbers, st.sampled_from([0.5, 1.0, 4.0])))
    sizes = [1e6 * draw(numbers) for _ in range(m)]
    return (
        rank_of,
        m,
        {
            "microbatches": tables,
            "links": {"latency_ms": latency, "gigabytes_per_s": speed, "message_bytes": sizes},
        },
    )


def _first_slices(slices: dict[str, Any], count: int, more: float) -> dict[str, Any]:
    """Those of a shorter microbatch, whose first one takes more memory."""
    cut = {name: [row[:count] for row in slices[name]] for name in verify.NAMES}
    cut["activation"] = [[row[0] + more, *row[1:]] for row in cut["activation"]]
    return cut | {name: slices[name] for name in verify.KEYS}


def _slices(body: dict[str, Any], m: int) -> list[int]:
    """Slices of every microbatch of a tiny problem."""
    slices = body.get("slices")
    if slices is None:
        return [1] * m
    return [len(each["forward_ms"][0]) for each in (slices if isinstance(slices, list) else [slices] * m)]


def _model(body: dict[str, Any]) -> CostModel:
    """The costs of a tiny problem, as the planner has them."""
    if isinstance(body.get("slices"), list):
        every = tuple(map(SliceCosts.from_json, body["slices"]))
        return replace(CostModel.of_lists(every[0].sums(), comm_ms=body["comm_ms"]), unequal_slices=every)
    if "slices" in body:
        slices = SliceCosts.from_json(body["slices"])
        return replace(CostModel.of_lists(slices.sums(), comm_ms=body["comm_ms"]), slices=slices)
    costs = MicrobatchCosts(**{name: tuple(map(tuple, rows)) for name, rows in body["microbatches"].items()})
    if "links" in body:
        return CostModel.of_microbatches(costs, links=Links.from_json(body["links"]))
    return CostModel.of_microbatches(costs, comm_ms=body["comm_ms"])


def _equal(rank_of: list[int], m: int, *values: float) -> tuple[list[int], int, dict[str, Any]]:
    """Stages and microbatches that are all alike."""
    tables = {name: [[value] * m for _ in rank_of] for name, value in zip(verify.NAMES, values, strict=True)}
    return rank_of, m, {"microbatches": tables, "comm_ms": 1.0}


@settings(max_examples=300)
@example(_equal([0, 1], 2, 4.0, 4.0, 4.0, 1.0, 4.0), 0.3, 0.0, Objective.MAKESPAN)  # only fused BW fit the memory
@example(_equal([0], 2, 3.0, 0.0, 1.0, 1.0, 3.0), 2 / 3, 1 / 3, Objective.SPAN)
@given(
    tiny_problems(),
    st.sampled_from([0.3, 0.7, 1.0, 1.5, 2.0, 3.0, 20.0]),
    st.sampled_from([0.0, 0.4, 1.0, 2.0, 5.0]),
    st.sampled_from(list(Objective)),
)
def test_no_plan_takes_less_than_any_bound_at_any_price(
    problem: tuple[list[int], int, dict[str, Any]], times: float, price: float, objective: Objective
) -> None:
    """Every bound of the checker, and that of the planner, against the best of all orders, found by trying them all."""
    rank_of, m, body = problem
    slices = _slices(body, m)
    costs = verify.read_costs(body, rank_of, slices)
    limit = max(slices) * times * max(max(row) for name in verify.NAMES[3:] for row in costs[name]) + 1e-9
    prices = dict.fromkeys(("before the first B", "after the last F", "after the last B"), price)
    best = shortest(costs, rank_of, limit, objective, slices)
    for rank in set(rank_of):
        for name, bound in verify.bounds(costs, rank_of, rank, limit, prices, objective.value, slices).items():
            assert bound <= best + 1e-6, name
    if best < math.inf:
        placement = Placement(tuple(rank_of))
        planned = lower_bound(placement, m, _model(body), limit / min(placement.num_ranks, m))
        assert objective.of(planned) <= best + 1e-6


@pytest.mark.parametrize("name", ["zbv", "zb-h1", "1f1b", "interleaved-1f1b"])
def test_unequal_microbatches_and_links_are_checked_too(name: str) -> None:
    spec = schedule_spec(name, num_ranks=3)
    equal = CostModel.uniform(spec.placement, forward_ms=2.0, backward_ms=2.2, wgrad_ms=1.5, activation_after_backward=0.4)
    lengths = (512, 64, 2048, 300, 700, 1024)
    costs = LengthModel.of(equal, tokens=700, squares=700.0**2, attention_share=0.2).costs(lengths)
    links = Links(
        latency_ms=((0.0, 0.1, 0.5), (0.2, 0.0, 0.1), (0.9, 0.3, 0.0)),
        gigabytes_per_s=((1.0,) * 3,) * 3,
        message_bytes=tuple(1e3 * each for each in lengths),
    )
    unequal = CostModel.of_microbatches(costs, links=links)
    plan = MicrobatchPlanner(spec, len(lengths), options=SearchOptions(budget=2e5)).plan(unequal)
    simulation = simulate(plan, unequal)
    for objective in Objective:
        value, bound = verify.check(json.loads(json.dumps(certificate(simulation, objective, None))))
        assert value == pytest.approx(objective.of(simulation))
        assert 0 < bound <= value


@pytest.mark.parametrize("name", ["zb-h1", "zbv"])
def test_keys_are_freed_at_the_end_of_the_last_b(name: str) -> None:
    """With more memory after B than F allocates besides keys, which B of the first slice frees."""
    spec = schedule_spec(name, num_ranks=3, num_slices=4)
    costs = Slicing(tokens=4096, key_share=0.1).applied(CostModel.uniform(spec.placement), 4)
    simulation = simulate(build_plan(name, num_ranks=3, num_microbatches=6, num_slices=4), costs)
    verify.check(json.loads(json.dumps(certificate(simulation, Objective.MAKESPAN, None))))


def _swapped(body: dict[str, Any]) -> None:
    """F of the last microbatch of the last stage comes after its B."""
    row = body["plan"]["ops"][0]
    one, other = row.index("7F7"), row.index("7B7")
    row[one], row[other] = row[other], row[one]


def _renumbered(body: dict[str, Any]) -> None:
    """Microbatches 2 and 5 change places everywhere: the plan takes as long, and the executor cannot run it."""
    other = {"2": "5", "5": "2"}
    body["plan"]["ops"] = [[op[:-1] + other.get(op[-1], op[-1]) for op in row] for row in body["plan"]["ops"]]


def _with_links(speed: float) -> Callable[[dict[str, Any]], None]:
    """Links with one bandwidth for all pairs."""

    def change(body: dict[str, Any]) -> None:
        links = {"latency_ms": [[0.6] * 4] * 4, "gigabytes_per_s": [[speed] * 4] * 4, "message_bytes": [1.0]}
        body["plan"]["costs"]["links"] = links

    return change


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a faster plan": (lambda body: body.update(objective_ms=body["objective_ms"] * 0.99), "objective_ms"),
    "a higher bound": (lambda body: body["bound"].update(bound_ms=body["bound"]["bound_ms"] * 1.01), "bound"),
    "a bound of another rank": (lambda body: body["bound"].update(rank=0), "bound"),
    "a price below 0": (lambda body: body["bound"]["prices"].update({"before the first B": -1.0}), "prices"),
    "a price that is infinite": (lambda body: body["bound"]["prices"].update({"after the last F": float("inf")}), "prices"),
    "another bound": (lambda body: body["bound"].update(name="memory times time"), "bound"),
    "a bound nobody knows": (lambda body: body["bound"].update(name="magic"), "not known"),
    "less memory": (lambda body: body.update(memory_limit=0.9), "memory"),
    "a slower plan": (lambda body: body.update(objective_ms=body["objective_ms"] * 1.01), "objective_ms"),
    "no objective": (lambda body: body.update(objective="speed"), "objective"),
    "ops in another order": (_swapped, "deadlock"),
    "an op less": (lambda body: body["plan"]["ops"][1].pop(), "once"),
    "an op twice": (lambda body: body["plan"]["ops"][1].append("1F0"), "once"),
    "an op of another rank": (
        lambda body: body["plan"]["ops"][0].append(body["plan"]["ops"][1].pop()),
        "does not have its stage",
    ),
    "no op": (lambda body: body["plan"]["ops"][0].append("F"), "not an op"),
    "cheaper passes": (lambda body: body["plan"]["costs"].update(forward_ms=[1.0] * 8), "objective_ms"),
    "passes that give time back": (lambda body: body["plan"]["costs"].update(wgrad_ms=[-1.0] * 8), "wgrad_ms"),
    "a time that is no number": (lambda body: body["plan"]["costs"].update(wgrad_ms=[float("nan")] * 8), "finite"),
    "a link that is no number": (lambda body: body["plan"]["costs"].update(comm_ms=float("nan")), "links"),
    "a link that gives time back": (lambda body: body["plan"]["costs"].update(comm_ms=-0.1), "links"),
    "a link faster than at once": (
        lambda body: body["plan"]["costs"].update(
            links={"latency_ms": [[0.6] * 4] * 4, "gigabytes_per_s": [[-1.0] * 4] * 4, "message_bytes": [1e3]}
        ),
        "bandwidth",
    ),
    "a limit that is no number": (lambda body: body.update(memory_limit=float("nan")), "memory"),
    "an objective that is no number": (lambda body: body.update(objective_ms=float("nan")), "objective_ms"),
    "a bound that is no number": (lambda body: body["bound"].update(bound_ms=float("nan")), "bound"),
    "a microbatch that is run twice": (lambda body: body["plan"].update(assignment=[0] * 8), "assignment"),
    "a time that is a bool": (lambda body: body["plan"]["costs"].update(wgrad_ms=[True] * 8), "wgrad_ms"),
    "a time that is a text": (lambda body: body["plan"]["costs"].update(wgrad_ms=["1"] * 8), "wgrad_ms"),
    "a time beyond sums": (lambda body: body["plan"]["costs"].update(wgrad_ms=[1e308] * 8), "wgrad_ms"),
    "a bandwidth below 0": (_with_links(-1.0), "links"),
    "a bandwidth of next to nothing": (_with_links(5e-324), "links"),
    "a bandwidth that is no number": (_with_links(float("nan")), "links"),
    "a limit a little below the plan": (lambda body: body.update(memory_limit=body["memory_limit"] * (1 - 5e-7)), "memory"),
    "microbatches out of order": (_renumbered, "ascending"),
    "more microbatches than any memory": (lambda body: body["plan"].update(num_microbatches=10**15), "every microbatch"),
    "no microbatches": (lambda body: body["plan"].update(num_microbatches=0), "every microbatch"),
    "ranks that it does not have": (lambda body: body["plan"].update(num_ranks=5), "ranks"),
    "stages that it does not have": (lambda body: body["plan"]["stage_to_rank"].extend([0, 1]), "every microbatch"),
    "a bound of a rank that does not exist": (lambda body: body["bound"].update(rank=-1), "rank -1"),
    "a bound below 0": (lambda body: body["bound"].update(bound_ms=-1.0), "bound_ms"),
    "terms that do not add up": (lambda body: body["bound"]["terms_ms"].update(F=1e4), "terms"),
    "another version": (lambda body: body.update(format="zerobubble-certificate/2"), "format"),
}


def _renamed(body: dict[str, Any]) -> None:
    """Slices 1 and 2 change places in all ops."""
    other = {".1": ".2", ".2": ".1"}
    body["plan"]["ops"] = [[op[:-2] + other.get(op[-2:], op[-2:]) for op in row] for row in body["plan"]["ops"]]


CHANGES_OF_SLICES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "slices out of order": (_renamed, "ascending in F and descending in B and W"),
    "fewer slices": (lambda body: body["plan"].update(num_slices=2), "of a slice that does not exist"),
    "more slices": (lambda body: body["plan"].update(num_slices=10**15), "number of slices"),
    "a verdict in place of a number of slices": (
        lambda body: body["plan"].update(slice_counts=[3] * 4, num_slices="1\x1b[2K\rvalid; makespan 1 ms"),
        "number of slices",
    ),
    "no costs of slices": (lambda body: body["plan"]["costs"].pop("slices"), "costs of each"),
    "a slice less": (lambda body: [row.pop() for row in body["plan"]["costs"]["slices"]["wgrad_ms"]], "wgrad_ms"),
    "more keys and values": (lambda body: body["plan"]["costs"]["slices"].update(keys=[0.2] * 6), "memory"),
    "more of their gradients": (lambda body: body["plan"]["costs"]["slices"].update(key_gradients=[0.4] * 6), "memory"),
    "gradients that are no number": (
        lambda body: body["plan"]["costs"]["slices"].update(key_gradients=["1"] * 6),
        "key_gradients",
    ),
}


@pytest.mark.parametrize("change", CHANGES_OF_SLICES)
def test_a_changed_certificate_of_slices_is_refused(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    even = CostModel.uniform(Placement.v(3), comm_ms=0.3, activation_after_backward=0.4).divided(3)
    assert even.slices is not None
    costs = replace(even, slices=replace(even.slices, keys=(0.1,) * 6, key_gradients=(0.1,) * 6))
    plan = build_plan("zbv", num_ranks=3, num_microbatches=4, num_slices=3)
    body = json.loads(json.dumps(certificate(simulate(plan, costs), Objective.MAKESPAN, None)))
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(body))
    assert main(["verify", str(file)]) == 0
    assert "no plan with 3 slices per microbatch within" in capsys.readouterr().out
    make, reason = CHANGES_OF_SLICES[change]
    make(body)
    file.write_text(json.dumps(body))
    assert main(["verify", str(file)]) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_certificate_is_refused(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = _certificate()
    verify.check(copy.deepcopy(body))
    make, reason = CHANGES[change]
    make(body)
    with pytest.raises(verify.RefusedError, match=reason):
        verify.check(copy.deepcopy(body))
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(body))
    assert main(["verify", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "zerobubble-certificate/1"}', "[" * 100_000, "null", "1"])
def test_a_file_that_is_no_certificate_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "certificate.json"
    file.write_text(text)
    assert main(["verify", str(file)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["verify", str(tmp_path / "none")]) == 2


def test_line_breaks_stay_out_of_the_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "two\nlines"
    assert main(["verify", str(file)]) == 2
    body = _certificate()
    body["bound"]["terms_ms"]["two\nlines"] = -1.0
    file.write_text(json.dumps(body))
    assert main(["verify", str(file)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_span_and_makespan_are_not_taken_for_each_other() -> None:
    costs = CostModel.uniform(Placement.linear(4))
    simulation = simulate(build_plan("zb-h2", num_ranks=4, num_microbatches=8), costs)
    assert simulation.makespan_ms > simulation.span_ms
    body = json.loads(json.dumps(certificate(simulation, Objective.SPAN, None))) | {"objective": "makespan"}
    with pytest.raises(verify.RefusedError, match="objective_ms"):
        verify.check(body)


def test_a_worse_price_is_a_lower_bound_still() -> None:
    """Weak duality: the checker believes no price, so another one only lowers the bound."""
    body = _certificate()
    body["bound"]["prices"] = dict.fromkeys(body["bound"]["prices"], 3.0)
    with pytest.raises(verify.RefusedError, match="bound"):
        verify.check(body)
    rank_of, rank = body["plan"]["stage_to_rank"], body["bound"]["rank"]
    costs = verify.read_costs(body["plan"]["costs"], rank_of, [1] * 8)
    for price in (0.0, 1.0, 3.0, 10.0, 27.4, 100.0):
        found = verify.bounds(costs, rank_of, rank, 4.0, dict.fromkeys(body["bound"]["prices"], price), "span", [1] * 8)
        assert len(found) >= 6
        assert all(value <= body["bound"]["bound_ms"] * (1 + 1e-6) for value in found.values())


def test_the_checker_runs_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    arguments = ["--schedule", "auto", "--num-ranks", "3", "--num-microbatches", "6", "--effort", "fast"]
    assert main(["plan", *arguments, "--certificate", str(file)]) == 0
    done = subprocess.run([sys.executable, "-I", "-S", str(CHECKER), str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("valid; makespan ")


def test_lengths_from_standard_input_are_read_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("512,4096,700"))
    arguments = ["--schedule", "zbv", "--num-ranks", "2", "--microbatch-tokens", "-", "--certificate", "-"]
    assert main(["plan", *arguments]) == 0
    value, bound = verify.check(json.loads(capsys.readouterr().out))
    assert 0 < bound <= value


def test_the_checker_imports_nothing_of_the_planner() -> None:
    tree = ast.parse(CHECKER.read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).partition(".")[0] for name in modules} <= sys.stdlib_module_names
