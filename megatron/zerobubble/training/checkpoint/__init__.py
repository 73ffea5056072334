"""Checkpoints: what they hold, loading and inspecting them, saving them whole or not at all."""
