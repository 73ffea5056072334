"""Partition of layers into stages: layout text, costs of the model's parts, balanced layouts."""
