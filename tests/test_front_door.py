"""`install`, `uninstall` and `zerobubble run` stand without the reference trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_LOADED = """
import sys
loaded = sorted(name for name in sys.modules if name.startswith(("megatron.zerobubble.training", "megatron.zerobubble.bench")))
assert not loaded, loaded
"""

_INSTALL = """
import megatron.zerobubble
megatron.zerobubble.install(schedule="zb-h1")
megatron.zerobubble.uninstall()
"""

_FLAGS = """
import argparse
import megatron.zerobubble
parser = megatron.zerobubble.add_zero_bubble_args(argparse.ArgumentParser())
megatron.zerobubble.install(parser.parse_args(["--zero-bubble-v-schedule"]))
megatron.zerobubble.uninstall()
"""

_RUN = """
import contextlib, sys
from pathlib import Path
from megatron.zerobubble.run import main
Path("script.py").write_text("import sys; assert '--theirs' in sys.argv")
main(["--cpu", "--enable-zero-bubble", "script.py", "--theirs"])
"""


@pytest.mark.parametrize("statements", [_INSTALL, _FLAGS, _RUN], ids=["install", "flags", "run"])
def test_the_front_door_loads_nothing_of_the_reference_trainer(statements: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", statements + _LOADED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
