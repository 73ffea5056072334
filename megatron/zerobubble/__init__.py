"""Zero-bubble pipeline schedules for stock megatron-core.

The backward pass is split into B (input gradient) and W (weight gradient), and W fills the pipeline's bubble (arXiv 2401.10241,
2405.15362). Importing this package changes nothing and imports neither torch nor megatron.core; using one of its names imports
what that name needs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.zerobubble.integration.install import uninstall as uninstall
    from megatron.zerobubble.integration.model import build_chunks as build_chunks
    from megatron.zerobubble.integration.staged_optimizer import post_validation as post_validation
    from megatron.zerobubble.integration.zb_schedules import PipelineSchedule as PipelineSchedule
    from megatron.zerobubble.integration.zb_schedules import ScheduleChoice as ScheduleChoice
    from megatron.zerobubble.optimizer.post_validation import PostValidation as PostValidation
    from megatron.zerobubble.optimizer.post_validation import Verdict as Verdict
    from megatron.zerobubble.training.overlay import add_zero_bubble_args as add_zero_bubble_args
    from megatron.zerobubble.training.overlay import install as install

__version__ = "0.1.0"

_HOMES = {
    "PipelineSchedule": "integration.zb_schedules",
    "PostValidation": "optimizer.post_validation",
    "ScheduleChoice": "integration.zb_schedules",
    "Verdict": "optimizer.post_validation",
    "add_zero_bubble_args": "training.overlay",
    "build_chunks": "integration.model",
    "install": "training.overlay",
    "post_validation": "integration.staged_optimizer",
    "uninstall": "integration.install",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
