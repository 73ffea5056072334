"""The other job of the laboratory of hosts, for `zerobubble run`: a script around Megatron-LM's own loop."""

from __future__ import annotations

import os
from unittest import mock

from tests.faults.inject import install

if __name__ == "__main__":
    install(int(os.environ["RANK"]))
    mock.patch("megatron.core.datasets.utils.compile_helpers").start()  # wheels come without the sources; this data needs none
    import tests.support.python_3_12.sitecustomize  # noqa: F401 -- first
    from tests.support import pretrain_script  # sets up the logging of its process

    pretrain_script.main()
