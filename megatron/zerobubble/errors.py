"""Every error this package raises on purpose, in one tree.

::

    ZeroBubbleError (Exception)
    |-- UserError (ValueError)          something the user gave is wrong; nothing has been started
    |   |-- ConfigError                 a flag, or flags that do not go together
    |   |-- DataError                   a dataset, a tokenizer or a vocabulary
    |   |-- CheckpointError             a checkpoint that is missing, damaged, of another model, or cannot be written
    |   |-- PlanError                   a plan that cannot be executed; prints the marked grid
    |   |   `-- DeadlockError           its ranks would wait for each other for ever
    |   |-- CompatibilityError          the installed megatron-core or torch is not one we know
    |   `-- SplitError                  a module whose backward pass cannot be split into B and W
    `-- ExecutionError (RuntimeError)   a run that went wrong
        |-- WeightGradStoreError        W asked for what B did not put, or an iteration left W behind
        `-- TransferError               a send or receive between ranks failed

A message says what was given, what is allowed and what to do; where there is a rank, a stage or a microbatch, it names it.
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
    """The root: catch this to catch everything the package raises on purpose."""


class UserError(ZeroBubbleError, ValueError):
    """Something the user gave is wrong. Raised before any process group or device memory is touched, where possible."""


class ConfigError(UserError):
    """A flag, or a combination of flags, that cannot be run."""


class DataError(UserError):
    """A dataset, a tokenizer or a vocabulary that is missing or does not fit."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, belongs to another model, or cannot be written."""


class PlanError(UserError):
    """A plan that cannot be executed. The message carries the grid with the offending cell marked."""


class DeadlockError(PlanError):
    """A plan in which ranks wait for each other for ever."""


class CompatibilityError(UserError):
    """The installed megatron-core or torch differs from what this package relies on."""


class SplitError(UserError):
    """A module whose backward pass cannot be split into B (input gradient) and W (weight gradient)."""


class ExecutionError(ZeroBubbleError, RuntimeError):
    """A run that went wrong although what the user gave was right."""


class WeightGradStoreError(ExecutionError):
    """W was asked for what B did not put, or an iteration ended with W left over."""


class TransferError(ExecutionError):
    """A send or a receive between two pipeline ranks failed."""
