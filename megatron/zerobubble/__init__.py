"""Zero-bubble pipeline schedules for stock megatron-core.

The backward pass is split into B (input gradient) and W (weight gradient), and W fills the pipeline's bubble (arXiv 2401.10241,
2405.15362). Importing this package changes nothing and imports neither torch nor megatron.core; using one of its names imports
what that name needs.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megatron.zerobubble.version import __version__ as __version__

if TYPE_CHECKING:
    from megatron.zerobubble.flags.loop_options import MicrobatchLengths as MicrobatchLengths
    from megatron.zerobubble.flags.loop_options import Seeds as Seeds
    from megatron.zerobubble.flags.loop_options import Slices as Slices
    from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig as ZeroBubbleConfig
    from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention as TorchDotProductAttention
    from megatron.zerobubble.mcore.attention.torch_attention import use_torch_attention as use_torch_attention
    from megatron.zerobubble.mcore.stock_loop.patches import settle as settle
    from megatron.zerobubble.mcore.stock_loop.patches import status as status
    from megatron.zerobubble.mcore.stock_loop.patches import uninstall as uninstall
    from megatron.zerobubble.mcore.stock_loop.status import Status as Status
    from megatron.zerobubble.overlay import Installed as Installed
    from megatron.zerobubble.overlay import add_zero_bubble_args as add_zero_bubble_args
    from megatron.zerobubble.overlay import install as install

_HOMES = {
    "Installed": "overlay",
    "MicrobatchLengths": "flags.loop_options",
    "Seeds": "flags.loop_options",
    "Slices": "flags.loop_options",
    "Status": "mcore.stock_loop.status",
    "TorchDotProductAttention": "mcore.attention.torch_attention",
    "ZeroBubbleConfig": "flags.zero_bubble",
    "add_zero_bubble_args": "overlay",
    "install": "overlay",
    "settle": "mcore.stock_loop.patches",
    "status": "mcore.stock_loop.patches",
    "uninstall": "mcore.stock_loop.patches",
    "use_torch_attention": "mcore.attention.torch_attention",
}

__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers know the names above, and no other

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
