"""`python -m tests.faults.report FILE`: the trials in a file of the fault laboratory, as a table."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path


def table(file: Path) -> str:
    """Markdown: per kind of fault the number of trials, how many were as promised, and the seconds to the end of the job."""
    trials = defaultdict(list)
    for line in file.read_text().splitlines():
        outcome = json.loads(line)
        trials[outcome["trial"]["kind"]].append(outcome)
    lines = ["| fault | trials | as promised | phases | seconds to the end, median and most |", "|---|---|---|---|---|"]
    for kind, outcomes in sorted(trials.items()):
        seconds = sorted(outcome["seconds"] for outcome in outcomes)
        good = sum(outcome["is_as_promised"] for outcome in outcomes)
        phases = len({outcome["trial"]["phase"] for outcome in outcomes})
        middle = seconds[len(seconds) // 2]
        lines.append(f"| {kind} | {len(outcomes)} | {good} | {phases} | {middle:.1f}, {seconds[-1]:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(Path(sys.argv[1])) + "\n")
