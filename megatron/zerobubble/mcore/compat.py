"""The one place that knows how releases of megatron-core differ: what this package relies on, and adapters by signature.

Not all functions that are relied on are documented as public, so each is looked up by name and signature. A release that lacks
one raises an error that names it at start-up, instead of failing in the middle of a run. Nothing depends on a version number: a
release that was never tried but lacks nothing gets a warning and runs.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron.zerobubble.errors import CompatibilityError

SUPPORTED = SpecifierSet(">=0.16.1,<0.20")
"""megatron-core releases that were tested. pyproject.toml has the same range."""

_log = logging.getLogger(__name__)


def imported_version() -> str:
    """The version of the megatron-core that is imported, not of the one pip installed: a checkout may come first on the path."""
    from megatron.core import package_info

    text = str(getattr(package_info, "__version__", "unknown"))
    try:
        return Version(text).public  # without the commit that a checkout appends
    except InvalidVersion:
        return text


def backward_step() -> Callable[..., Any]:
    """megatron-core's `backward_step`, to be called as `(input_tensor, output_tensor, output_tensor_grad, config=config)`.

    Its parameter `model_type`, which went with 0.17, is filled in where it exists.
    """
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules

    step: Callable[..., Any] = schedules.backward_step
    if "model_type" in inspect.signature(step).parameters:
        return functools.partial(step, model_type=ModelType.encoder_or_decoder)
    return step


def with_known_lengths(config: Any) -> Any:
    """A config for `schedules.get_tensor_shapes`: from 0.19 on it answers with no shape where `variable_seq_lengths` is set."""
    if not getattr(config, "variable_seq_lengths", False):
        return config
    known = copy.copy(config)
    known.variable_seq_lengths = False
    return known


def gradients_for_norm(optimizer: Any) -> list[Any]:
    """The gradients that count for the norm by which one `MegatronOptimizer` is clipped. The method was renamed with 0.19."""
    named = getattr(optimizer, "get_grads_for_grad_norm", None) or optimizer.get_main_grads_for_grad_norm
    return list(named())


def destroy_model_parallel() -> None:
    """Destroy megatron-core's process groups, and the list of ranks with an embedding, which megatron-core's own function keeps.

    Only ranks of a new list replace the old one, so without this a rank that had an embedding under the schedule of before
    still says so under a V, where it has none.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state._EMBEDDING_GLOBAL_RANKS = None


def has_hybrid_model() -> bool:
    """Whether megatron-core has `HybridModel`, which 0.18 added. Looks for its file and imports nothing."""
    core = importlib.util.find_spec("megatron.core")
    folders = [] if core is None else core.submodule_search_locations or []
    return any((Path(folder) / "models" / "hybrid" / "hybrid_model.py").is_file() for folder in folders)


def hybrid_model() -> Any | None:
    """The class `HybridModel`; None if megatron-core does not have it."""
    if not has_hybrid_model():
        return None
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel


def router_loss_sums() -> dict[str, Any]:
    """megatron-core's sums of the auxiliary losses of routers since they were last reset, for the log.

    Returns:
        Name of the loss -> tensor of shape [layers], float32: that of megatron-core, so writing into it changes the sum.
    """
    return {name: _values(entry) for name, entry in router_loss_entries().items()}


def router_loss_entries() -> dict[str, Any]:
    """What megatron-core keeps per auxiliary loss of routers: a dict up to 0.17, from 0.18 on a dataclass."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        entries: dict[str, Any] = get_moe_layer_wise_logging_tracker()
        return entries
    metrics: dict[str, Any] = get_moe_metrics_tracker().metrics
    return metrics


def mtp_loss_sums() -> Any:
    """megatron-core's sums of the losses of MTP layers since they were last reset, for the log.

    Returns:
        Tensor of shape [MTP layers], float32: that of megatron-core. None before the first forward pass.
    """
    tracker = mtp_entries()
    return tracker.get("loss_values", tracker.get("values"))


def mtp_entries() -> dict[str, Any]:
    """What megatron-core keeps of MTP layers for the log: ``values``, from 0.19 on ``loss_values`` and counts of predictions."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    return tracker


def _values(entry: Any) -> Any:
    return entry["values"] if isinstance(entry, dict) else entry.values


def check_megatron_core() -> None:
    """Check the imported megatron-core. A release outside the tested range that lacks nothing gets one warning.

    Raises:
        CompatibilityError: it lacks something; the message has its version, the tested range, and every difference.
    """
    _check(_differences())


