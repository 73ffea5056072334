"""Makes frameworks importable in ranks that torchrun starts with this folder on PYTHONPATH, and in what they spawn."""

import os
import sys

if "RANK" in os.environ and not any("resource_tracker" in word for word in sys.orig_argv):
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from tests.frameworks import prepared

    prepared.install()
