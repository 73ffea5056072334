"""The integration with megatron-core: one extension point or patch per file."""

from megatron.zerobubble.mcore.cpu.triton_import import allow_missing_triton

allow_missing_triton()  # before anything here imports megatron.core
