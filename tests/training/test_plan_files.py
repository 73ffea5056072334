"""Plan files: one that fits runs, one that does not is an error with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError, DeadlockError, PlanError, UserError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import build_plan, initial_plan
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from tests.training.test_arguments import BASE, settings

with quiet_third_parties():
    from megatron.zerobubble.mcore.planning.plan_file import PlanFileWriter

RUN = BASE + "--pipeline-model-parallel-size 4 --global-batch-size 6 "
_TIMES = {name: [1.0] * 8 for name in ("forward_ms", "backward_ms", "wgrad_ms")}
SMALL = _TIMES | {"comm_ms": 0.0, "activation": [0.4] * 8, "activation_after_backward": [0.2] * 8}
"""Costs under which ZBV holds 0.8: a stage less than half a rank's share, as where embedding and head hold the rest."""
FOUR_STAGES = {name: values[:4] if isinstance(values, list) else values for name, values in SMALL.items()}


def _file(tmp_path: Path, change: Callable[[dict[str, Any]], None] = lambda body: None, name: str = "zbv") -> str:
    body = json.loads(build_plan(name, num_ranks=4, num_microbatches=6).to_json())
    change(body)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(body))
    return f"--zero-bubble-load-plan {file} "


@pytest.mark.parametrize("flags", ["", "--zero-bubble-v-schedule", "--zero-bubble-schedule v-min"])
def test_a_plan_that_fits_runs(tmp_path: Path, flags: str) -> None:
    def reorder(body: dict[str, Any]) -> None:
        rank = body["ops"][3]
        later = max(at for at, op in enumerate(rank) if op[0] == "3" and rank[at - 1].startswith("4W") and op[1] == "W")
        rank[later], rank[later - 1] = rank[later - 1], rank[later]

    made = settings(RUN + _file(tmp_path, reorder) + flags, base="")
    assert made.zero_bubble.schedule == ("v-min" if "v-min" in flags else "zbv")
    assert made.num_chunks == 2
    plan = initial_plan(made.schedule_spec, 6)
    assert plan == made.zero_bubble.plan
    assert plan != build_plan("zbv", num_ranks=4, num_microbatches=6)
    assert initial_plan(made.schedule_spec, 7).num_microbatches == 7, "other numbers of microbatches are generated"
    assert made.zero_bubble.timed_iterations is None, "the best plan is there already"
    again = settings(RUN + _file(tmp_path) + flags + " --zero-bubble-replan-interval 50", base="")
    assert again.zero_bubble.timed_iterations == (100, 110)


def test_a_loaded_plan_is_checked_with_the_costs_it_was_made_for(tmp_path: Path) -> None:
    kept = _file(tmp_path, lambda body: body.update(costs=SMALL)) + "--zero-bubble-memory-limit 0.9"
    assert settings(RUN + kept, base="").zero_bubble.plan is not None


def _deadlock(body: dict[str, Any]) -> None:
    row = body["ops"][0]
    row.insert(0, row.pop(row.index("7F0")))


