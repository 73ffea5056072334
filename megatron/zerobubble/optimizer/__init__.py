"""Optimizer steps without a barrier between pipeline ranks (post-validation). Uses torch, and nothing of megatron-core."""
