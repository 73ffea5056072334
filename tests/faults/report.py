"""`python -m tests.faults.report FILE`: the trials in a file of a laboratory of faults, as a table."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def table(file: Path) -> str:
    """Markdown: per kind of fault the number of trials, how many were as promised, and the seconds to the end of the job.

    For trials on several hosts also on how many screens the culprit was named, the ranks that were left, and the seconds to the
    end of the last torchrun.
    """
    trials = defaultdict(list)
    for line in file.read_text().splitlines():
        outcome = json.loads(line)
        trials[outcome["trial"]["kind"]].append(outcome)
    has_hosts = any("hosts" in outcome for outcomes in trials.values() for outcome in outcomes)
    heads = ["fault", "trials", "as promised", "phases", "seconds to the end, median and most"]
    heads += ["of torchrun", "named on", "hangs", "ranks left"] if has_hosts else []
    rows: list[list[Any]] = []
    for kind, outcomes in sorted(trials.items()):
        good = sum(outcome["is_as_promised"] for outcome in outcomes)
        phases = len({outcome["trial"]["phase"] for outcome in outcomes})
        rows.append([kind, len(outcomes), good, phases, _seconds([outcome["seconds"] for outcome in outcomes])])
        rows[-1] += _on_hosts(outcomes) if has_hosts else []
    lines = [f"| {' | '.join(map(str, row))} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def _seconds(values: list[float]) -> str:
    seconds = sorted(values)
    return f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}" if seconds else "-"


def _on_hosts(outcomes: list[dict[str, Any]]) -> list[Any]:
    hosts = [host for outcome in outcomes for host in outcome["hosts"]]
    told = [host["is_named"] for host in hosts if host["is_named"] is not None]
    return [
        _seconds([host["agent_s"] for host in hosts if host["agent_s"] is not None]),
        f"{sum(told)} of {len(told)} screens" if told else "-",
        sum(outcome["is_hang"] for outcome in outcomes),
        sum(outcome["num_left"] for outcome in outcomes),
    ]


if __name__ == "__main__":
    sys.stdout.write(table(Path(sys.argv[1])) + "\n")
