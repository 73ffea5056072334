"""Starts the reference trainer on Transformer Engine's real Python (`install`), with fused accumulation as on GPUs.

torchrun --nproc-per-node 2 tests/support/transformer_engine/pretrain.py --transformer-impl transformer_engine ...
"""

from __future__ import annotations

import runpy

import megatron.zerobubble.mcore  # noqa: F401 - first: makes megatron.core importable without triton
from tests.support.transformer_engine import install

if __name__ == "__main__":
    install()
    from megatron.zerobubble.training.models import mcore_config

    kernels = mcore_config._kernels
    mcore_config._kernels = lambda model, **place: {  # type: ignore[assignment]
        **kernels(model, **place),
        "gradient_accumulation_fusion": model.gradient_accumulation_fusion,
    }
    runpy.run_module("tests.training.reference_trainer", run_name="__main__")
