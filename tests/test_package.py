"""The sdist and the wheel: what they contain, how the search core is built, and a whole life of the installed package.

The last one is slow. It installs the wheel beside megatron-core in an environment of its own, plans, trains from a
folder outside the checkout, and uninstalls. Torch and its dependencies are linked from the environment of the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

import megatron.zerobubble
from tests.support.stock import EXAMPLE
from tests.training.launch import TINY_BATCH, TINY_MODEL

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron/zerobubble"
BUILT = (".so", ".pyc", ".pyd")
CORE_SOURCES = {
    f"{PACKAGE}/plan/search/{name}" for name in ("core.cpp", "decode.hpp", "evaluate.hpp", "moves.hpp", "problem.hpp")
}
CORE_BYTES = 600_000
"""More than the stripped core; with debug information it has ten times as many."""
PLAN = ["plan", "--schedule", "zbv", "--num-ranks", "4", "--num-microbatches", "8"]
ON_CPU = """
import runpy, sys
from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
del sys.argv[0]
with quiet_third_parties(), HostDevice() as host, host.on_host():
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the script that follows, with an `install` of its own, without a GPU."""
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the sdist could take files from, without anything built."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("megatron", "tests", "tools", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    """The sdist of the checkout."""
    return _build(checkout, "build_sdist")


@pytest.fixture(scope="module")
def pure_wheel(checkout: Path) -> Path:
    """The wheel of a machine without a compiler."""
    return _build(checkout, "build_wheel", CC="false", CXX="false")


def _build(folder: Path, hook: str, **environment: str) -> Path:
    script = f"import sys, setuptools.build_meta as backend; backend.{hook}(sys.argv[1])"
    target = folder / f"{hook}-{'-'.join(environment)}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(target)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = target.iterdir()
    return built


def _package_files() -> set[str]:
    """Every file of the package in this checkout that is not built."""
    paths = [path for path in (ROOT / PACKAGE).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in paths if path.suffix not in BUILT}


def test_the_sdist_has_the_package_and_what_builds_it(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    top = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
    assert {name for name in files if not name.startswith("megatron_zerobubble.egg-info/")} == _package_files() | top


def test_the_wheel_has_the_package_and_nothing_beside_it(pure_wheel: Path) -> None:
    with zipfile.ZipFile(pure_wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == _package_files() - CORE_SOURCES
    assert f"{PACKAGE}/py.typed" in names
    assert "megatron/__init__.py" not in names, "it would hide the installed megatron.core"


def test_the_metadata(pure_wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(pure_wheel) as archive:
        info = next(name.partition("/")[0] for name in archive.namelist() if name.endswith("METADATA"))
        fields = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert (fields["Name"], fields["Version"]) == ("megatron-zerobubble", megatron.zerobubble.__version__)
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert fields.get_all("Project-URL") == [f"{name}, {url}" for name, url in project["urls"].items()]
    assert {"Homepage", "Repository", "Documentation", "Changelog", "Issues"} == set(project["urls"])
    assert all("extra ==" in needed for needed in fields.get_all("Requires-Dist")), "the planner needs the standard library only"
    assert "zerobubble = megatron.zerobubble.cli.main:main" in scripts


SEARCH = """
import sys
sys.path.insert(0, sys.argv[1])
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.search.search_options import SearchOptions
options = SearchOptions(memory_limit=0.75, budget=1e4)
result = make_plan(PlanRequest(schedule="zbv", num_ranks=2, num_microbatches=4, options=options))
print(max(result.simulation.peak_memory))
"""


@pytest.mark.parametrize("is_built", [True, False])
def test_the_planner_needs_the_standard_library_and_its_core(
    is_built: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with zipfile.ZipFile(request.getfixturevalue("compiled_wheel" if is_built else "pure_wheel")) as archive:
        archive.extractall(tmp_path)
    command = [sys.executable, "-I", "-S", "-c", SEARCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if is_built:
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) <= 0.75
    else:
        line = done.stderr.splitlines()[-1]
        assert "ConfigError: the compiled search core cannot be loaded" in line
        assert line.endswith(
            "install this package with pip, which builds it with a C++ compiler or with ziglang from PyPI; "
            "hand-written schedules need none"
        )


def test_pip_fetches_a_compiler_where_there_is_none(checkout: Path, tmp_path: Path) -> None:
    script = "import setuptools.build_meta as backend; print(backend.get_requires_for_build_wheel()[-1:])"
    for variables, wanted in (({}, "['ziglang>=0.13']"), ({"CXX": "some compiler"}, "[]")):
        environment = {"PATH": str(tmp_path), **variables}
        command = [sys.executable, "-c", script]
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        assert done.stdout.splitlines()[-1] == wanted


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (
            ["train", "--mock-data"],
            "zerobubble train needs torch and megatron.core and numpy and packaging, which are not installed",
        ),
        (["run", "script.py"], "zerobubble run needs torch and megatron.core, which are not installed"),
        (["bench", "--", "script.py"], "zerobubble bench needs torch and"),
        (
            ["checkpoint", "verify", "x"],
            "zerobubble checkpoint needs xxhash, which is not installed: pip install '.[train]' in a",
        ),
        (["env"], None),
        (PLAN, None),
        (["playground", "--help"], None),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_without_any_other_package_a_command_runs_or_says_in_one_line_what_it_needs(
    command: list[str], missing: str | None
) -> None:
    """`-S`: without site-packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "megatron.zerobubble", *command],
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if missing is None:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 2
        assert missing in done.stderr
        assert done.stderr.count("\n") == 1


