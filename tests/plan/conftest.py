"""Hypothesis settings: reproducible examples, and no deadline, because machines differ."""

from hypothesis import settings

settings.register_profile("plan", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("plan")
