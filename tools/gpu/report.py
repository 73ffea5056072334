"""The text report: the machine, what passed, what was measured against what was predicted, what to send back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tools.gpu.runner import Outcome, Status

_PREDICTED = re.compile(r"predicted .*?([\d.]+) ms with the new one")
_SUMMARY = re.compile(r"=+ (.*(?:passed|failed|skipped|error|deselected).*) in .*=+")


def text(suite: str, machine: str, outcomes: Sequence[Outcome], out: Path, planned: int) -> str:
    """The whole report.

    Args:
        suite: "test" or "bench".
        machine: lines that describe it.
        outcomes: of the steps that were come to.
        out: the folder of logs and results.
        planned: number of steps; more than outcomes if it was interrupted.
    """
    measured = list(_measured(out))
    lines = [f"make {suite}-gpu", "", machine, "", "Steps", ""]
    lines += [f"  {_line(outcome)}" for outcome in outcomes]
    if len(outcomes) < planned:
        lines.append(f"  interrupted: {planned - len(outcomes)} more steps were not run")
    for outcome in outcomes:
        if outcome.status in (Status.FAILED, Status.LATE):
            lines += ["", f"{outcome.step.name}: {outcome.status.value}", f"  expected: {outcome.step.expected}"]
            lines += [f"  it means: {outcome.step.deviation}", "", *(f"  | {line}" for line in outcome.tail[-20:])]
    if measured:
        lines += ["", "Measured against predicted", "", *(f"  {line}" for line in measured)]
    lines += ["", _verdict(outcomes, planned)]
    lines.append(f"Send back: {out}.zip, which has this report, every log and every result.")
    return "\n".join(lines) + "\n"


def _line(outcome: Outcome) -> str:
    detail = outcome.tail[0] if outcome.status is Status.SKIPPED else f"{outcome.seconds:.0f} s"
    found = [match[1] for line in outcome.tail if (match := _SUMMARY.search(line))]
    return f"{outcome.step.name}: {outcome.status.value}, {', '.join([detail, *found[-1:]])}"


def _verdict(outcomes: Sequence[Outcome], planned: int) -> str:
    ran = [outcome for outcome in outcomes if outcome.status is not Status.SKIPPED]
    failed = [outcome for outcome in ran if outcome.status is not Status.PASSED]
    if failed:
        first = failed[0].step.name
        return f"{len(failed)} of {len(ran)} steps failed. The first is {first!r}: what comes after it may follow from it."
    return f"All {len(ran)} steps that ran passed; {planned - len(ran)} were not run."


def _measured(out: Path) -> Iterator[str]:
    if (out / "split.json").is_file():
        yield from _split(json.loads((out / "split.json").read_text()))
    for metrics in sorted(out.glob("*/metrics.jsonl")):
        yield _run(metrics, out / f"{metrics.parent.name}.log")
    yield from _apart(out)


def _apart(out: Path) -> Iterator[str]:
    """Losses of the two jobs that start from the same weights."""
    stock, ours = (_rows(out / name / "metrics.jsonl") for name in ("job-1f1b", "job-zb-h1"))
    if stock and ours:
        apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(stock, ours, strict=False))
        yield f"job-zb-h1: losses at most {apart:.2g} from job-1f1b's, expected 0.01 or less{'' if apart <= 0.01 else '  MISSED'}"


def _rows(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []


def _split(body: dict[str, Any]) -> Iterator[str]:
    for shape in body["shapes"]:
        for verdict in shape["verdicts"]:
            met = "" if verdict["is_met"] else "  MISSED"
            yield f"{shape['shape']['name']}: {verdict['what']} {verdict['measured']:.3f}, target {verdict['target']}{met}"


def _run(metrics: Path, log: Path) -> str:
    rows = _rows(metrics)
    if not rows:
        return f"{metrics.parent.name}: no iteration ended"
    late = rows[len(rows) // 2 :]
    measured = median(row["iteration_ms"] for row in late)
    found = _PREDICTED.findall(log.read_text()) if log.is_file() else []
    against = ""
    if found:
        predicted = float(found[-1])
        against = f", predicted {predicted:.1f} ms for the passes ({100 * (measured / predicted - 1):+.1f} %)"
    speed = median(row["tokens_per_s"] for row in late)
    losses = f"loss {rows[0]['loss']:.4f} to {rows[-1]['loss']:.4f}"
    return f"{metrics.parent.name}: {measured:.1f} ms per iteration{against}; {speed:.0f} tokens/s; {losses}"