# -- installed ------------------------------------------------------------------------------------------------------------


class Installed:
    """An environment with torch, linked from this one, and a place of its own for what pip installs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=TIMEOUT_S)
        self.bin = folder / "bin"
        self.site = Path(self.python("import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
        linked = folder / "linked"
        linked.mkdir()
        for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
            if (
                not path.name.startswith(("megatron", "__editable__", "_distutils", "pip", "setuptools"))
                and path.suffix != ".pth"
            ):
                (linked / path.name).symlink_to(path)
        (self.site / "linked.pth").write_text(f"{linked}\n")

    def run(self, *command: object, cwd: Path | None = None) -> str:
        """A command of this environment, by default in its folder; its standard output."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RANK", "WORLD", "LOCAL_"))}
        done = subprocess.run(
            [str(self.bin / str(command[0])), *map(str, command[1:])],
            cwd=cwd or self.folder,
            env={**kept, "OMP_NUM_THREADS": "1", "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def python(self, script: str) -> str:
        """What a script prints."""
        return self.run("python", "-c", script)

    def pip(self, *arguments: object) -> None:
        """pip, without a question and without looking for a newer pip."""
        self.run("python", "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", *arguments)

    def files(self, folder: str) -> dict[str, int]:
        """Path -> bytes of every file below a folder of site-packages that Python did not compile."""
        paths = [path for path in (self.site / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
        return {path.relative_to(self.site).as_posix(): path.stat().st_size for path in paths}


@pytest.fixture(scope="module")
def compiled_wheel(checkout: Path) -> Path:
    """The wheel of this machine."""
    wheel = _build(checkout, "build_wheel")
    with zipfile.ZipFile(wheel) as archive:
        if not any(name.endswith("_core.native.so") for name in archive.namelist()):
            pytest.skip("no C++ compiler")
    return wheel


@pytest.fixture
def installed(compiled_wheel: Path, tmp_path: Path) -> Iterator[Installed]:
    """The wheel beside the newest megatron-core that pip installs on this Python."""
    environment = Installed(tmp_path / "environment")
    environment.pip("install", "megatron-core", compiled_wheel)
    yield environment
    shutil.rmtree(tmp_path, ignore_errors=True)


def _losses(printed: str) -> list[list[float]]:
    return [json.loads(line)["losses"] for line in printed.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_install_plan_train_and_uninstall_outside_the_checkout(installed: Installed, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(EXAMPLE, elsewhere / "loop.py")
    (elsewhere / "on_cpu.py").write_text(ON_CPU)
    core_files = installed.files("megatron/core")
    module = installed.python("from megatron.zerobubble.plan.search.core import library; print(library()._name)").strip()
    assert Path(module).is_relative_to(installed.site)
    assert Path(module).stat().st_size < CORE_BYTES

    assert "zbv: 4 pipeline ranks (PP)" in installed.run("zerobubble", *PLAN, cwd=elsewhere)

    job = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "on_cpu.py", "loop.py"]
    job += ["--pipeline-model-parallel-size", "2"]
    losses = {}
    for flags in ("", "--enable-zero-bubble"):
        printed = installed.run("python", *job, *flags.split(), cwd=elsewhere)
        losses[flags] = _losses(printed)
    run = ["zerobubble", "run", "--nproc-per-node", "2", "--cpu", "--zero-bubble-max-pending-backward", "2p", *job[-3:]]
    run += ["--distributed-backend", "gloo"]
    losses["run"] = _losses(installed.run(*run, cwd=elsewhere))
    assert losses[""] == losses["--enable-zero-bubble"] == losses["run"] != []

    flags = [*TINY_MODEL, *TINY_BATCH, "--mock-data", "--train-iters", "2", "--eval-iters", "0"]
    flags += ["--pipeline-model-parallel-size", "2", "--zero-bubble-v-schedule"]
    assert "training with zbv: 2 ranks" in installed.run("zerobubble", "train", "--nproc-per-node", "2", *flags, cwd=elsewhere)

    installed.pip("uninstall", "-y", "megatron-zerobubble")
    assert not (installed.bin / "zerobubble").exists()
    assert not (installed.site / PACKAGE).exists()
    assert installed.files("megatron/core") == core_files
    find = "from importlib.util import find_spec as f; print(f('megatron.core') is None, f('megatron.zerobubble') is None)"
    assert installed.python(find).strip() == "False True"
