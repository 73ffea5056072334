"""Zero-bubble pipeline schedules for stock megatron-core.

The backward pass is split into B (input gradient) and W (weight gradient), and W fills the pipeline's bubble (arXiv 2401.10241,
2405.15362). Importing this package changes nothing and imports neither torch nor megatron.core.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
