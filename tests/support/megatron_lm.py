"""Megatron-LM's own training loop, run by the ranks of a `RankPool`. Some releases of megatron-core come with it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import multiprocessing
import re
import shlex
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np

import megatron.zerobubble
from megatron.zerobubble.cli.run import _PACKING, _parse
from megatron.zerobubble.flags.fork_flags import in_our_flags
from megatron.zerobubble.flags.loop_options import MicrobatchLengths
from megatron.zerobubble.flags.virtual_stages import with_chunks
from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from megatron.zerobubble.mcore.cpu.scripts import without_gpus
from megatron.zerobubble.overlay import chunks_of
from tests.support.process_groups import destroy_groups

LR = 1e-2
SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --vocab-size 90 "
    f"--make-vocab-size-divisible-by 4 --micro-batch-size 2 --global-batch-size 8 --lr {LR} --lr-decay-iters 100 "
    "--log-interval 1 --hidden-dropout 0 --attention-dropout 0 --mock-data --num-workers 0 --eval-iters 1 "
    "--tokenizer-type NullTokenizer"
)
"""A model and batches, for any script of Megatron-LM."""
WITHOUT_KERNELS = (
    "--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion"
)
"""What a machine without CUDA needs besides."""

LOGGED = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) ")
NORMS = re.compile(r"grad norm: (\S+) \|(.*?number of skipped iterations: +\d+ )")
"""(norm of the gradients, what else is logged behind it: with their flags number of zeros and norm of the parameters)."""
MISSING = (
    "megatron-core has Megatron-LM's training loop, megatron.training, from 0.17 on: put one of these, or a checkout of "
    "Megatron-LM, first on PYTHONPATH"
)
"""Why a test is skipped."""
_VALIDATED = re.compile(r"validation loss at (.*?) \| lm loss value: (\S+) ")


def logged(text: str) -> dict[str, tuple[str, ...]]:
    """What the loop printed, digit by digit: iteration -> (loss, gradient norm), and evaluation -> (loss,)."""
    return {
        **{number: (loss, norm) for number, loss, norm in LOGGED.findall(text)},
        **{where: (loss,) for where, loss in _VALIDATED.findall(text)},
    }


def pretrain(rank: int, flags: str, zero_bubble: str = "") -> str:
    """Train on one rank by `flags`, with the schedule of the flags `zero_bubble`; what it printed.

    Everything global that the loop leaves behind is removed, so that the next call starts afresh.
    """
    argv = ["pretrain_script.py", *shlex.split(f"{SMALL} {WITHOUT_KERNELS} {flags}")]
    return _run(rank, argv, _parser().parse_args(zero_bubble.split()), _main_of_script)


def pretrain_gpt(rank: int, flags: str, *, has_same_weights: bool = False) -> str:
    """Train on one rank by this project's own script, zero-bubble flags among `flags`; what it printed, then `ran SCHEDULE`.

    With `has_same_weights` the first weights depend on the layer's number alone, as in `pretrain_script`.
    """
    words, _ = in_our_flags(flags.split())
    zero_bubble, own = _parser().parse_known_args(words)
    chunks = chunks_of(zero_bubble)
    if chunks is not None:
        own, _ = with_chunks(own, chunks, "")
    lengths = MicrobatchLengths("thd") if set(_PACKING) & set(own) else None
    main = partial(_main_of_gpt, has_same_weights=has_same_weights)
    return _run(rank, ["pretrain_gpt.py", *own], zero_bubble, main, lengths)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    megatron.zerobubble.add_zero_bubble_args(parser)
    return parser


def _main_of_script(zero_bubble: argparse.Namespace) -> None:
    from tests.support import pretrain_script  # imports megatron.training

    pretrain_script.main()


def _main_of_gpt(zero_bubble: argparse.Namespace, *, has_same_weights: bool) -> None:
    from megatron.zerobubble import gpt_script  # imports megatron.training
    from tests.support.pretrain_script import initialize_weights

    def model(**given: Any) -> Any:
        chunk = original(**given)
        if has_same_weights:
            initialize_weights(chunk)
        return chunk

    original, build_tokenizer = gpt_script.model, gpt_script.build_tokenizer
    replacements = {"model": model, "build_tokenizer": lambda args: Conversations() if args.sft else build_tokenizer(args)}
    try:
        with (
            mock.patch.multiple(gpt_script, **replacements),
            mock.patch.dict(sys.modules, datasets=types.SimpleNamespace(load_dataset=load_json_lines)),
        ):
            gpt_script.main(zero_bubble)
    finally:
        status = megatron.zerobubble.status()
        sys.stdout.write(f"ran {'stock' if status is None else status.schedule}\n")


class Conversations:
    """A tokenizer of conversations, as Megatron-LM's SFT dataset calls it: a token per character, targets in what is answered."""

    eod, pad, vocab_size = 0, 1, 90
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "Conversations"}

    def tokenize_conversation(self, conversation: list[dict[str, str]], **_: bool) -> tuple[Any, Any]:
        """(tokens, targets) of the messages of one conversation."""
        said = [(2 + ord(each) % 80, message["role"]) for message in conversation for each in f"{message['content']}."]
        return np.array([token for token, _ in said]), np.array([token if by == "assistant" else -100 for token, by in said])


