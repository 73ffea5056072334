"""Releases of megatron-core that tests run on: which, and how a wheel becomes a folder for the path."""

from __future__ import annotations

import subprocess
import sysconfig
import zipfile
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest

from megatron.zerobubble.mcore.compat import SUPPORTED
from megatron.zerobubble.mcore.model.transformer_engine import OLDEST_TRANSFORMER_ENGINE
from tests.support import transformer_engine
from tools import releases

ROOT = Path(__file__).parents[2]
HELPER = "megatron/core/datasets/helpers"


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder instead of that of the checkout."""
    folder = tmp_path / "releases"
    monkeypatch.setattr(releases, "_UNPACKED", folder)
    return folder


def wheel_of(folder: Path, *, source: str) -> Path:
    wheel = folder / "megatron_core-9.9.0-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("megatron/core/package_info.py", "__version__ = '9.9.0'")
        archive.writestr(f"{HELPER}.cpp", source)
    return wheel


def test_all_tried_releases_are_supported_and_the_ends_are_pinned() -> None:
    assert all(version in SUPPORTED for version in releases.TRIED)
    pins = [line for line in (ROOT / "requirements" / "base.txt").read_text().splitlines() if line.startswith("megatron-core")]
    assert [pin.partition("==")[2].partition(";")[0] for pin in pins] == [releases.TRIED[0], releases.TRIED[-1]]
    assert installed_version("megatron-core") in (releases.TRIED[0], releases.TRIED[-1])
    assert releases.other_end() in (releases.TRIED[0], releases.TRIED[-1])
    assert releases.other_end() != installed_version("megatron-core")


def test_a_wheel_is_fetched_once_and_its_helper_compiled(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = wheel_of(tmp_path, source='#include <pybind11/pybind11.h>\nPYBIND11_MODULE(helpers_cpp, m) { m.attr("there") = 1; }')
    fetched: list[str] = []

    def fetch(package: str, version: str, place: Path) -> tuple[Path, str]:
        assert package == "megatron-core"
        fetched.append(version)
        return wheel, "9.9.0"

    monkeypatch.setattr(releases, "_fetch", fetch)
    assert releases.folder_of("9.9.0") == releases.folder_of("9.9.0") == unpacked / "9.9.0"
    assert fetched == ["9.9.0"]
    assert (unpacked / "9.9.0" / f"{HELPER}_cpp{sysconfig.get_config_var('EXT_SUFFIX')}").is_file()
    assert [path.name for path in unpacked.iterdir()] == ["9.9.0"], "nothing is left behind"


def test_a_release_that_does_not_exist_is_one_line(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "megatron-core==9.9"
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(releases.ReleaseError, match=r"pip cannot download megatron-core==9\.9: ERROR: No matching distribution"):
        releases.folder_of("9.9")


def test_the_python_of_transformer_engine_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "transformer_engine-2.9.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("transformer_engine/pytorch/__init__.py", "")
    fetched: list[str] = []

    def fetch(package: str, version: str, place: Path) -> tuple[Path, str]:
        fetched.append(f"{package} {version}")
        return wheel, version

    monkeypatch.setattr(releases, "_TRANSFORMER_ENGINE", tmp_path / "engine")
    monkeypatch.setattr(releases, "_fetch", fetch)
    folder = releases.transformer_engine("2.9.0")
    assert releases.transformer_engine("2.9.0") == folder == tmp_path / "engine" / "2.9.0"
    assert fetched == ["transformer_engine 2.9.0"]
    assert (folder / "transformer_engine" / "pytorch" / "__init__.py").is_file()
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["2.9.0"], "nothing is left behind"


def test_the_oldest_and_newest_transformer_engine_are_the_same_everywhere() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"TE_OLDEST := {transformer_engine.OLDEST}\n" in makefile
    assert f"TE_NEWEST := {transformer_engine.NEWEST}\n" in makefile
    assert str(OLDEST_TRANSFORMER_ENGINE) == transformer_engine.OLDEST


def test_the_tests_of_another_release_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_tests` puts the folder first on the path of pytest, and its status is pytest's."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "pytest.py").write_text("import sys; sys.exit(sys.argv[1:] != ['-q'])")
    monkeypatch.setattr(releases, "folder_of", lambda version: tmp_path)
    assert releases.run_tests("9.9.0", ["-q"])
    assert not releases.run_tests("9.9.0", ["-x"])
