"""The reference trainer as a script, which pretrain_gpt.py starts only where megatron-core has no `megatron.training`."""

from megatron.zerobubble.training.entry import run
from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider

__all__ = ["forward_step_provider", "model_provider", "run"]

if __name__ == "__main__":
    run(model_provider, forward_step_provider)
