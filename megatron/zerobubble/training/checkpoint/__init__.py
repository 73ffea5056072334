"""Checkpoints: loading and inspecting them, and saving them atomically."""
