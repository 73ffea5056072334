"""The loss and the report of a microbatch, from those of its slices."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.slices.losses import SlicedLosses
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from tests.support.ranks import RankPool
from tests.support.sliced import SlicedCase, SlicedTrainer

PARTS = SliceOptions(lengths=(3, 5)).parts(8, 2)


def test_the_loss_of_slices_is_that_of_the_microbatch() -> None:
    values, counted = [torch.tensor([2.0, 4.0], requires_grad=True), torch.tensor([6.0], requires_grad=True)], (2, 1)
    losses, outputs = SlicedLosses([SliceOptions(lengths=(2, 1)).parts(3, 2)], [1], per_token=False), []
    for value, count in zip(values, counted, strict=True):

        def loss_function(output: Tensor, count: int = count) -> Any:
            total, number = output.sum(), torch.tensor(count)
            pair = torch.stack([total.detach(), number])
            return total, number, {"pair": pair, "tuple": (total.detach().clone(), count), "mean": total.detach() / count}

        _, of_slice = losses.around(lambda value=value, function=loss_function: (value, function), 0)()
        total, divisor, _ = of_slice(value)
        assert int(divisor) == 1, "megatron-core divides by it"
        outputs.append(total)
    (report,) = losses.report(0)
    assert report["pair"].tolist() == [12, 3]
    assert [float(each) for each in report["tuple"]] == [12, 3]
    assert float(report["mean"]) == 4
    for output in reversed(outputs):
        losses.scaled(0, output).backward()
    assert all(torch.equal(value.grad, torch.full_like(value, 1 / 3)) for value in values)


@pytest.mark.parametrize(("result", "got"), [((torch.zeros(1), {}), "2 values"), (torch.zeros(1), "a Tensor")])
def test_a_mean_loss_is_refused(result: Any, got: str) -> None:
    _, of_slice = SlicedLosses([PARTS], [1], per_token=False).around(lambda: (None, lambda _: result), 0)()
    with pytest.raises(ConfigError, match=rf"must return \(sum of the losses, number of tokens, report\), not {got}"):
        of_slice(None)


Pair = namedtuple("Pair", ["total", "number"])
PER_TOKEN = torch.arange(16.0).reshape(2, 8) / 16
COUNTED = (4, 8)
"""Tokens that count, of the slices."""
TOTALS = (6.0, 3.0)


def reported(*reports: Any, counted: tuple[int, ...] = COUNTED) -> Any:
    """The report of a microbatch whose slices report these."""
    losses = SlicedLosses([PARTS], [2], per_token=False)
    for report, number, total in zip(reports, counted, TOTALS, strict=True):
        result = torch.tensor(total), torch.tensor(number), report
        _, of_slice = losses.around(lambda result=result: (None, lambda: result), 0)()
        assert losses.report(0) == []
        of_slice()
    (found,) = losses.report(0)
    return found


@pytest.mark.parametrize(
    "tensor",
    [PER_TOKEN, PER_TOKEN > 0.5, (9 * PER_TOKEN).long(), torch.arange(64.0).reshape(2, 8, 4)],
    ids=["floats", "bools", "integers", "rows"],
)
def test_tensors_with_something_per_token_are_put_together(tensor: Tensor) -> None:
    for wrap in (lambda each: {"a": each}, lambda each: {"a": {"b": [each]}}, lambda each: (each,)):
        found = reported(wrap(tensor[:, :3]), wrap(tensor[:, 3:]))
        assert str(found) == str(wrap(tensor))


def test_pairs_of_a_sum_and_a_number_are_added() -> None:
    found = reported(
        {"tensor": torch.tensor([6.0, 4.0]), "int": torch.tensor([2, 4]), "tuple": (torch.tensor(6.0), 4), "named": Pair(1.0, 4)},
        {"tensor": torch.tensor([3.0, 8.0]), "int": torch.tensor([1, 8]), "tuple": (torch.tensor(3.0), 8), "named": Pair(2.0, 8)},
    )
    assert (found["tensor"].tolist(), found["int"].tolist()) == ([9, 12], [3, 12])
    assert (found["tuple"], found["named"]) == ((9, 12), Pair(3, 12))


def test_single_floats_are_means_over_tokens() -> None:
    found = reported(
        {
            "float": 1.0,
            "tensor": torch.tensor(1.0),
            "one": torch.tensor([[4.0]]),
            "half": torch.tensor(3.0, dtype=torch.bfloat16),
        },
        {
            "float": 4.0,
            "tensor": torch.tensor(4.0),
            "one": torch.tensor([[1.0]]),
            "half": torch.tensor(0.0, dtype=torch.bfloat16),
        },
    )
    assert found == {"float": 3.0, "tensor": torch.tensor(3.0), "one": torch.tensor([[2.0]]), "half": torch.tensor(1.0)}
    assert found["one"].shape == (1, 1)
    assert found["half"].dtype is torch.bfloat16
    assert reported(float("nan"), 2.0, counted=(0, 5)) == 2.0, "a quotient of zeros, of a slice without tokens"


def test_sums_that_the_loss_function_also_returns_are_added() -> None:
    found = reported(*({"loss": torch.tensor(total), "n": float(number)} for total, number in zip(TOTALS, COUNTED, strict=True)))
    assert found == {"loss": torch.tensor(9.0), "n": 12.0}
    assert reported(6.0, 3.0, counted=(1, 1)) == 4.5, "of a slice of one token the mean is the sum, and means are the rule"


def test_what_is_the_same_in_every_slice_stays() -> None:
    assert reported({"name": "a", "none": None}, {"name": "a", "none": None}) == {"name": "a", "none": None}


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (3, 4, "'x' of the report is a int"),
        (True, True, "'x' of the report is a bool"),
        (torch.tensor(3), torch.tensor(4), r"'x' of the report is a tensor of int64 with shape \(\)"),
        (torch.ones(3), torch.ones(3), r"tensor of float32 with shape \(3,\), of 2 rows of 3 tokens"),
        (PER_TOKEN[:, :2], PER_TOKEN[:, :2], r"shape \(2, 2\)"),
        (PER_TOKEN[:, :3].T, PER_TOKEN[:, 3:].T, r"shape \(3, 2\)"),
        (PER_TOKEN[:1, :3], PER_TOKEN[:1, 3:], r"shape \(1, 3\)"),
        ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0), "is 3 values"),
        ([], [PER_TOKEN[:, 3:]], "is 0 values|must have|not in another"),
        ("a", "b", "is a str"),
        (1.0, torch.tensor(1.0), "is a float in one slice and not in another"),
        ({"a": 1.0}, {"b": 1.0}, "must have the same names in every slice"),
    ],
)
def test_a_report_without_a_rule_is_refused(first: Any, second: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        reported({"x": first}, {"x": second})


@dataclass(frozen=True)
class ReportsCase(SlicedCase):
    """A loop that reports what RL loops do."""


class _ReportsTrainer(SlicedTrainer, trains=ReportsCase):
    def forward_step(self, iterator: Any, model: Any) -> tuple[Tensor, Any]:
        output, loss_function = super().forward_step(iterator, model)

        def with_reports(per_token: Tensor) -> tuple[Any, ...]:
            total, number, report = loss_function(per_token)
            mean = total.detach() / number
            more = {"mean": mean, "sum": total.detach().clone(), "loss itself": total.detach(), "pair": (total.detach(), number)}
            return total, number, report | more | {"log_probs": -per_token.detach()}

        return output, with_reports

    def loss_of(self, result: Any) -> Any:
        return {name: [*map(float, each)] if isinstance(each, tuple) else each.tolist() for name, each in result.items()}


def reports_of(rank: int, case: ReportsCase) -> list[Any]:
    """The reports of the microbatches of one iteration."""
    trainer = case.trainer()
    try:
        return trainer.forward_backward(0)
    finally:
        trainer.close()


REPORTS = [
    ReportsCase("zb-h1", 2, 2, num_slices=3),
    ReportsCase("zbv", 2, 2, num_chunks=2, num_slices=2),
    ReportsCase("zb-h1", 2, 3, num_slices=2, per_token_loss=True),
]


@pytest.mark.parametrize("case", REPORTS, ids=str)
def test_reports_of_slices_are_those_of_whole_microbatches(four_ranks: RankPool, case: ReportsCase) -> None:
    cut, whole = ([each for each in four_ranks.run(reports_of, own) if each] for own in (case, replace(case, num_slices=1)))
    assert len(cut) == len(whole) > 0
    for own, expected in zip(cut, whole, strict=True):
        assert len(own) == case.num_microbatches
        for report, reference in zip(own, expected, strict=True):
            assert report.keys() == {"lm loss", "log_probs", "mean", "sum", "loss itself", "pair"}
            for name in report:
                torch.testing.assert_close(torch.tensor(report[name]), torch.tensor(reference[name]))
