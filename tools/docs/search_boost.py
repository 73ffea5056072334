"""A hook of mkdocs: in the site's search, guides come before decisions and benchmarks."""

from __future__ import annotations

from typing import Any

_LATER = ("adr/", "benchmarks/", "tested.md", "flags.md")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lower the rank of pages that answer no question of a user's."""
    if page.file.src_uri.startswith(_LATER):
        page.meta["search"] = {"boost": 0.3}
    return markdown
