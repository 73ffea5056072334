"""Steps without a barrier between pipeline ranks. Knows torch, and nothing of megatron.core."""
