"""The one place that knows how releases of megatron-core differ: what this package relies on, and adapters by signature.

Not all functions that are relied on are documented as public, so each is looked up by name and signature. A release that lacks
one raises an error that names it at start-up, instead of failing in the middle of a run. Nothing depends on a version number: a
release that was never tried but lacks nothing gets a warning and runs.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
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


def with_arguments(function: Callable[..., Any], given: Mapping[str, object]) -> Callable[..., Any]:
    """`function` with those of the `given` arguments that this release's has: they came, or got other names."""
    known = inspect.signature(function).parameters
    return functools.partial(function, **{name: value for name, value in given.items() if name in known})


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

    Only ranks of a new list replace the old one, so without this a rank that had an embedding under the earlier schedule
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


_MTP_SUMS = ("values", "correct_values", "total_values")


def mtp_entries() -> dict[str, Any]:
    """What megatron-core keeps of MTP layers for the log: ``values``, from 0.19 on ``loss_values`` and counts of predictions."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    return tracker


def mtp_sums() -> dict[str, Any]:
    """Those of `mtp_entries` that each microbatch adds to, by name. Shape [MTP layers], those of megatron-core."""
    return {name: values for name, values in mtp_entries().items() if name.removeprefix("loss_") in _MTP_SUMS}


def _values(entry: Any) -> Any:
    return entry["values"] if isinstance(entry, dict) else entry.values


def check_megatron_core() -> None:
    """Check the imported megatron-core. A release outside the tested range that lacks nothing gets one warning.

    Raises:
        CompatibilityError: it lacks something; the message has its version, the tested range, and every difference.
    """
    version, differences = imported_version(), list(_differences())
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


def makes_fused_experts_as_known() -> bool:
    """Whether experts have what `model.fused_ops` finds operations of Transformer Engine's op fuser by."""
    experts = _found("transformer.moe.experts", "TEGroupedMLP")
    given = getattr(getattr(experts, "__init__", None), "__code__", None)
    return hasattr(experts, "_make_fused_ops") and "_with_fused_impl" in getattr(given, "co_names", ())


