"""Every error this package raises on purpose, in one tree.

::

    ZeroBubbleError (Exception)
    |-- UserError (ValueError)          wrong input from the user; nothing has been started
    |   |-- ConfigError                 a flag, or flags that do not go together
    |   |-- DataError                   a dataset, a tokenizer or a vocabulary
    |   |-- CheckpointError             a checkpoint that is missing, damaged, of another model, or cannot be written
    |   |-- PlanError                   a plan that cannot be executed; prints the marked grid
    |   |   `-- DeadlockError           its ranks would wait for each other forever
    |   |-- CompatibilityError          an unsupported megatron-core or torch is installed
    |   `-- SplitError                  a module whose backward pass cannot be split into B and W
    `-- ExecutionError (RuntimeError)   a run that failed
        |-- WeightGradStoreError        a W without its B, or an iteration that left W undone
        `-- TransferError               a send or receive between ranks failed

A message states the given value, what is allowed and the remedy, and names the rank, the stage and the microbatch if it has any.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CompatibilityError",
    "ConfigError",
    "DataError",
    "DeadlockError",
    "ExecutionError",
    "PlanError",
    "SplitError",
    "TransferError",
    "UserError",
    "WeightGradStoreError",
    "ZeroBubbleError",
]


class ZeroBubbleError(Exception):
    """The base class of every error that this package raises on purpose."""


class UserError(ZeroBubbleError, ValueError):
    """Wrong input from the user. Raised before any process group is created or device memory allocated, where possible."""


class ConfigError(UserError):
    """A flag, or a combination of flags, that cannot be run."""


class DataError(UserError):
    """A dataset, a tokenizer or a vocabulary that is missing or does not fit."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, belongs to another model, or cannot be written."""


class PlanError(UserError):
    """A plan that cannot be executed. The message carries the grid with the offending cell marked."""


class DeadlockError(PlanError):
    """A plan in which ranks wait for each other forever."""


class CompatibilityError(UserError):
    """The installed megatron-core or torch lacks something that this package relies on."""


class SplitError(UserError):
    """A module whose backward pass cannot be split into B (input gradient, dgrad) and W (weight gradient, wgrad)."""


class ExecutionError(ZeroBubbleError, RuntimeError):
    """A run that failed although the user's input was valid."""


class WeightGradStoreError(ExecutionError):
    """A W ran for which B had stored nothing, or an iteration ended with pending W."""


class TransferError(ExecutionError):
    """A send or a receive between two pipeline ranks failed."""
