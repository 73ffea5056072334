"""Files of npm packages that the documentation site hosts itself: fetched once, of one version, by the SHA-512 of the package."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from base64 import b64encode
from pathlib import Path


def package(name: str, integrity: str, downloads: Path) -> Path:
    """A package from the npm registry, unless it is in `downloads`. Raises SystemExit if it is another one than expected.

    Args:
        name: with the version, such as `pyodide@314.0.7`.
        integrity: its SHA-512 in base64, as in the registry.
        downloads: the folder for it.
    """
    path = downloads / f"{name.replace('@', '-')}.tgz"
    if not path.exists():
        downloads.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", name, "--silent"], cwd=downloads, check=True, stdout=subprocess.DEVNULL)
    if b64encode(hashlib.sha512(path.read_bytes()).digest()).decode() != integrity:
        path.unlink()
        raise SystemExit(f"{name} from the npm registry is not the package that was tested: its SHA-512 differs")
    return path


def member(archive: tarfile.TarFile, name: str) -> bytes:
    """The content of a file of a package."""
    file = archive.extractfile(f"package/{name}")
    assert file is not None
    return file.read()
