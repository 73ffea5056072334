"""Shell scripts pass shellcheck, the Dockerfile hadolint, workflows actionlint, where PyPI has them for requirements/dev.txt."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytestmark = pytest.mark.claims(
    "Long runs",
    "the Dockerfile: base pinned, nothing that pip installs can replace torch, hadolint",
    "read as text; **never built**",
)


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


def test_the_dockerfile_passes_hadolint() -> None:
    check(tool("hadolint"), "docker/Dockerfile")


def test_the_workflows_pass_actionlint() -> None:
    check(tool("actionlint"), *(str(file) for file in (ROOT / ".github" / "workflows").glob("*.yml")))


TEXT = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = [
    line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", " ", TEXT).splitlines() if line.strip() and not line.startswith("#")
]


def values(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def pip_installs() -> list[list[str]]:
    """The arguments of each `pip install`."""
    commands = [command for run in values("RUN") for command in run.split("&&")]
    found = [shlex.split(command) for command in commands if "pip install" in command]
    return [words[words.index("install") + 1 :] for words in found]


def sources() -> list[str]:
    return [source for copy in values("COPY") for source in copy.split()[:-1]]


def test_the_base_image_has_a_tag_of_its_own() -> None:
    assert values("FROM") == ["${IMAGE}"]
    (image,) = [rest for rest in values("ARG") if rest.startswith("IMAGE=")]
    assert re.fullmatch(r"IMAGE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", image)


def test_the_release_of_megatron_core_is_the_one_that_is_tested_on_its_python() -> None:
    (default,) = re.findall(r"^ARG MEGATRON_CORE=(.*)$", TEXT, re.MULTILINE)
    pinned = re.findall(
        r'^megatron-core==(\S+); python_version >= "3.12"$', (ROOT / "requirements" / "base.txt").read_text(), re.MULTILINE
    )
    assert pinned == [default]


@pytest.mark.parametrize("source", sources())
def test_what_is_copied_exists_and_is_sent_to_the_build(source: str) -> None:
    assert (ROOT / source).exists()
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert any(fnmatch(source, line[1:]) or source.startswith(f"{line[1:]}/") for line in lines if line.startswith("!"))


def test_pip_cannot_replace_torch() -> None:
    """Named packages come without their dependencies; the list is constrained to what the image has, and names no torch."""
    assert values("ENV")[0].startswith("PIP_CONSTRAINT=/opt/image-versions.txt")
    assert pip_installs() == [
        ["-r", "docker/requirements.txt"],
        ["--no-deps", "megatron-core==${MEGATRON_CORE}"],
        ["--no-deps", "--editable", "."],
    ]
    names = [re.split(r"[><=~!]", line)[0] for line in requirements()]
    assert not [name for name in names if name.startswith(("torch", "nvidia", "triton", "megatron", "transformer"))]
    assert "==" not in "".join(requirements()), "an exact version would contradict the image's own"
    assert "grep '^torch=='" in TEXT, "the build checks it"


def requirements() -> list[str]:
    lines = (ROOT / "docker" / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_all_that_the_package_needs_is_installed() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    elsewhere = ("torch", "megatron-core")  # the image's own; a line of its own
    assert [line for line in needed if not line.startswith(elsewhere) and line not in requirements()] == []


def test_the_search_core_has_to_compile() -> None:
    assert any("from megatron.zerobubble.plan.search.core import library; library()" in run for run in values("RUN"))


def test_any_user_may_run_it() -> None:
    assert not values("USER")
    assert "--mode=1777 /home/anyone" in TEXT
    assert values("ENV")[-1] == "HOME=/home/anyone"
