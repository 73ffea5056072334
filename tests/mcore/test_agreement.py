"""Ranks that were given different things, or found different plans, all raise the same line before anything runs."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.loop_options import MicrobatchLengths, Seeds
from megatron.zerobubble.mcore import agreement, zb_schedules
from megatron.zerobubble.mcore.agreement import Record, check_same, differences
from megatron.zerobubble.mcore.stock_loop import same_options
from megatron.zerobubble.plan.registry import build_plan
from tests.support.gpt import Case, Trainer
from tests.support.plans import reordered
from tests.support.ranks import RankPool
from tests.support.stock import tokens_of, train, train_unequal, with_flags
from tests.support.unequal import UnequalCase, plan_differently

TWO = "--num-layers 4 --hidden-size 32 --train-iters 2 --pipeline-model-parallel-size 2"


def records(*values: dict[str, str]) -> list[Record]:
    return [Record(rank, f"node{rank // 2}", each) for rank, each in enumerate(values)]


def test_what_differs_is_named_with_each_value_and_host() -> None:
    own = {"--lr": "0.1", "--seed": "1"}
    found = differences(records(own, own, own | {"--lr": "0.2"}, own | {"--lr": "0.2"}))
    assert found == ["--lr is 0.1 on node0 (rank 0 and 1 more) and 0.2 on node1 (rank 2 and 1 more)"]


def test_an_option_that_another_version_lacks_is_named() -> None:
    assert differences(records({}, {"--new": "1"})) == ["--new is unknown on node0 (rank 0) and 1 on node0 (rank 1)"]


def on_threads(*functions: Callable[[Any], None]) -> list[str]:
    """Call each function on a thread of its own with one store; the errors, empty if there is none."""
    store = dist.HashStore()
    is_quick = mock.patch.object(agreement, "_LEAVE_S", 0.0)

    def message(function: Callable[[Any], None]) -> str:
        try:
            function(store)
        except ConfigError as error:
            return str(error)
        return ""

    with is_quick, ThreadPoolExecutor(len(functions)) as threads:
        return list(threads.map(message, functions))


def comparing(rank: int, value: str, *, num_ranks: int = 3) -> Callable[[Any], None]:
    def compare(store: Any) -> None:
        check_same(store, {"--lr": value}, rank=rank, ranks=range(num_ranks), remedy="give one")

    return compare


def test_ranks_that_agree_go_on() -> None:
    assert on_threads(*(comparing(rank, "1") for rank in range(3))) == ["", "", ""]


def test_every_rank_raises_the_same_line() -> None:
    found = on_threads(comparing(0, "1"), comparing(1, "1"), comparing(2, "2"))
    host = socket.gethostname()
    assert (
        found[0] == f"ranks were not given the same: --lr is 1 on {host} (rank 0 and 1 more) and 2 on {host} (rank 2); give one"
    )
    assert set(found) == {found[0]}


def test_a_rank_that_does_not_come_is_named() -> None:
    with mock.patch.object(agreement, "_PATIENCE_S", 0.2):
        found = on_threads(comparing(0, "1"), comparing(1, "1"))
    assert found[0] == found[1]
    assert found[0].startswith("of 3 ranks these have not come to compare what they were given: 2; see the output of their hosts")


def test_a_first_rank_that_does_not_come_is_named() -> None:
    with mock.patch.object(agreement, "_READ_S", 0.0), mock.patch.object(agreement, "_PATIENCE_S", 0.2):
        (found,) = on_threads(comparing(1, "1"))
    assert found.startswith("rank 0, which compares what ranks were given, has not come")


# -- plans ------------------------------------------------------------------------------------------------------------------

CASE = Case("zbv", 2, 4, num_chunks=2)


def _run_other_plan(rank: int) -> tuple[str, float]:
    """What a run raises in which the last pipeline rank has another plan, and the norm of its first weight's gradient."""
    trainer = Trainer(CASE)
    schedule = trainer.schedule
    if schedule._rank == 1:
        plan_for = schedule._plan_for
        schedule._plan_for = lambda num_microbatches: reordered(plan_for(num_microbatches))
    with pytest.raises(ConfigError) as caught:
        trainer.forward_backward(0)
    norm = float(sum(each.main_grad.double().square().sum() for chunk in schedule._chunks for each in chunk.parameters()) ** 0.5)
    trainer.close()
    return str(caught.value), norm


def test_different_plans_of_a_pipeline_are_refused_on_all_of_its_ranks(four_ranks: RankPool) -> None:
    found = four_ranks.run(_run_other_plan)
    texts = [said for said, _ in found]
    assert texts[0] == texts[2]
    assert texts[1] == texts[3]
    assert [norm for _, norm in found] == [0.0] * 4, "before the first pass"
    for text, ranks in ((texts[0], (0, 2)), (texts[1], (1, 3))):
        host, plan = socket.gethostname(), r"zbv for 4 microbatches \([0-9a-f]{32}\)"
        line = (
            rf"ranks were not given the same: the plan about to run is {plan} on {host} \(rank {ranks[0]}\) and {plan} on {host} "
        )
        assert re.match(line + rf"\(rank {ranks[1]}\); give all ranks the same plan file", text), text


