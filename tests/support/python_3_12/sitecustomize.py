"""All of Python 3.12 that megatron-core needs from 0.17 on, for a process of Python 3.11 that has this folder on PYTHONPATH."""

import typing

if not hasattr(typing, "override"):
    typing.override = lambda method: method
