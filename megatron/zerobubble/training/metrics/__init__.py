"""Logging: progress lines, JSON lines, the summary of a run."""
