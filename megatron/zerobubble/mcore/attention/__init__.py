"""Attention without Transformer Engine, by torch's fused kernels."""