def load_json_lines(kind: str, *, data_files: str, split: str) -> list[Any]:
    """What `load_dataset` of the package `datasets` returns for JSON lines, for who only reads it."""
    return [json.loads(line) for line in Path(data_files).read_text(encoding="utf-8").splitlines()]


def flags_of_script(rank: int) -> tuple[set[str], set[str], set[str], set[str]]:
    """Flags of Megatron-LM; those with this project's script; those that do not reach it as they are; those that it refuses."""
    from megatron.training import arguments

    from megatron.zerobubble import gpt_script

    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    theirs = {flag for flag in parser._option_string_actions if flag.startswith("--")}
    gpt_script._add_flags(argparse.Namespace(), parser)
    changed = {flag for flag in theirs if _parse([__file__, flag], is_ours=True).arguments != [flag]}
    return theirs, set(parser._option_string_actions), changed, theirs & set(gpt_script._ELSEWHERE.split())


def _run(
    rank: int,
    argv: list[str],
    zero_bubble: argparse.Namespace,
    main: Callable[[argparse.Namespace], None],
    lengths: MicrobatchLengths | None = None,
) -> str:
    import tests.support.python_3_12.sitecustomize  # noqa: F401 -- their wheels run on 3.11

    with (
        loop_of_its_own(RANK=str(rank), LOCAL_RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1") as printed,
        mock.patch.object(sys, "argv", argv),
        mock.patch("megatron.core.datasets.utils.compile_helpers"),  # wheels come without the sources; this data needs none
    ):
        warnings.filterwarnings("ignore", module=r"megatron\.training")
        megatron.zerobubble.install(zero_bubble, lengths=lengths)
        try:
            main(argparse.Namespace(**vars(zero_bubble), cpu=True))
        except SystemExit as exit:  # --exit-interval
            if exit.code:
                raise
    return printed.getvalue()


@contextlib.contextmanager
def loop_of_its_own(**environment: str) -> Iterator[io.StringIO]:
    """Let a rank of a pool run a framework's loop, which makes the process groups and sets globals; gives what it prints.

    At the end what was installed is undone, and the globals are gone.

    Args:
        environment: variables that the loop reads.
    """
    printed = io.StringIO()
    destroy_groups()
    with (
        warnings.catch_warnings(),
        quiet_third_parties(),
        without_gpus(),
        HostDevice().on_host(),
        mock.patch.dict("os.environ", environment),
        mock.patch.dict(multiprocessing.current_process()._config, daemon=False),  # type: ignore[attr-defined]  # it saves in another
        contextlib.redirect_stdout(printed),
    ):
        try:
            yield printed
        finally:
            megatron.zerobubble.uninstall()
            _forget()


def _forget() -> None:
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import global_vars

    for child in multiprocessing.active_children():  # of saving a checkpoint
        child.terminate()
        child.join()
    filesystem_async._results_queue = None
    MTPLossLoggingHelper.tracker.clear()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False  # of which kind it is, the next loop says

    for undo in (
        global_vars.destroy_global_vars,
        num_microbatches_calculator.destroy_num_microbatches_calculator,
        rerun_state_machine.destroy_rerun_state_machine,
    ):
        undo()
    parallel_state.destroy_global_memory_buffer()
    gc.collect()
    destroy_groups()
