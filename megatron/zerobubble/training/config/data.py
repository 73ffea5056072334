"""Datasets and batch sizes: the flags of the group "Data"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, not_negative, positive, refuse
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.training.config.mla import MlaConfig
from megatron.zerobubble.training.config.model import ModelConfig
from megatron.zerobubble.training.config.moe import MoeConfig
from megatron.zerobubble.training.config.optim import OptimConfig
from megatron.zerobubble.training.config.parallel import ParallelConfig

__all__ = ["DataConfig"]

_DEFAULT_SPLIT = "969, 30, 1"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    micro_batch_size: int
    """Samples per microbatch."""
    global_batch_size: int | None = None
    """Samples per iteration, over all microbatches and data-parallel ranks. Default: one microbatch per data-parallel rank."""
    data_path: str | None = field(default=None, metadata={"metavar": "PREFIX"})
    """Path prefix of an indexed dataset, without .bin and .idx. --split divides it."""
    split: str | None = None
    """Proportions of training, validation and test documents, separated by commas. Default: 969, 30, 1."""
    mock_data: bool = False
    """Train on synthetic data instead of --data-path."""
    num_workers: int = 0
    """Data loader processes per rank; 0 loads samples in the rank's own process."""
    dataloader_type: Literal["single"] = "single"
    """Order of samples: shuffled once by --seed, for all epochs, and read from the beginning to the end (single)."""
    variable_seq_lengths: bool = False
    """Make each document a sample of its own length, and pad a microbatch to its longest sample instead of --seq-length. Longer
    documents become several samples."""
    pack_sequences: bool = False
    """Pack several documents into each sample of at most --seq-length tokens. No document attends to another one. Without
    --variable-seq-lengths samples are padded to --seq-length."""

    def __post_init__(self) -> None:
        not_negative(self, "num_workers")
        positive(self, "micro_batch_size", "global_batch_size")
        at_most(self, 2**31 - 1, "micro_batch_size", "global_batch_size")
        at_most(self, 1024, "num_workers")
        weights = re.split(r"[,/]\s*", self.split_text.strip())
        are_numbers = len(weights) <= 3 and all(re.fullmatch(r"\d*\.?\d+", weight.strip()) for weight in weights)
        if not are_numbers:
            raise ConfigError(f"--split {self.split_text!r} must be up to three proportions, for example 969,30,1")
        if not all(map(math.isfinite, self.split_weights)):
            raise ConfigError(f"--split {quoted(self.split_text)} has a number that is too large; give for example 969,30,1")
        if not any(self.split_weights):
            raise ConfigError(f"--split {self.split_text!r} has no proportion above 0; give for example 969,30,1")
        self._check_documents()
        if self.mock_data and self.data_path is not None:
            raise ConfigError("--mock-data and --data-path are both given; choose one")
        if not self.mock_data and not self.data_path:
            raise ConfigError("no data: give --data-path PREFIX (see tools/preprocess_data.py), or --mock-data")

    def _check_documents(self) -> None:
        flag = self.document_flag
        if flag is not None and self.mock_data:
            raise ConfigError(f"{flag} reads documents, and --mock-data has none; give --data-path")

    def check_documents(self, optim: OptimConfig) -> None:
        """Raise ConfigError for flags that do not go with samples that are documents."""
        flag = self.document_flag
        if flag is not None and not optim.calculate_per_token_loss:
            raise ConfigError(
                f"{flag} needs --calculate-per-token-loss: microbatches have unequal numbers of tokens that count, and without "
                "it they weigh the same; add it"
            )

    def check_lengths(self, moe: MoeConfig, parallel: ParallelConfig, zero_bubble: ZeroBubbleConfig) -> None:
        """Raise ConfigError for flags that --variable-seq-lengths does not go with."""
        if not self.variable_seq_lengths:
            return
        sends = zero_bubble.schedule == "stock" and parallel.pipeline_model_parallel_size > 1  # which then refuse that dispatcher
        shares = moe.expert_model_parallel_size > 1  # by ranks with other microbatches
        if moe.num_experts is not None and moe.moe_token_dispatcher_type == "allgather" and (sends or shares):
            raise ConfigError("--variable-seq-lengths does not go with --moe-token-dispatcher-type allgather; choose alltoall")

    def check_packing(
        self, model: ModelConfig, mla: MlaConfig, parallel: ParallelConfig, *, flag: str = "--pack-sequences"
    ) -> None:
        """Raise ConfigError for flags that packed sequences do not go with.

        Args:
            model: of the run.
            mla: of the run.
            parallel: of the run.
            flag: the flag that packs them.
        """
        context = parallel.context_parallel_size
        problems = {
            f"--context-parallel-size {context}: ranks share one sequence, not several": context > 1,
            "--multi-latent-attention": mla.multi_latent_attention,
            "--mtp-num-layers": model.mtp_num_layers,
            "--attention-backend local, which has no packed sequences; choose auto": model.attention_backend == "local",
        }
        if self.micro_batch_size != 1:
            raise ConfigError(
                f"{flag} puts several documents into one row: give --micro-batch-size 1, not {self.micro_batch_size}"
            )
        refuse(f"{flag} does not go with", problems)

    @property
    def document_flag(self) -> str | None:
        """The flag that makes documents samples, for errors; None if none is given."""
        flags = {"--pack-sequences": self.pack_sequences, "--variable-seq-lengths": self.variable_seq_lengths}
        return next((flag for flag, is_given in flags.items() if is_given), None)

    @property
    def reads_documents(self) -> bool:
        """Whether samples are documents (`data.documents`), instead of pieces of --seq-length of all text (megatron-core's)."""
        return self.document_flag is not None

    @property
    def split_text(self) -> str:
        """--split, or its default."""
        return _DEFAULT_SPLIT if self.split is None else self.split

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Proportions of training, validation and test documents, in any unit."""
        train, valid, test, *_ = (*map(float, re.split(r"[,/]", self.split_text)), 0.0, 0.0, 0.0)
        return train, valid, test
