"""What the ranks of a pool import that run frameworks' training."""

from __future__ import annotations

import os
import warnings

os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")  # read when torch is imported
warnings.filterwarnings("ignore")

from tests.frameworks import prepared  # noqa: E402

prepared.install()

import megatron.bridge.training.gpt_step  # noqa: E402
import megatron.bridge.training.pretrain  # noqa: E402, F401
import verl.workers.engine.megatron.transformer_impl  # noqa: E402, F401

import tests.support.rank_imports  # noqa: E402, F401
