"""Slices of microbatches along their sequence, in the layers, batches and losses of megatron-core's models."""
