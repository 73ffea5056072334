"""What the steps gave: a line per step, and the text report with what was measured against what was predicted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tools.gpu.runner import Outcome, Status
from tools.gpu.steps import Step

_SUMMARY = re.compile(r"=+ (.*(?:passed|failed|skipped|error|deselected).*) in .*=+")


def text(machine: str, outcomes: Sequence[Outcome], out: Path, planned: int, *, rehearses: bool = False) -> str:
    """The whole report.

    Args:
        machine: lines that describe it.
        outcomes: of the steps that were come to.
        out: the folder of logs and results.
        planned: number of steps; more than outcomes if it was interrupted.
        rehearses: whether it was a rehearsal on the CPU.
    """
    title = "make gpu-rehearsal: tiny sizes on the CPU, whose times mean nothing" if rehearses else "make gpu-hour"
    lines = [title, "", machine, "", "Steps", ""]
    for outcome in outcomes:
        lines += [f"  {line(outcome)}", *(f"    {each}" for each in measured(outcome.step, out))]
    if len(outcomes) < planned:
        lines.append(f"  interrupted: {planned - len(outcomes)} more steps were not run")
    for outcome in outcomes:
        if outcome.status in (Status.FAILED, Status.LATE):
            lines += ["", f"{outcome.step.name}: {outcome.status.value}", f"  expected: {outcome.step.expected}"]
            lines += [f"  it means: {outcome.step.deviation}", "", *(f"  | {each}" for each in outcome.tail[-20:])]
    lines += ["", _verdict(outcomes, planned)]
    lines.append(f"Send back: {out}.zip, which has this report, every log and every result.")
    return "\n".join(lines) + "\n"


def line(outcome: Outcome) -> str:
    """A step's outcome."""
    detail = outcome.tail[0] if outcome.status is Status.SKIPPED else f"{outcome.seconds:.0f} s"
    found = [match[1] for each in outcome.tail if (match := _SUMMARY.search(each))]
    return f"{outcome.step.name}: {outcome.status.value}, {', '.join([detail, *found[-1:]])}"


def _verdict(outcomes: Sequence[Outcome], planned: int) -> str:
    ran = [outcome for outcome in outcomes if outcome.status is not Status.SKIPPED]
    failed = [outcome for outcome in ran if outcome.status is not Status.PASSED]
    if failed:
        first = failed[0].step.name
        return f"{len(failed)} of {len(ran)} steps failed. The first is {first!r}: what comes after it may follow from it."
    return f"All {len(ran)} steps that ran passed; {planned - len(ran)} were not run."


def measured(step: Step, out: Path) -> list[str]:
    """Lines about what a step measured; none before it has run."""
    files = step.files
    if files == "one_gpu" and (out / "one_gpu.md").is_file():  # its list items are the findings
        return [each.removeprefix("- ") for each in (out / "one_gpu.md").read_text().splitlines() if each.startswith("- ")]
    if files == "links" and (out / "links.log").is_file():
        return [each for each in (out / "links.log").read_text().splitlines() if each.startswith("links: ")]
    if files == "bench" and (out / "bench/bench.json").is_file():
        return list(_bench(json.loads((out / "bench/bench.json").read_text())))
    rows = _rows(out / f"{files}.jsonl")
    if not rows:
        return []
    kind, _, rest = files.partition("-")
    first = _rows(out / f"{kind}-{rest.split('-')[0]}-1f1b.jsonl" if kind == "job" else out / "sweep-1f1b.jsonl")
    return [_losses(files, rows, first) if kind == "job" else _times(rows, first)]


def _bench(body: dict[str, Any]) -> Iterator[str]:
    for row in body["contenders"]:
        gain, ms = row["speed_up"], row["ms"]
        if ms is not None and gain is not None:
            interval = "" if gain["low"] is None else f" ({gain['low']:.3f} to {gain['high']:.3f})"
            against = "" if row["predicted_speed_up"] is None else f", predicted {row['predicted_speed_up']:.3f}"
            yield f"{row['name']}: {ms['value']:.1f} ms, {gain['value']:.3f}{interval} times as fast{against}"
        else:
            yield f"{row['name']}: {row['failure'] or 'not measured'}"


def _rows(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in metrics.read_text().splitlines()] if metrics.is_file() else []


def _losses(files: str, rows: list[dict[str, Any]], first: list[dict[str, Any]]) -> str:
    apart = max((abs(a["loss"] - b["loss"]) for a, b in zip(rows, first, strict=False)), default=None)
    against = "" if apart is None or files.endswith("-1f1b") else f", at most {apart:.2g} from 1F1B's"
    return f"loss {rows[0]['loss']:.4f} to {rows[-1]['loss']:.4f}{against}"


def _times(rows: list[dict[str, Any]], first: list[dict[str, Any]]) -> str:
    own, base = (median(row["iteration_ms"] for row in each[len(each) // 2 :]) for each in (rows, first or rows))
    return f"{own:.1f} ms per iteration, 1F1B {base:.1f} ms: {base / own:.3f} times as fast"
