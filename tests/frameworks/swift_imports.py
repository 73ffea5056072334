"""What the ranks of a pool import that run ms-swift, which imports far more than it runs.

Of `_INERT` only names are imported here. modelscope is its hub, of which it also configures a logger; the kernels of mcore-bridge
are triton's. Its curves of a run, by matplotlib, are not drawn.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings

os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", USE_HF="1", HF_HUB_OFFLINE="1")  # read when they are imported
warnings.filterwarnings("ignore")

from tests.frameworks import prepared  # noqa: E402

_INERT = ("aiohttp", "dacite", "json_repair", "modelscope", "scipy", "sentencepiece", "simplejson", "trl", "zstandard")
_KERNELS = "mcore_bridge.model.modules.kernels"
prepared.install(*_INERT)
sys.modules[_KERNELS] = prepared.Module(_KERNELS)
logger = logging.getLogger("modelscope")
logger.addHandler(logging.NullHandler())
importlib.import_module("modelscope.utils.logger").get_logger = lambda *_, **__: logger  # type: ignore[attr-defined]
importlib.import_module("modelscope.hub.utils.utils").get_cache_dir = lambda *_, **__: "/nonexistent"  # type: ignore[attr-defined]
importlib.import_module("ray").is_initialized = lambda: False  # type: ignore[attr-defined]
importlib.import_module("swift.pipelines.train")
importlib.import_module("swift.megatron.pipelines.train.sft").plot_images = lambda *_, **__: None  # type: ignore[attr-defined]
importlib.import_module("tests.support.rank_imports")
