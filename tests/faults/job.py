"""The training job of the fault laboratory: `pretrain_gpt.py` with the fault that the environment names."""

from __future__ import annotations

import os

import pretrain_gpt
from tests.faults.inject import install

if __name__ == "__main__":
    install(int(os.environ["RANK"]))
    pretrain_gpt.run(pretrain_gpt.model_provider, pretrain_gpt.forward_step_provider)
