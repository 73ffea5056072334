"""Build the playground as plain files, which any web server can serve: `python -m tools.docs.playground_app FOLDER`.

Beside the files that `zerobubble playground` serves, there are Pyodide (CPython as WebAssembly, from its npm package), a snapshot
of its memory in which the planner is imported, and the planner's compiled core as a side module of it, which `ctypes` loads as it
loads the native one. Nothing is loaded from elsewhere. The build needs npm, node and the packages of requirements/dev.txt.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from megatron.zerobubble.playground.choices import choices
from tools.docs.npm import member, package

PYODIDE = "pyodide@314.0.7"
_INTEGRITY = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
"""The SHA-512 of its package in the npm registry."""
_PARTS = ("README.md", "pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "megatron/zerobubble"
_SEARCH = _PACKAGE / "plan/search"
_IMPORTED = ("errors.py", "messages.py", "files.py", "version.py", "plan", "playground", "profiling")
# As for the native core (setup.py). Exceptions, and what libc++ keeps in its library, are not in Pyodide.
_COMPILE = ["-O3", "-g0", "-std=c++17", "-DNDEBUG", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-fno-exceptions"]
_ABORT = "-D_LIBCPP_VERBOSE_ABORT(...)=__builtin_trap()"
_LINK = ["-shared", "--experimental-pic", "--no-entry", "--strip-all", "--unresolved-symbols=import-dynamic"]


def build(folder: Path, downloads: Path) -> None:
    """Write the page into `folder`, which is emptied before; Pyodide's package is kept in `downloads`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_PACKAGE / "playground/static", folder)
    vendored = folder / "vendor/pyodide"
    vendored.mkdir()
    with tarfile.open(package(PYODIDE, _INTEGRITY, downloads)) as archive:
        for name in _PARTS:
            (vendored / name).write_bytes(member(archive, name))
        lock = json.loads(member(archive, "pyodide-lock.json"))
    # Without its packages: none is loaded.
    (vendored / "pyodide-lock.json").write_text(json.dumps({"info": lock["info"], "packages": {}}))
    compile_core(folder / "core.wasm")
    _take_snapshot(vendored)
    (folder / "choices.json").write_text(json.dumps(choices(planner="worker", num_searches=None)))
    _list_files(folder)


def compile_core(target: Path) -> None:
    """Compile the planner's core for Pyodide, with zig's compiler."""
    zig = [sys.executable, "-m", "ziglang"]
    with tempfile.TemporaryDirectory() as folder:
        part = f"{folder}/core.o"
        source = str(_SEARCH / "core.cpp")
        subprocess.run([*zig, "c++", "-target", "wasm32-wasi", *_COMPILE, _ABORT, "-c", source, "-o", part], check=True)
        subprocess.run([*zig, "wasm-ld", *_LINK, part, "-o", str(target)], check=True)


def _take_snapshot(vendored: Path) -> None:
    """Start Pyodide in node, import the planner, and save its memory, compressed (no suffix that a web server would act on)."""
    with tempfile.TemporaryDirectory() as folder:
        sources, snapshot = Path(folder, "planner.zip"), Path(folder, "snapshot")
        with zipfile.ZipFile(sources, "w") as archive:
            for path in sorted(path for name in _IMPORTED for path in (_PACKAGE / name, *(_PACKAGE / name).rglob("*.py"))):
                if path.suffix == ".py":
                    archive.write(path, path.relative_to(_ROOT))
        script = Path(__file__).with_name("playground_snapshot.mjs")
        subprocess.run(["node", str(script), str(vendored), str(sources), str(snapshot)], check=True)
        (vendored / "snapshot.bin").write_bytes(gzip.compress(snapshot.read_bytes(), 9, mtime=0))


def _list_files(folder: Path) -> None:
    """Tell the service worker what to keep, and a name that changes with any of it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".md", ".LICENSE"))
    worker = folder / "service-worker.js"
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    names = ["./", *(path.relative_to(folder).as_posix() for path in files if path != worker)]
    constants = f"const BUILD = {json.dumps(digest.hexdigest()[:16])};\nconst FILES = {json.dumps(names)};\n"
    worker.write_text(constants + worker.read_text())


def main() -> None:
    """Build it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--downloads", type=Path, default=_ROOT / ".pyodide", help="where Pyodide's package is kept (%(default)s)"
    )
    args = parser.parse_args()
    build(args.folder, args.downloads)


if __name__ == "__main__":
    main()
