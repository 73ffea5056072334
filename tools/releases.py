"""Run tests with another release of megatron-core than the installed one, and look for a newer one.

::

    python -m tools.releases path 0.19.2       prints a folder to put first on PYTHONPATH; nothing for the installed release
    python -m tools.releases other             prints the newest tried release, or the oldest where the newest is installed
    python -m tools.releases smoke             runs the tests marked `smoke` on every release between the oldest and the newest
    python -m tools.releases check-upstream    the same on PyPI's newest release, tried or not
    python -m tools.releases te 2.20.2         fetches the Python of a release of Transformer Engine, and prints its folder

Nothing is installed: the wheel is unpacked into `.megatron-core/VERSION`, which comes first on the path of the tests. The newer
releases are wheels for Python 3.12, but all their Python sources compile on 3.11; their one binary, the helper that builds
indices of datasets, is compiled from the source that the wheel has beside it.

Transformer Engine's wheel holds its Python alone, which tests run on the CPU (`tests.support.transformer_engine`); it is unpacked
into `.transformer-engine/VERSION`.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib.metadata import version as installed_version
from pathlib import Path

TRIED = ("0.16.1", "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2")
"""Every release of the supported range, oldest first."""
WHEELS_FOR = "3.12"
"""The Python whose wheels are fetched: releases from 0.17 on have none for an older one."""

_ROOT = Path(__file__).resolve().parents[1]
_UNPACKED = _ROOT / ".megatron-core"
_TRANSFORMER_ENGINE = _ROOT / ".transformer-engine"
_WHEEL = re.compile(r"\w+-([^-]+)-.*\.whl")


class ReleaseError(Exception):
    """A release cannot be fetched or unpacked; the message is one line."""


def folder_of(version: str) -> Path | None:
    """The folder with this release of megatron-core unpacked, fetched if it is not there yet; None if it is the installed one.

    Args:
        version: such as "0.19.2"; "newest" is the newest that PyPI has, "other" is what `other_end` returns.

    Raises:
        ReleaseError: PyPI has no such wheel, or it cannot be unpacked.
    """
    version = other_end() if version == "other" else version
    if version == installed_version("megatron-core"):
        return None
    folder = _UNPACKED / version
    if folder.is_dir():
        return folder
    _UNPACKED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_UNPACKED, prefix="fetching-") as place:
        wheel, found = _fetch("megatron-core", version, Path(place))
        if found == installed_version("megatron-core"):
            return None
        folder = _UNPACKED / found
        if not folder.is_dir():
            _unpack(wheel, Path(place) / "unpacked")
            (Path(place) / "unpacked").rename(folder)
    return folder


def other_end() -> str:
    """The newest release that was tried, or the oldest where the newest is installed: what is left to test."""
    return TRIED[0] if installed_version("megatron-core") == TRIED[-1] else TRIED[-1]


def transformer_engine(version: str) -> Path:
    """The folder with the Python of this release of Transformer Engine, fetched if it is not there yet.

    Raises:
        ReleaseError: PyPI has no such wheel.
    """
    folder = _TRANSFORMER_ENGINE / version
    if folder.is_dir():
        return folder
    _TRANSFORMER_ENGINE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_TRANSFORMER_ENGINE, prefix="fetching-") as place:
        wheel, _ = _fetch("transformer_engine", version, Path(place))
        unpacked = Path(place) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        with contextlib.redirect_stdout(io.StringIO()):
            compileall.compile_dir(unpacked / "transformer_engine" / "pytorch", quiet=2)
        if not folder.is_dir():
            unpacked.rename(folder)
    return folder


def _fetch(package: str, version: str, place: Path) -> tuple[Path, str]:
    """(the wheel, its version)."""
    _progress(f"fetching {package} {version} from PyPI")
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", str(place))
    what = package if version == "newest" else f"{package}=={version}"
    done = subprocess.run(
        [*pip, "--only-binary=:all:", "--python-version", WHEELS_FOR, what], capture_output=True, text=True, check=False
    )
    wheels = list(place.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ReleaseError(f"pip cannot download {what}: {errors[-1] if errors else done.stderr.strip() or 'it gave no wheel'}")
    found = _WHEEL.fullmatch(wheels[0].name)
    assert found is not None, wheels[0].name
    return wheels[0], found[1]


def _unpack(wheel: Path, folder: Path) -> None:
    _progress(f"unpacking {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    datasets = folder / "megatron" / "core" / "datasets"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not (datasets / f"helpers_cpp{suffix}").is_file():
        _compile(datasets / "helpers.cpp", datasets / f"helpers_cpp{suffix}")
    with contextlib.redirect_stdout(io.StringIO()):  # names of files for another Python
        compileall.compile_dir(folder, quiet=2)  # or each of four ranks would compile every module at its first import


def _compile(source: Path, target: Path) -> None:
    import pybind11

    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise ReleaseError(f"{source.name} of megatron-core must be compiled for this Python, and there is no C++ compiler")
    includes = (f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}")
    command = (compiler, "-O2", "-shared", "-std=c++17", "-fPIC", *includes, str(source), "-o", str(target))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{source} does not compile: {done.stderr.strip().splitlines()[-1]}")


def run_tests(version: str, arguments: list[str]) -> bool:
    """Run pytest with this release; whether all tests passed."""
    folder = folder_of(version)
    environment = dict(os.environ)
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), environment.get("PYTHONPATH"))))
    _progress(f"megatron-core {version if folder is None else folder.name}: pytest {' '.join(arguments)}")
    done = subprocess.run([sys.executable, "-m", "pytest", *arguments], env=environment, cwd=_ROOT, check=False)
    return done.returncode == 0


def smoke(versions: list[str], workers: int) -> int:
    """Run the tests marked `smoke` on each release, and print which passed. Returns how many did not."""
    arguments = [*_smoke_files(), "-m", "smoke", "-q", "-p", "no:cacheprovider", "-n", str(workers), "--dist", "loadfile"]
    passed = {version: run_tests(version, arguments) for version in versions}
    for version, well in passed.items():
        print(f"megatron-core {version:<8} {'passed' if well else 'FAILED'}")
    return sum(not well for well in passed.values())


def _smoke_files() -> list[str]:
    """Files with tests marked `smoke`: importing all the others takes longer than these tests."""
    files = sorted(_ROOT.joinpath("tests").rglob("test_*.py"))
    return [str(file.relative_to(_ROOT)) for file in files if "pytest.mark.smoke" in file.read_text(encoding="utf-8")]


def check_upstream(workers: int) -> int:
    """Check PyPI's newest release: what it lacks, and the tests marked `smoke`. Returns how many of the two failed."""
    folder = folder_of("newest")
    version = installed_version("megatron-core") if folder is None else folder.name
    if version in TRIED:
        print(f"PyPI's newest megatron-core is {version}, which is tested with every change")
    else:
        print(f"PyPI's newest megatron-core is {version}, which was never tried; the newest that was is {TRIED[-1]}")
    environment = dict(os.environ) if folder is None else {**os.environ, "PYTHONPATH": str(folder)}
    code = "from megatron.zerobubble.mcore import compat; compat.check_megatron_core()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=_ROOT, capture_output=True, text=True, check=False)
    failed = 0
    if done.returncode:
        failed += 1
        print(f"it cannot be used: {done.stderr.strip().splitlines()[-1]}")
    else:
        print("every function that is relied on is there")
    return failed + smoke([version], workers)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.releases", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    path = commands.add_parser(
        "path", help="print the folder of a release, to be put first on PYTHONPATH; nothing if it is installed"
    )
    path.add_argument("version")
    te = commands.add_parser("te", help="fetch the Python of a release of Transformer Engine, and print its folder")
    te.add_argument("version")
    commands.add_parser("other", help="print the newest tried release, or the oldest where the newest is installed")
    between = commands.add_parser("smoke", help="run the smoke tests on releases")
    between.add_argument("versions", nargs="*", help="default: all between the oldest and the newest")
    upstream = commands.add_parser("check-upstream", help="check PyPI's newest release")
    for command in (between, upstream):
        command.add_argument("--workers", type=int, default=2, help="processes that share the files of tests")
    flags = parser.parse_args(arguments)
    try:
        if flags.command == "path":
            print(folder_of(flags.version) or "")
            return 0
        if flags.command == "te":
            print(transformer_engine(flags.version))
            return 0
        if flags.command == "other":
            print(other_end())
            return 0
        if flags.command == "smoke":
            return int(smoke(flags.versions or list(TRIED[1:-1]), flags.workers) > 0)
        return int(check_upstream(flags.workers) > 0)
    except ReleaseError as error:
        return _fail(str(error))


def _fail(reason: str) -> int:
    print(f"python -m tools.releases: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
