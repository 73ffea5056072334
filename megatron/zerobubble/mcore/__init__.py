"""The integration with megatron-core: one extension point or patch per file."""
