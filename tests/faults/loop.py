"""The script of the fault laboratory's job: the example's loop, without its own `install`, with the fault of the environment."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.faults.job import fault_of_job, spoil

EXAMPLE = Path(__file__).parents[2] / "examples" / "stock_megatron_core.py"

if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    fault = fault_of_job()
    if fault is not None:
        spoil(example, fault)
    example.train(example.parse(None))
