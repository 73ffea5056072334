"""Datasets, tokenizers and the order in which samples are read."""
