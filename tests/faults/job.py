"""The training job of the fault laboratory: the reference trainer with the fault that the environment names."""

from __future__ import annotations

import os

from tests.faults.inject import install
from tests.training.reference_trainer import forward_step_provider, model_provider, run

if __name__ == "__main__":
    install(int(os.environ["RANK"]))
    run(model_provider, forward_step_provider)
