"""The other job of the laboratory of hosts, for `zerobubble run`: a script around Megatron-LM's own loop."""

from __future__ import annotations

import os
import typing
from unittest import mock

from tests.faults.inject import install

if __name__ == "__main__":
    install(int(os.environ["RANK"]))
    if not hasattr(typing, "override"):  # what the wheels of Megatron-LM need on Python 3.11
        typing.override = lambda method: method  # type: ignore[attr-defined]
    mock.patch("megatron.core.datasets.utils.compile_helpers").start()  # wheels come without the sources; this data needs none
    from tests.support import pretrain_script  # sets up the logging of its process

    pretrain_script.main()
