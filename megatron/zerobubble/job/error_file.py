"""The file in which a rank leaves the reason of its failure, which torchrun's summary at the end then shows as the root cause.

torchrun names a file per rank in TORCHELASTIC_ERROR_FILE, and of the ranks that failed it shows the one with the earliest time.
Times are whole seconds, so the first rank to fail writes the second before: another one that fails because of it does not tie.
Standard library only, and no failure here hides the one that is reported.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

__all__ = ["read_error_file", "write_error_file"]


def write_error_file(path: str | None, line: str, *, details: str | None = None) -> None:
    """Write the reason of this rank's failure, in the form of torch's ErrorHandler.

    Args:
        path: the rank's file; None, without torchrun, writes nothing.
        line: the reason, in one line.
        details: shown by torchrun in place of it, such as a traceback.
    """
    if not path:
        return
    extra = {"py_callstack": details or line, "timestamp": str(int(time.time()) - 1)}
    with contextlib.suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(f"{path}.new")
        unfinished.write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")
        unfinished.replace(path)  # torchrun, which may end this rank meanwhile, would not survive half a file


def read_error_file(path: Path) -> str | None:
    """The line in a file that a rank wrote; None if there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text(encoding="utf-8"))["message"]["message"])
    return None
