"""Logging: progress lines, JSON lines, curves, auxiliary losses, recorded timelines."""