def _count_comparisons(rank: int) -> list[int]:
    trainer = Trainer(CASE)
    counts = []
    with mock.patch.object(zb_schedules, "check_same_program", wraps=zb_schedules.check_same_program) as compared:
        for iteration in range(3):
            trainer.forward_backward(iteration)
            counts.append(compared.call_count)
        trainer.schedule.replan(trainer.schedule._plan_for)
        trainer.forward_backward(3)
        counts.append(compared.call_count)
    trainer.close()
    return counts


def test_a_known_plan_is_not_compared_again(four_ranks: RankPool) -> None:
    assert four_ranks.run(_count_comparisons) == [[1, 1, 1, 2]] * 4


def test_unequal_plans_that_differ_are_refused(four_ranks: RankPool) -> None:
    found = four_ranks.run(plan_differently, UnequalCase("zb-h1", 4, 6))
    line = "ConfigError: ranks 0 and 3 have planned an iteration of 6 microbatches of unequal length differently: give all ranks"
    assert [text[: len(line)] for text in found] == [line] * 4


# -- install ----------------------------------------------------------------------------------------------------------------


def other_tokens_of(text: torch.Tensor) -> int:
    """As `tokens_of`, by another name."""
    return tokens_of(text)


def _install(rank: int, of_all: dict[str, Any], of_last: dict[str, Any], versions: dict[str, str]) -> str:
    """What a stock loop raises, or the empty string; the last rank is given other options, or has other packages."""
    is_other = rank == 3
    options = of_all | (of_last if is_other else {})
    own = agreement.versions() | {name: version for name, version in versions.items() if is_other}
    with mock.patch.object(same_options, "versions", return_value=own):
        try:
            if "lengths" in options:
                train_unequal(rank, f"{TWO} --num-microbatches 4", options)
            else:
                train(rank, f"{TWO} --num-microbatches 4", **options)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("of_all", "of_last", "values"),
    [
        ({"schedule": "zb-h1"}, {"schedule": "zb-h2"}, ("schedule", "zb-h1", "zb-h2")),
        ({"schedule": "zb"}, {"schedule": "zb", "memory_limit": 1.5}, ("memory_limit", "None", "1.5")),
        (*(with_flags(zero_bubble_max_pending_backward=k) for k in "34"), ("max_pending_backward", "3", "4")),
        ({"schedule": "zb-h1", "seeds": Seeds(weights=1)}, {"seeds": Seeds(weights=2)}, ("weights of Seeds", "1", "2")),
        (
            {"schedule": "zb-h1", "lengths": MicrobatchLengths(tokens_of)},
            {"lengths": MicrobatchLengths(other_tokens_of)},
            ("tokens of MicrobatchLengths", "tests.support.stock.tokens_of", "tests.mcore.test_agreement.other_tokens_of"),
        ),
    ],
    ids=["schedule", "memory_limit", "max_pending_backward", "seed", "lengths"],
)
@pytest.mark.sampled(0.4)
def test_other_options_of_install_are_refused_on_all_ranks(
    four_ranks: RankPool, of_all: dict[str, Any], of_last: dict[str, Any], values: tuple[str, str, str]
) -> None:
    found = four_ranks.run(_install, of_all, of_last, {})
    host, (name, first, last) = socket.gethostname(), values
    assert len(set(found)) == 1
    assert f"{name} is {first} on {host} (rank 0 and 2 more) and {last} on {host} (rank 3)" in found[0]
    assert found[0].endswith("call megatron.zerobubble.install with the same options on every rank, and install the same packages"
        " on every host")  # fmt: skip


def test_another_plan_file_under_install_is_refused(four_ranks: RankPool, tmp_path: Path) -> None:
    plan = build_plan("zb-h1", num_ranks=2, num_microbatches=4)
    for name, each in {"a": plan, "b": reordered(plan)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(each.to_json())
    (tmp_path / "b" / "same.json").write_text(plan.to_json())
    paths = [{"plan": str(tmp_path / name)} for name in ("a/plan.json", "b/plan.json", "b/same.json")]
    found = four_ranks.run(_install, paths[0], paths[1], {})
    assert len(set(found)) == 1
    assert re.search(r"the same: plan is a file \([0-9a-f]{32}\) on \S+ \(rank 0 and 2 more\) and a file \(\w{32}\) on", found[0])
    assert four_ranks.run(_install, paths[0], paths[2], {}) == [""] * 4, "the content counts, not the path"


def test_other_packages_under_install_are_refused(four_ranks: RankPool) -> None:
    found = four_ranks.run(_install, {"schedule": "zb-h1"}, {}, {"the version of torch": "1.0"})
    assert len(set(found)) == 1
    assert f"the same: the version of torch is {torch.__version__} on " in found[0]
    assert "and 1.0 on" in found[0]
