"""Shell scripts pass shellcheck, and the Dockerfile hadolint (requirements/dev.txt has both, where PyPI has them)."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "examples").glob("*.sh"), *(ROOT / "examples").glob("*.slurm"), ROOT / ".ci" / "run"])


def tool(name: str) -> str:
    """The path of a linter. Without it the test is skipped, but not in CI on a machine that should have it."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        if os.environ.get("CI") and (platform.machine() == "x86_64" or sys.platform == "darwin"):
            pytest.fail(f"{name} is missing: make setup installs it")
        pytest.skip(f"{name} is not installed")
    return path


def check(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_passes_shellcheck(script: Path) -> None:
    check(tool("shellcheck"), "--external-sources", str(script.relative_to(ROOT)))


def test_shellcheck_notices_a_mistake(tmp_path: Path) -> None:
    bad = tmp_path / "bad.sh"
    bad.write_text("#!/usr/bin/env bash\nrm -rf $1/*\n")
    done = subprocess.run([tool("shellcheck"), str(bad)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "SC2086" in done.stdout


def test_the_dockerfile_passes_hadolint() -> None:
    check(tool("hadolint"), "docker/Dockerfile")
