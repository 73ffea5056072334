"""The reference trainer under megatron-core's 1F1B without the device-wide wait behind each exchange (`batch_p2p_sync`)."""

from __future__ import annotations

from typing import Any

from megatron.zerobubble.training.entry import run
from megatron.zerobubble.training.models import mcore_config
from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider

_original = mcore_config.transformer_config


def _without_sync(*args: Any, **kwargs: Any) -> Any:
    config = _original(*args, **kwargs)
    config.batch_p2p_sync = False
    return config


if __name__ == "__main__":
    mcore_config.transformer_config = _without_sync
    run(model_provider, forward_step_provider)