@pytest.mark.parametrize(
    ("change", "flags", "kind", "message"),
    [
        (lambda body: body.update(format="zerobubble-plan/7"), "", PlanError, "zerobubble-plan/7"),
        (lambda body: body["ops"][1].pop(), "", PlanError, "plan.json: .*3|6"),
        (_deadlock, "", DeadlockError, "plan.json: "),
        (lambda body: None, "--enable-zero-bubble", ConfigError, r"0, 1, 2, 3, 3, 2, 1, 0 \(V placement\).* on 0, 1, 2, 3"),
        (lambda body: None, "--global-batch-size 8", ConfigError, "for 6 microbatches, this run has 8"),
        (
            lambda body: None,
            "--pipeline-model-parallel-size 2",
            ConfigError,
            r"on 2 pipeline ranks on 0, 1, 1, 0",
        ),
        (lambda body: body.update(schedule="mine"), "", ConfigError, "plan.json: its schedule 'mine' is unknown; choose from"),
        (lambda body: None, "--zero-bubble-memory-limit 0.9", PlanError, r"memory peaks at 1\.0000 and the limit is 0\.9000"),
        (lambda body: body.update(costs=SMALL), "--zero-bubble-memory-limit 0.7", PlanError, r"memory peaks at 0\.8000 and the"),
        (lambda body: body.update(costs={}), "", PlanError, "plan.json: costs: 'forward_ms' must be a list"),
        (lambda body: body.update(costs=FOUR_STAGES), "", PlanError, "plan.json: the costs are for 4 stages and the plan has 8"),
        (lambda body: None, "--zero-bubble-schedule stock", ConfigError, "its schedule 'stock' is unknown"),
        (
            lambda body: body.update(format="zerobubble-plan/2", assignment=[1, 0, 2, 3, 4, 5]),
            "",
            PlanError,
            "plans microbatches of certain lengths, and a run plans each iteration for its own",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], flags: str, kind: type[UserError], message: str
) -> None:
    with pytest.raises(kind) as refused:
        settings(RUN + _file(tmp_path, change) + flags, base="")
    assert re.search(message, str(refused.value))
    assert re.match(r"--zero-bubble-load-plan \S+/plan\.json: ", str(refused.value)), "its end, if the path is long"


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--zero-bubble-load-plan .*none.json: No such file"):
        settings(RUN + f"--zero-bubble-load-plan {tmp_path}/none.json", base="")
    (tmp_path / "text").write_text("not a plan")
    with pytest.raises(PlanError, match=r"--zero-bubble-load-plan .*text: "):
        settings(RUN + f"--zero-bubble-load-plan {tmp_path}/text", base="")
    with pytest.raises(ConfigError, match=r"--zero-bubble-save-plan .*: .*/no is not a writable directory"):
        settings(RUN + f"--zero-bubble-v-schedule --zero-bubble-save-plan {tmp_path}/no/plan.json", base="")
    with pytest.raises(ConfigError, match="the stock schedule has no plan"):
        settings(RUN + f"--zero-bubble-save-plan {tmp_path}/plan.json", base="")


@pytest.mark.parametrize(
    ("flags", "timed"),
    [
        ("--enable-zero-bubble", (100, 110)),
        ("--zero-bubble-v-schedule --zero-bubble-pipeline-timers-start-iter 7", (7, 17)),
        ("--zero-bubble-schedule v-min --zero-bubble-pipeline-timers-end-iter 105", (100, 105)),
        ("--zero-bubble-max-pending-backward 2p", (100, 110)),
        ("--zero-bubble-v-schedule --zero-bubble-planning-seconds 0", None),
        ("--zero-bubble-v-schedule --zero-bubble-memory-limit 60GiB", (2, 4)),
        ("--enable-zero-bubble --zero-bubble-memory-limit auto --zero-bubble-pipeline-timers-start-iter 5", (5, 7)),
        ("--zero-bubble-schedule zb-h1", None),
        ("--zero-bubble-schedule zb-h1 --zero-bubble-overlap-moe", (2, 4)),
        ("--zero-bubble-schedule 1f1b --zero-bubble-overlap-moe --zero-bubble-pipeline-timers-start-iter 5", (5, 7)),
        ("--zero-bubble-v-schedule --zero-bubble-overlap-moe --zero-bubble-planning-seconds 0", (2, 4)),
        ("--zero-bubble-schedule 1f1b", None),
        ("", None),
    ],
)
def test_profiled_iterations(flags: str, timed: tuple[int, int] | None) -> None:
    assert settings(RUN + flags, base="").zero_bubble.timed_iterations == timed


@pytest.mark.parametrize(
    ("flags", "schedule", "limit"),
    [
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half", "v-half", None),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup min", "v-min", None),
        ("--zero-bubble-v-schedule --zero-bubble-memory-limit 0.75", "zbv", 0.75),
        ("--enable-zero-bubble --zero-bubble-memory-limit 1.5", "zb", 1.5),
        ("--zero-bubble-schedule v-min --zero-bubble-memory-limit 0.6", "v-min", 0.6),
        ("--zero-bubble-v-schedule --zero-bubble-memory-limit 60GiB", "zbv", 0.25),
        ("--enable-zero-bubble --zero-bubble-memory-limit auto", "zb", 0.25),
    ],
)
def test_memory(flags: str, schedule: str, limit: float | None) -> None:
    spec = settings(RUN + flags, base="").schedule_spec
    assert (spec.name, spec.memory_limit) == (schedule, limit)
    plan = initial_plan(spec, 6)
    assert max(peak_memory(plan, CostModel.uniform(plan.placement))) <= (limit or {"v-half": 0.75, "v-min": 0.5}[schedule])


def test_a_plan_file_that_cannot_be_written_any_more_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = simulate(build_plan("zbv", num_ranks=4, num_microbatches=6), CostModel.from_json(SMALL))
    file = tmp_path / "plan.json"
    writer = PlanFileWriter(str(file))
    file.mkdir()
    for _ in range(2):
        writer.write_found(found)
    (warning,) = caplog.messages
    assert warning == f"--zero-bubble-save-plan {file} cannot be written: Is a directory"
    file.rmdir()
    writer.write_found(found)
    assert json.loads(file.read_text())["schedule"] == "zbv"
