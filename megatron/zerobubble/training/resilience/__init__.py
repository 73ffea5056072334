"""Failing ranks, ranks that hang, and early exit."""
