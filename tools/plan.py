"""The planning commands of `zerobubble` from a checkout, without installing anything: `python tools/plan.py plan --help`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron.zerobubble.cli.main import main

    sys.exit(main(prog="plan.py"))