def define_missing_te_gemm() -> None:
    """Define `moe_utils.te_general_gemm` as None if it does not exist. Call it before a model with experts is built.

    Without Transformer Engine, megatron-core 0.16.1 does not define this name of its router GEMM, but tests whether it is None.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


_CORE = "megatron.core."
_LAYOUT = "transformer.pipeline_parallel_layer_layout"
_HYBRID = "config hybrid_stack_spec hybrid_layer_pattern pre_process post_process vp_stage"
_CALLED: tuple[tuple[str, str, str], ...] = (
    (
        "pipeline_parallel.schedules",
        "forward_step",
        "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config cp_group_size "
        "collect_non_loss_data is_first_microbatch current_microbatch vp_stage is_last_stage",
    ),
    ("pipeline_parallel.schedules", "backward_step", "input_tensor output_tensor output_tensor_grad config"),
    ("pipeline_parallel.schedules", "get_tensor_shapes", "seq_length micro_batch_size config"),
    ("transformer.cuda_graphs", "_layer_is_graphable", "layer config"),
    ("transformer.cuda_graphs", "is_graph_capturing", ""),
    ("transformer.module", "GraphableMegatronModule._get_submodules_under_cudagraphs", ""),
    ("transformer.module", "GraphableMegatronModule._te_cuda_graph_capture", ""),
    ("tensor_parallel.layers", "ColumnParallelLinear._forward_impl", "input weight"),
    ("tensor_parallel.layers", "RowParallelLinear._forward_impl", "input weight"),
    (_LAYOUT, "PipelineParallelLayerLayout.get_num_layers_to_build", "layer_type vp_stage pp_rank"),
    (_LAYOUT, "PipelineParallelLayerLayout.get_layer_offset", "layer_type vp_stage pp_rank"),
    ("optimizer.distrib_optimizer", "DistributedOptimizer._copy_model_grads_to_main_grads", ""),
    ("optimizer.distrib_optimizer", "DistributedOptimizer._get_model_param_range_map", ""),
    ("distributed", "DistributedDataParallel", "disable_bucketing pg_collection"),
    ("distributed", "DistributedDataParallelConfig", "delay_wgrad_compute"),
)
"""(module of megatron-core, function or class, its parameters) of what this package calls."""

_SCHEDULE = (
    "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size decoder_seq_length forward_only "
    "collect_non_loss_data first_val_step force_all_reduce"
)
_REPLACED: tuple[tuple[str, str, str], ...] = (
    ("pipeline_parallel.schedules", "forward_backward_pipelining_without_interleaving", _SCHEDULE),
    ("pipeline_parallel.schedules", "forward_backward_pipelining_with_interleaving", _SCHEDULE),
    ("distributed", "DistributedDataParallel.__init__", "config ddp_config module"),
    ("transformer", "TransformerConfig.__post_init__", ""),
    (
        "transformer.cuda_graphs",
        "convert_schedule_table_to_order",
        "num_warmup_microbatches num_model_chunks schedule_table",
    ),
    ("models.gpt", "GPTModel.__init__", "config pre_process post_process vp_stage"),
    ("transformer.module", "Float16Module.forward", "fp32_output"),
    ("optimizer_param_scheduler", "OptimizerParamScheduler.step", "increment"),
    ("parallel_state", "is_pipeline_first_stage", "ignore_virtual vp_stage"),
    ("parallel_state", "is_pipeline_last_stage", "ignore_virtual vp_stage"),
    ("parallel_state", "default_embedding_ranks", ""),
    ("parallel_state", "initialize_model_parallel", "get_embedding_ranks get_position_embedding_ranks"),
)
"""The same of what `mcore.stock_loop.patches` replaces, each in the module or class that defines it."""

_LOOKED_UP: tuple[tuple[str, str, str], ...] = (
    (
        "pipeline_parallel.schedules",
        "get_forward_backward_func",
        "forward_backward_pipelining_without_interleaving forward_backward_pipelining_with_interleaving",
    ),
    ("parallel_state", "initialize_model_parallel", "default_embedding_ranks"),
    ("transformer.cuda_graphs", "TECudaGraphHelper._get_cuda_graph_input_data", "convert_schedule_table_to_order"),
    ("transformer.cuda_graphs", "TECudaGraphHelper.create_cudagraphs", "make_graphed_callables"),
    ("pipeline_parallel.utils", "is_pp_first_stage", "get_pg_rank"),
    ("pipeline_parallel.utils", "is_pp_last_stage", "get_pg_rank"),
)
"""(module, function, names that it looks up in its module at every call, so that it finds their replacements)."""


def _differences() -> Iterable[str]:
    """What this package calls or replaces and is not there, and callers that do not look up what is replaced at every call."""
    for module, name, parameters in _CALLED:
        yield from _missing(_found(module, name), _named(module, name), parameters)
    hybrid = [("models.hybrid.hybrid_model", "HybridModel.__init__", _HYBRID)] if has_hybrid_model() else []
    for module, name, parameters in (*_REPLACED, *hybrid):
        yield from _missing(_found(module, name, is_own=True), _named(module, name), parameters)
    for module, name, names in _LOOKED_UP:
        used = getattr(getattr(_found(module, name), "__code__", None), "co_names", ())
        yield from (f"{_named(module, name)} does not use {each}" for each in names.split() if each not in used)


def _found(module: str, name: str, *, is_own: bool = False) -> Any | None:
    """A function or class of megatron-core, None if there is none; with `is_own` only if its owner defines it itself."""
    owner: Any = importlib.import_module(_CORE + module)
    *outer, last = name.split(".")
    for each in outer:
        owner = getattr(owner, each, None)
    return vars(owner).get(last) if is_own and owner is not None else getattr(owner, last, None)


def _named(module: str, name: str) -> str:
    return name if "." in name or name[0].isupper() else f"{module.rpartition('.')[2]}.{name}"


def _missing(function: Callable[..., Any] | None, name: str, parameters: str) -> Iterable[str]:
    """Why `function` cannot be called with these parameters, if it cannot: it does not exist, or lacks some."""
    if function is None:
        yield f"{name} does not exist"
        return
    actual = inspect.signature(function).parameters
    lacking = [parameter for parameter in parameters.split() if parameter not in actual]
    if lacking:
        yield f"{name} has no parameter {', '.join(lacking)}"
