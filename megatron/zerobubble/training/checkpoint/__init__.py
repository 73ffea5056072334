"""Checkpoints: verifying and loading them, and saving them atomically."""
