"""The page of a report, and the checks that it must pass."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tools.benchmarks.one_gpu import host, kernels, passes, ranks, slices, transfers
from tools.benchmarks.reports import Row, markdown_table

__all__ = ["checks", "page"]

_BESIDE = {"B": transfers, "C": host, "S": slices, "K": kernels}
WHOLE_LIMIT = 1.02
"""Most that a rank's iteration takes alone, over the sum of its ops."""
MEMORY_LIMIT = 0.05
"""Most by which activations differ from the plan's."""
_INTRODUCTION = (
    "**Composed from measured passes, not measured as a pipeline.** Each rank's real program ran alone on one device, and the "
    "iteration of the pipeline follows from the plan's dependencies. It says nothing about NCCL's own latency, about ranks that "
    "are late at random, about the power that eight busy cards share, or about data-parallel replicas."
)


def page(report: Row) -> str:
    """The page in Markdown."""
    done, card = report["steps"], report["steps"].get("0", {})
    where = f"{card.get('device', 'CPU')}, torch {card.get('torch')}, megatron-core {card.get('megatron_core')}, {report['date']}"
    parts = ["# Every rank alone on one GPU", "", _INTRODUCTION, ""]
    if not report["is_gpu"]:
        parts += ["**A rehearsal on a CPU with a tiny model: not run on a GPU.** Its times say nothing about a GPU.", ""]
    parts += ["```", report["command"], "```", "", f"{where}."]
    if "E" in done:
        parts += ["", *_composed(done["E"], done["D"])]
    if "D" in done:
        parts += ["", *ranks.lines(done["D"])]
        found = list(checks(report))
        parts += ["", *(found or ["- no check could be made"])]
    if "A" in done:
        parts += ["", *passes.lines(done["A"])]
    for step, module in _BESIDE.items():
        if step in done:
            parts += ["", *module.lines(done[step])]
    parts += [f"\n- step {step} is missing: {why}" for step, why in report["failed"].items()]
    return "\n".join(parts) + "\n"


def checks(report: Row) -> Iterator[str]:
    """One line per check, with MISSED where it fails: the ranks' whole over the sum of ops, and memory beside the plan's."""
    runs = report["steps"]["D"]["runs"]
    if report["is_gpu"]:
        alone = {_name(run): statistics.median(_whole(each) for each in run["iterations"]) for run in runs}
        ours = {name: ratio for name, ratio in alone.items() if not name.startswith("1F1B, with its wait")}
        worst = max(ours, key=lambda name: ours[name])
        yield _line("a rank's iteration over the sum of its ops", f"{ours[worst]:.3f} ({worst})", WHOLE_LIMIT, ours[worst])
    apart = {_name(run): abs(run["held_bytes"] / run["planned_bytes"] - 1) for run in runs if "planned_bytes" in run}
    if apart:
        worst = max(apart, key=lambda name: apart[name])
        yield _line("activations apart from the plan's", f"{100 * apart[worst]:.2f} % ({worst})", MEMORY_LIMIT, apart[worst])


def _line(what: str, measured: str, limit: float, value: float) -> str:
    return f"- {what}: at most {measured}, goal {limit}: {'met' if value <= limit else 'MISSED'}"


def _name(run: Row) -> str:
    return f"{run['contender']}, rank {run['rank']}"


def _whole(iteration: Row) -> float:
    return float(iteration["whole_ms"] / sum(ms for *_, ms in iteration["ops"]))


def _composed(row: Row, alone: Row) -> list[str]:
    heads = ("p", "link, ms", "schedule", "iteration, ms", "over 1F1B", "over the best interleaved")
    table = []
    for each in row["rows"]:
        for one in each["contenders"]:
            cells = [str(each["num_ranks"]), f"{each['link_ms']:g}", one["name"], f"{one['ms'][0]:.1f}"]
            table.append(cells + [_interval(one.get(name)) for name in ("over_1f1b", "over_interleaved")])
    return [
        "## The pipeline, composed",
        "",
        f"The passes of an iteration without the optimizer step, m = {alone['num_microbatches'] // alone['num_ranks']} p. Speed "
        "over megatron-core's 1F1B without its device-wide wait, and over the faster of its interleaved 1F1Bs: measured passes, "
        f"composed. In brackets 95 % of {row['draws']} compositions, each with pass times and gaps drawn anew from the measured "
        "ones. A link of 0 ms is free, 0.096 ms is NVLink (33.5 MB at 350 GB/s), 0.75 ms InfiniBand; passes beside posted "
        "receives are slower by what was measured below. megatron-core's interleaved 1F1B gets the same free overlap of "
        "messages and passes as ours.",
        "",
        *markdown_table(heads, table),
    ]


def _interval(found: list[float] | None) -> str:
    return "" if found is None else f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"
