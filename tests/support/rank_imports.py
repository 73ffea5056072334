"""What the ranks of a pool import, in the process that they are forked from.

That process does nothing else: it has no threads, no process group and no CUDA, none of which survives a fork.
"""

from __future__ import annotations

import gc
import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
warnings.filterwarnings("ignore", module=r"megatron\.core\.")  # Apex and Transformer Engine are missing, five times per rank

# First: without it megatron.core of 0.18 and later cannot be imported where triton is missing.
import megatron.zerobubble.mcore  # noqa: E402, F401
import tests.support.gpt  # noqa: E402, F401
from megatron.zerobubble.mcore import agreement  # noqa: E402

agreement._LEAVE_S = 0.0  # a rank of a pool that refuses something does not end
gc.collect()
gc.freeze()  # tests collect garbage to free process groups; scanning all objects of torch each time took most of a test
