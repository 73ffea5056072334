"""Logging: progress lines, JSON lines."""
