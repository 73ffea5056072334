"""Run ranks on FakeTensors and write what was counted.

python -m tests.support.fake_tensors                     # all cases, into docs/benchmarks: the page's tables and their JSON
python -m tests.support.fake_tensors --case NAME         # one case, as JSON on standard output
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.fake_tensors import guard
from tests.support.fake_tensors.allocator import replayed
from tests.support.fake_tensors.cases import CASES, RESERVED, Case

DOCS = Path(__file__).parents[3] / "docs" / "benchmarks"
DATA = DOCS / "data" / "fake_tensors.json"
PAGE = DOCS / "fake_tensors.md"
TABLE = "<!-- table: python -m tests.support.fake_tensors -->"
TABLE_OF_RESERVED = "<!-- table of what is reserved: python -m tests.support.fake_tensors -->"
HEADS = (
    *("rank", "stage", "kernels of F", "B", "W", "B + W", "BW", "collectives of F", "B", "W"),
    *("GiB after F", "after B, until W", "peak of the rank", "host reads in F", "in B and W"),
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.fake_tensors", description="Ranks on FakeTensors, counted.")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="run this one, and print JSON")
    args = parser.parse_args()
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # kernels are counted as torch would launch them without its compiler
    guard.load()
    import tests.support.fake_tensors.rank  # noqa: F401 -- once, for all processes

    if args.case is not None:
        sys.stdout.write(json.dumps(run(next(case for case in CASES if case.name == args.case))) + "\n")
        return
    rows = [run(case) for case in CASES]
    for row in rows:
        del row["held_bytes"], row["replayed"]
    reserved = [in_process(_reserved, case) for case in RESERVED]
    cases, replays = (",\n".join(map(json.dumps, each)) for each in (rows, reserved))
    DATA.write_text(
        f'{{"format": "zerobubble-fake-tensors/1", "cases": [\n{cases}\n], "reserved": [\n{replays}\n]}}\n', encoding="utf-8"
    )
    page = PAGE.read_text(encoding="utf-8")
    for marker, text in ((TABLE, table(rows)), (TABLE_OF_RESERVED, table_of_reserved(reserved))):
        head, _, rest = page.partition(marker)
        page = f"{head}{marker}\n\n{text}\n\n{rest.lstrip(chr(10)).partition(chr(10) * 2)[2]}"
    PAGE.write_text(page, encoding="utf-8")


def run(case: Case) -> dict[str, Any]:
    """A case with B and W, and with BW in their place, each in a process of its own."""
    split, fused = (in_process(_counted, each) for each in (case, case.fused))
    for stage, ops in fused["stages"].items():
        split["stages"][stage]["BW"] = ops["BW"]
    return split


def in_process(function: Callable[[Case], dict[str, Any]], case: Case) -> dict[str, Any]:
    """What `function` returns of the case in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, (case,))


def _reserved(case: Case) -> dict[str, Any]:
    """Peaks of four iterations: the second is the first one beside the optimizer's state, and later ones may fragment further."""
    warnings.simplefilter("ignore")
    from tests.support.fake_tensors.rank import run_rank

    events = run_rank(case.argv, rank=case.global_rank, world_size=case.world_size, iterations=4).events
    row: dict[str, Any] = {"name": case.name, "flags": " ".join(case.argv)}
    row["allocated_bytes"], row["reserved_bytes"] = replayed(events)
    _, row["reserved_bytes_expandable"] = replayed(events, expandable=True)
    return row


def _counted(case: Case) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    from tests.support.fake_tensors.rank import run_rank

    ran = run_rank(case.argv, rank=case.global_rank, world_size=case.world_size)
    stages: dict[str, Any] = {}
    for stage, (activation, after_backward) in ran.memory.items():
        passes = [each for each in ran.passes if each.op.stage == stage]
        stages[str(stage)] = {"activation": activation, "after_backward": after_backward} | {
            kind: _of_kind([each.counts for each in passes if each.op.kind.name == kind][-1])
            for kind in dict.fromkeys(each.op.kind.name for each in passes)
        }
    return {
        "name": case.name,
        "flags": " ".join(case.argv),
        "rank": f"{case.global_rank} of {case.world_size}",
        "stages": stages,
        "held_bytes": [(str(each.op), each.held_bytes, each.pending_bytes) for each in ran.passes],
        "peak_bytes": ran.peak_bytes,
        "most_bytes": ran.most_bytes,
        "left_bytes": ran.left_bytes,
        "state_bytes": ran.state_bytes,
        "replayed": replayed(ran.events),
        "reads_in_step": dict(ran.step.reads),
        "reads_around": dict(ran.around.reads),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The page's table, a line per stage."""
    lines = []
    for row in rows:
        for stage, ops in row["stages"].items():
            f, b, w, fused = (ops[kind] for kind in ("F", "B", "W", "BW"))
            cells = [row["name"], stage, f["kernels"], b["kernels"], w["kernels"], b["kernels"] + w["kernels"], fused["kernels"]]
            cells += [f["collectives"], b["collectives"], w["collectives"]]
            cells += [f"{value / 2**30:.2f}" for value in (ops["activation"], ops["after_backward"], row["peak_bytes"])]
            cells += [sum(f["reads"].values()), sum(b["reads"].values()) + sum(w["reads"].values())]
            lines.append(cells)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (HEADS, ["---"] * len(HEADS), *lines))


def table_of_reserved(rows: list[dict[str, Any]]) -> str:
    """The page's second table, a line per model and plan."""
    cells = [("rank 0 of", "schedule", "GiB allocated", "reserved", "over", "reserved, expandable segments", "over")]
    cells += [("---",) * len(cells[0])]
    for row in rows:
        allocated, *reserved = (row[key] for key in ("allocated_bytes", "reserved_bytes", "reserved_bytes_expandable"))
        over = [text for size in reserved for text in (f"{size / 2**30:.2f}", f"{size / allocated - 1:.1%}")]
        schedule = row["flags"].partition("--zero-bubble-schedule ")[2].split()[0]
        cells.append((row["name"], schedule, f"{allocated / 2**30:.2f}", *over))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _of_kind(counts: Any) -> dict[str, Any]:
    return {
        "kernels": counts.kernels.total(),
        "gemms": sum(counts.kernels[name] for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm")),
        "collectives": counts.collectives.total(),
        "reads": dict(counts.reads),
        "elsewhere": dict(counts.elsewhere),
    }


if __name__ == "__main__":
    main()
