"""Datasets, tokenizers and the order of samples."""
