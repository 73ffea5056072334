"""What the ranks of a pool import that have Transformer Engine's Python: it has to be there before megatron-core is imported."""

from __future__ import annotations

from tests.support.transformer_engine import install

install()

import tests.support.rank_imports  # noqa: E402, F401
