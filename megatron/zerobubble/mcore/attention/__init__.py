"""Attention without Transformer Engine: torch's fused kernels, context parallelism, multi-latent attention."""