def define_missing_te_gemm() -> None:
    """Define `moe_utils.te_general_gemm` as None if it does not exist. Call it before a model with experts is built.

    Without Transformer Engine, megatron-core 0.16.1 does not define this name of its router GEMM, but tests whether it is None.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def mark_missing_te_of_mla() -> None:
    """Record in megatron-core's MLA that Transformer Engine is not installed. Call it before such a layer is built.

    Before 0.17 the module takes Transformer Engine for installed whenever it can import its own wrappers, whose classes are mocks
    without it, and fails when it asks whether a linear is one of them.
    """
    from megatron.core.transformer import multi_latent_attention as mla

    if not isinstance(mla.TELinear, type):
        mla.HAVE_TE = False


def check_stock_loop() -> None:
    """As `check_megatron_core`, with what `mcore.stock_loop.patches` relies on besides.

    Raises:
        CompatibilityError: as `check_megatron_core`.
    """
    _check(itertools.chain(_differences(), _stock_loop_differences()))


def _check(found: Iterable[str]) -> None:
    version, differences = imported_version(), list(found)
    if differences:
        raise CompatibilityError(
            f"megatron-core {version} is imported, {SUPPORTED} is supported: {'; '.join(differences)}. "
            f"Install a supported release, for example: pip install 'megatron-core{SUPPORTED}'"
        )
    if version not in SUPPORTED:
        _warn_untried(version)


@functools.cache
def _warn_untried(version: str) -> None:
    """Warn once per process."""
    _log.warning(
        "megatron-core %s was never tried with this release, which was tested with %s; all functions it relies on are there",
        version,
        SUPPORTED,
    )


def _differences() -> Iterable[str]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout as Layout

    yield from _missing(
        schedules.forward_step,
        "schedules.forward_step",
        ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store", "config"),
        ("cp_group_size", "collect_non_loss_data", "is_first_microbatch", "current_microbatch", "vp_stage", "is_last_stage"),
    )
    yield from _missing(
        schedules.backward_step,
        "schedules.backward_step",
        ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
    )
    yield from _missing(schedules.get_tensor_shapes, "schedules.get_tensor_shapes", ("seq_length", "micro_batch_size", "config"))
    for linear in (ColumnParallelLinear, RowParallelLinear):
        yield from _missing(getattr(linear, "_forward_impl", None), f"{linear.__name__}._forward_impl", ("input", "weight"))
    for method in ("get_num_layers_to_build", "get_layer_offset"):
        yield from _missing(getattr(Layout, method, None), f"{Layout.__name__}.{method}", ("layer_type", "vp_stage", "pp_rank"))
    for method in ("_copy_model_grads_to_main_grads", "_get_model_param_range_map"):
        yield from _missing(getattr(DistributedOptimizer, method, None), f"{DistributedOptimizer.__name__}.{method}")
    yield from _missing(DistributedDataParallel, DistributedDataParallel.__name__, ("disable_bucketing", "pg_collection"))
    if "delay_wgrad_compute" not in inspect.signature(DistributedDataParallelConfig).parameters:
        yield "DistributedDataParallelConfig has no delay_wgrad_compute"


def _stock_loop_differences() -> Iterable[str]:
    """Missing functions that a stock loop calls, and callers that no longer look them up in their module at every call."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import schedules, utils
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    functions = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")
    for name in functions:
        yield from _missing(
            getattr(schedules, name, None),
            f"schedules.{name}",
            ("forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size"),
            ("decoder_seq_length", "forward_only", "collect_non_loss_data", "first_val_step", "force_all_reduce"),
        )
    yield from _not_looked_up(
        getattr(schedules, "get_forward_backward_func", None), "schedules.get_forward_backward_func", functions
    )
    yield from _missing(DistributedDataParallel.__init__, "DistributedDataParallel.__init__", ("config", "ddp_config", "module"))
    yield from _missing(vars(TransformerConfig).get("__post_init__"), "TransformerConfig.__post_init__")
    yield from _missing(GPTModel.__init__, "GPTModel.__init__", ("config", "pre_process", "post_process", "vp_stage"))
    hybrid = hybrid_model()
    if hybrid is not None:
        yield from _missing(
            hybrid.__init__,
            "HybridModel.__init__",
            ("config", "hybrid_stack_spec", "hybrid_layer_pattern", "pre_process", "post_process", "vp_stage"),
        )
    yield from _missing(vars(Float16Module).get("forward"), "Float16Module.forward", ("fp32_output",))
    for name in ("is_pipeline_first_stage", "is_pipeline_last_stage"):
        yield from _missing(getattr(parallel_state, name, None), f"parallel_state.{name}", ("ignore_virtual", "vp_stage"))
    yield from _missing(getattr(parallel_state, "default_embedding_ranks", None), "parallel_state.default_embedding_ranks")
    yield from _missing(
        parallel_state.initialize_model_parallel,
        "parallel_state.initialize_model_parallel",
        ("get_embedding_ranks", "get_position_embedding_ranks"),
    )
    yield from _not_looked_up(
        parallel_state.initialize_model_parallel, "parallel_state.initialize_model_parallel", ("default_embedding_ranks",)
    )
    for name in ("is_pp_first_stage", "is_pp_last_stage"):
        yield from _not_looked_up(getattr(utils, name, None), f"pipeline_parallel.utils.{name}", ("get_pg_rank",))


def _not_looked_up(function: Callable[..., Any] | None, name: str, globals_: Iterable[str]) -> Iterable[str]:
    """The names that `function` no longer looks up in its module: it would not see a replacement of them."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    yield from (f"{name} does not use {each}" for each in globals_ if each not in names)


def _missing(function: Callable[..., Any] | None, name: str, *parameters: tuple[str, ...]) -> Iterable[str]:
    """Why `function` cannot be called with these parameters, if it cannot: it does not exist, or lacks some."""
    if function is None:
        yield f"{name} does not exist"
        return
    actual = inspect.signature(function).parameters
    lacking = [parameter for group in parameters for parameter in group if parameter not in actual]
    if lacking:
        yield f"{name} has no parameter {', '.join(lacking)}"
