"""The page of a report, and the checks that it must pass."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tools.benchmarks.one_gpu import ranks
from tools.benchmarks.one_gpu.ranks import median_ops
from tools.benchmarks.reports import Row, markdown_table
from tools.docs.wrap import wrapped

__all__ = ["checks", "page"]

WHOLE_LIMIT = 1.02
"""Most that a rank's iteration takes alone, over the sum of its ops."""
SPLIT_LIMIT = 1.02
"""Most that B and W take beside the full backward."""
MEMORY_LIMIT = 0.05
"""Most by which activations differ from the plan's."""
_INTRODUCTION = (
    "**Composed from measured passes, not measured as a pipeline.** Each rank's real program ran alone on one device, and the "
    "iteration of the pipeline follows from the plan's dependencies. It says nothing about NCCL's own latency, about ranks that "
    "are late at random, about the power that eight busy cards share, or about data-parallel replicas."
)


def page(report: Row) -> str:
    """The page in Markdown."""
    where = f"{report['device']}, torch {report['torch']}, megatron-core {report['megatron_core']}, {report['date']}"
    parts = ["# Every rank alone on one GPU", "", _INTRODUCTION, ""]
    if not report["is_gpu"]:
        parts += ["**A rehearsal on a CPU with a tiny model in fp32: not run on a GPU.** Its times say nothing about a GPU.", ""]
    parts += ["```", report["command"], "```", "", f"{where}."]
    parts += ["", *headline(report), "", *_composed(report["composed"], report["ranks"]), "", *ranks.lines(report["ranks"])]
    parts += ["", *(list(checks(report)) or ["- no check could be made"])]
    parts += [f"- {name} is missing: {why}" for name, why in report["ranks"]["failed"].items()]
    return wrapped("\n".join(parts) + "\n")


def checks(report: Row) -> Iterator[str]:
    """One line per check, with MISSED where it fails: gaps between ops, B and W over the full backward, memory."""
    runs = report["ranks"]["runs"]
    if report["is_gpu"]:
        alone = {_name(run): statistics.median(_whole(each) for each in run["iterations"]) for run in runs}
        ours = {name: ratio for name, ratio in alone.items() if not name.startswith("1F1B, with its wait")}
        if ours:
            worst = max(ours, key=lambda name: ours[name])
            yield _line("a rank's iteration over the sum of its ops", f"{ours[worst]:.3f} ({worst})", WHOLE_LIMIT, ours[worst])
        split = dict(_split(runs))
        if split:
            worst_rank = max(split, key=lambda rank: split[rank])
            what, found = "B + W of ZB-H1 over the full backward of 1F1B", f"{split[worst_rank]:.3f} (rank {worst_rank})"
            yield _line(what, found, SPLIT_LIMIT, split[worst_rank])
    apart = {_name(run): abs(run["held_bytes"] / run["planned_bytes"] - 1) for run in runs if "planned_bytes" in run}
    if apart:
        worst = max(apart, key=lambda name: apart[name])
        yield _line("activations apart from the plan's", f"{100 * apart[worst]:.2f} % ({worst})", MEMORY_LIMIT, apart[worst])


def _split(runs: Sequence[Row]) -> Iterator[tuple[int, float]]:
    """(rank, time of a B and a W under ZB-H1 over that of a full backward under 1F1B), medians."""
    by_name = {(run["contender"], run["rank"]): median_ops(run) for run in runs}
    for (name, rank), split in by_name.items():
        whole = by_name.get(("1F1B", rank))
        if name == "ZB-H1" and whole is not None:
            yield rank, (split["B"] + split["W"]) / whole["BW"]


def _line(what: str, measured: str, limit: float, value: float) -> str:
    return f"- {what}: at most {measured}, goal {limit}: {'met' if value <= limit else 'MISSED'}"


def _name(run: Row) -> str:
    return f"{run['contender']}, rank {run['rank']}"


def _whole(iteration: Row) -> float:
    return float(iteration["whole_ms"] / sum(map(sum, iteration["ops_ms"].values())))


def _composed(row: Row, alone: Row) -> list[str]:
    """The section of the composed pipeline."""
    per_rank, links = alone["num_microbatches"] // alone["num_ranks"], row["links_ms"]
    above = {
        name: max(each["peak_bytes"] - each["state_bytes"] for each in alone["runs"] if each["contender"] == name)
        for name in {each["contender"] for each in alone["runs"] if "peak_bytes" in each}
    }
    text = [
        "## The pipeline, composed",
        "",
        f"The passes of an iteration without the optimizer step, m = {per_rank} p: measured passes, composed. Speed is over "
        "megatron-core's 1F1B without its device-wide wait, and over the faster of its interleaved 1F1Bs. In brackets 95 % of "
        f"{row['draws']} compositions, whose pass times and gaps are drawn anew from the measured ones. Free: messages take no "
        f"time and hold nothing. On NVLink one takes {links['NVLink']:g} ms (33.5 MB at 350 GB/s), on InfiniBand "
        f"{links['InfiniBand']:g} ms (at 45 GB/s); while a transfer is resident on a rank, with {row['ctas']} CTAs, passes are "
        "slower by what an H200 [lost beside held SMs](settled.md#one-gpu-passes-held-sms-the-host-slices). "
        "Receives are posted where our programs post them, and where megatron-core's interleaved 1F1B posts them; its 1F1B "
        "exchanges messages between two passes. Memory is the allocator's peak above weights, gradients and optimizer state, on "
        "the rank that takes most.",
    ]
    for num_ranks, alike in dict.fromkeys((each["num_ranks"], each["alike"]) for each in row["rows"]):
        found = [each for each in row["rows"] if (each["num_ranks"], each["alike"]) == (num_ranks, alike)]
        names = [each["name"] for each in found[0]["contenders"]]
        table = []
        for name in names:
            own = {each["link"]: next(one for one in each["contenders"] if one["name"] == name) for each in found}
            memory = above.get(name.partition(", planned")[0]) if num_ranks == alone["num_ranks"] else None
            cells = [name, "" if memory is None else f"{memory / 2**30:.1f}", f"{own['NVLink']['ms'][0]:.0f}"]
            table.append(cells + [_interval(own[link].get(to)) for to in ("over_1f1b", "over_interleaved") for link in links])
        where = "all ranks as inner ones, without embedding and head" if alike else "embedding and head where they are"
        bases = (f"over {base}: {link}" for base in ("1F1B", "interleaved") for link in links)
        heads = ("schedule", "memory, GiB", "NVLink, ms", *bases)
        text += ["", f"p = {num_ranks}, {where}:", "", *markdown_table(heads, table)]
    return text


def _interval(found: list[float] | None) -> str:
    return "" if found is None else f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"


def headline(report: Row) -> list[str]:
    """What stands first: the fastest of our schedules at the measured size, on NVLink; nothing where a baseline is missing."""
    row = report["composed"]["rows"]
    own = [each for each in row if each["link"] == "NVLink" and not each["alike"]]
    most = max(own, key=lambda each: each["num_ranks"])
    compared = [each for each in most["contenders"] if "over_1f1b" in each and "over_interleaved" in each]
    ours = [each for each in compared if "1F1B" not in each["name"] and "planned" not in each["name"]]
    if not ours:
        return []
    best = max(ours, key=lambda each: each["over_1f1b"][0])
    return [
        f"**{best['name']} over megatron-core's 1F1B without its device-wide wait: {_interval(best['over_1f1b'])}; over the "
        f"faster interleaved 1F1B: {_interval(best['over_interleaved'])}** (measured passes, composed; p = "
        f"{most['num_ranks']}, NVLink).",
    ]
