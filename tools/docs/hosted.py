"""A hook of mkdocs: pages load nothing from elsewhere.

The one script that the theme would load, which lets the search work from files, is hosted with the pages (`extra.polyfills` in
mkdocs.yml). A page that loads anything else from another host gets a warning, which is an error of `make docs`.
"""

from __future__ import annotations

import logging
import re
import tarfile
from pathlib import Path
from typing import Any

from tools.docs.npm import member, package

_SHIM = "iframe-worker@1.0.4"
_INTEGRITY = "roeaaI+Lg1LJNfgpCjoRe/+WzEjy9+Z08LoEvu85MCPbBjwm+qXz8Ag5U05lHa6V1CysZyGzE0SOkAtSUA5q7Q=="
_DOWNLOADS = Path(__file__).parents[2] / ".pyodide"
_LOADS = re.compile(r"<(?:script|img|iframe|source|video|audio|embed|object|link)\b[^>]*>", re.IGNORECASE)
_ADDRESS = re.compile(r"""\b(?:src|srcset|href|data)\s*=\s*["']?((?:https?:)?//[^"'\s>]+)""", re.IGNORECASE)
_NAMES = re.compile(r"""\brel\s*=\s*["']?(?:canonical|prev|next|alternate|edit)\b""", re.IGNORECASE)

_log = logging.getLogger("mkdocs.hooks.hosted")


def from_elsewhere(html: str) -> list[str]:
    """Addresses of other hosts that a browser loads with a page. Links, which a page only names, are not among them."""
    tags = [tag for tag in _LOADS.findall(html) if not _NAMES.search(tag)]
    return [address for tag in tags for address in _ADDRESS.findall(tag)]


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warn of a page that loads something from another host."""
    for address in from_elsewhere(output):
        _log.warning("%s loads %s: host it with the pages", page.file.src_uri, address)
    return output


def on_post_build(config: Any, **_: Any) -> None:
    """Write the script and its license."""
    folder = Path(config.site_dir, "assets/javascripts")
    with tarfile.open(package(_SHIM, _INTEGRITY, _DOWNLOADS)) as archive:
        (folder / "iframe-worker.js").write_bytes(member(archive, "shim/index.js"))
        (folder / "iframe-worker.LICENSE").write_bytes(member(archive, "LICENSE"))
