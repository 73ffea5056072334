"""Logging: progress lines, JSON lines, auxiliary losses, recorded timelines."""
