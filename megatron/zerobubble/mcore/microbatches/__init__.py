"""Microbatches of unequal length: their lengths, their plan per iteration, and the order in which a rank reads them."""
