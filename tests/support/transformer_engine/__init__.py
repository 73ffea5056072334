"""Transformer Engine's real Python on the CPU, with torch operations in place of its compiled extension.

The wheel `transformer_engine` on PyPI holds all of its Python and no compiled code. `install` puts the unpacked wheel on the path
and answers what its Python asks of the compiled extension `transformer_engine_torch` and of `torch.cuda`. So megatron-core's own
layer specs run with Transformer Engine's own modules, autograd functions, queues of deferred weight gradients, hooks, optimizers
and quantizers.

===============  ==================================================================================================
`loader`          imports `transformer_engine` so that its modules find a torch with an inert CUDA device
`extension`       the module `transformer_engine_torch`; a name that is not answered raises when it is called
`gemm`            GEMMs, of quantized operands too
`norms`           LayerNorm and RMSNorm, forward and backward
`activations`     those of the op fuser's operations
`attention`       fused attention, for context parallelism
`float8`          casts to and from float8, with torch's own dtypes
`multi_tensor`    the kernels of its optimizers
`userbuffers`     buffers that all layers of a name share (`tp_comm_overlap`)
`start`           starts a whole job
===============  ==================================================================================================

What this cannot show: the kernels' results, speed and memory, the order of their streams, what they do with a strided operand,
CUDA graphs, Userbuffers' overlap with GEMMs, flash attention, MXFP8, blockwise scaling and FP4. Operands of quantized
GEMMs are dequantized and multiplied in float32, so that errors of the casts are real and those of the accumulation are not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["NEWEST", "OLDEST", "VERSION_VARIABLE", "chosen_version", "install", "unpacked"]

OLDEST = "2.8.0"
"""The oldest release that schedules which split B and W support."""
NEWEST = "2.20.2"
"""The newest release that was tried."""
VERSION_VARIABLE = "ZB_TEST_TRANSFORMER_ENGINE"
"""Environment variable with the release to test with; without it, the newest."""

_ROOT = Path(__file__).resolve().parents[3]

_ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # import without the shared libraries
    "NVTE_TORCH_COMPILE": "0",
    "NVTE_MASKED_SOFTMAX_FUSION": "0",
    "NVTE_FRAMEWORK": "pytorch",
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",  # megatron-core asks for it before it fuses experts; its kernel needs Blackwell
}
"""Transformer Engine's own switches: nothing is compiled. Without flash-attn, and with no fused attention for any shape, its
attention chooses the backend of torch operations."""


def chosen_version() -> str:
    """The release of Transformer Engine to test with."""
    return os.environ.get(VERSION_VARIABLE, NEWEST)


def unpacked(version: str | None = None) -> Path | None:
    """The folder with the unpacked wheel; None if it was not fetched (`python -m tools.releases te VERSION` does)."""
    folder = _ROOT / ".transformer-engine" / (version or chosen_version())
    return folder if folder.is_dir() else None


def install(version: str | None = None) -> None:
    """Make `import transformer_engine` run the real Python on the CPU, for the rest of this process.

    Call it before megatron.core is imported.

    Args:
        version: of Transformer Engine; default: the chosen one.

    Raises:
        RuntimeError: the wheel was not fetched, or megatron.core has been imported without Transformer Engine.
    """
    version = version or chosen_version()
    folder = unpacked(version)
    if folder is None:
        raise RuntimeError(f"Transformer Engine {version} was not fetched: python -m tools.releases te {version}")
    if "transformer_engine" in sys.modules:
        return
    if "megatron.core.extensions.transformer_engine" in sys.modules:
        raise RuntimeError("megatron.core was imported without Transformer Engine: call install() before")
    os.environ.update(_ENVIRONMENT)
    sys.path.insert(0, str(folder))

    from tests.support.transformer_engine import loader

    loader.install(version)
