"""What tests do with a page of the playground."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

SMALL = "p=4&m=6&effort=drawn"
Open = Callable[..., Any]
"""The fixture `opened`: a query string -> a page, as a context manager."""


def cells(page: Page, row: str) -> list[str]:
    """A row of the table of results."""
    return page.locator("#metrics tr").filter(has_text=re.compile(f"^{row}")).first.locator("td").all_inner_texts()


def drop(page: Page, name: str, text: str) -> None:
    """Drop a file onto the page, as a mouse would."""
    transfer = page.evaluate_handle(
        "([name, text]) => { const d = new DataTransfer(); d.items.add(new File([text], name)); return d; }", [name, text]
    )
    page.dispatch_event("main", "drop", {"dataTransfer": transfer})
