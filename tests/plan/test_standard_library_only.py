"""The planner runs without torch."""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import megatron.zerobubble.plan as plan
names = [module.name for module in pkgutil.walk_packages(plan.__path__, "megatron.zerobubble.plan.")]
for name in names:
    importlib.import_module(name)
heavy = sorted({"torch", "numpy", "megatron.core"} & set(sys.modules))
print(len(names), *heavy)
"""


def test_importing_every_planner_module_pulls_in_neither_torch_nor_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    count, *heavy = done.stdout.split()
    assert int(count) > 10
    assert heavy == []
