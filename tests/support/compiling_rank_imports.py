"""What the ranks of a pool import that compile megatron-core's fused functions, each in its own process."""

from __future__ import annotations

import os

os.environ.update(TORCHDYNAMO_DISABLE="0", TORCHINDUCTOR_COMPILE_THREADS="1")  # read when torch is imported

import tests.support.rank_imports  # noqa: F401
