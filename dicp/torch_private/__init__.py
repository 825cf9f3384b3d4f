"""The only package that touches PyTorch's private names, which it gives public ones.

One file per concern; import from this package. The release is checked once, at import, against the
window these names were verified with; outside it the import fails and says so. Files that import
sympy, AOTAutograd or Dynamo, which takes seconds, are imported when a name of theirs is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from dicp.torch_private.releases import NEWEST, check_release, release_of

check_release(torch.__version__)

# ruff: noqa: E402
from dicp.torch_private.devices import (
    HOST,
    actual_device_type,
    capturing,
    current_stream,
    privateuse1_name,
    record_on_device,
    register_device_module,
)
from dicp.torch_private.graphs import (
    do_not_recompute,
    is_backward,
    is_tracing_error,
    make_fx,
    recompute_in_backward,
    saved_for_backward,
    traced_from,
)
from dicp.torch_private.imports import AfterDynamo, traced_device_attributes
from dicp.torch_private.modes import (
    TorchDispatchMode,
    disable_current_modes,
    pop_function_mode,
    push_function_mode,
    pytree,
)
from dicp.torch_private.operators import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    DECOMPOSED_BY_WRITING,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    all_decompositions,
    dispatches_alone,
    grouped_mm,
    is_composite,
    original_of,
    overload_name,
    overloads_of,
    registered_names,
    schema_of,
    twin_of,
)
from dicp.torch_private.profiling import (
    DEVICE_ROW,
    hook_profiler,
    profiled_range,
    profiling,
    report_memory,
)
from dicp.torch_private.tensors import (
    FakeTensor,
    FakeTensorMode,
    StorageWeakRef,
    empty_strided_cpu,
    is_tracing,
    is_wrapped_number,
    reinterpret_tensor,
    true_device,
    version_of,
)

if TYPE_CHECKING:
    from dicp.torch_private.aot import (
        BoxedBool,
        OutputCode,
        aot_stage1_graph_capture,
        compile_backward,
        compile_forward,
        compile_inference,
        create_aot_state,
        functorch_config,
        inner_metadata,
        log_inference_graph,
        log_joint_graph,
        log_split_graphs,
        logs_graphs,
        make_autograd_function,
        make_inference_function,
        make_runtime_safe,
        min_cut_rematerialization_partition,
        partition_joint_graph,
        prepare_aot,
        rematerialize_checkpoints,
        run_passes_on_nested_graphs,
        tensorify_python_scalars,
    )
    from dicp.torch_private.aot_cache import (
        BundledCompiledBackward,
        BundledCompiledForward,
        NotCacheableError,
        autograd_key,
        serialize_graph_module,
        storable_result,
    )
    from dicp.torch_private.dynamo import (
        GmWrapper,
        GraphBreak,
        GraphBreaks,
        TorchDynamoException,
        any_number_of_compilations,
        backend_registry,
        compiled_call,
        disable_compiled_autograd,
        dynamo_config,
        dynamo_counters,
        dynamo_module,
        flatten_graph_inputs,
        frame_seconds,
        original_module,
        register_repeatedly,
        set_compiled_call,
        shorten_compilations,
        trace_recurrent_modules,
    )
    from dicp.torch_private.guards import (
        NewGuards,
        ShapeFacts,
        backed_symints,
        guards_hold,
        guards_on,
        traced_guards,
        traced_guards_hold,
    )
    from dicp.torch_private.symbols import (
        ShapeEnv,
        depends_on_data,
        expression_of,
        first_sizes,
        floor_division,
        free_symbols,
        hint_of,
        is_plain_symbol,
        is_proved,
        linear_factor,
        number_at,
        python_size,
        ranges_of,
        remainder,
        shape_env_of,
        size_expression,
        statically_known_true,
    )

_DEFERRED = ("symbols", "guards", "aot", "aot_cache", "dynamo")
"""The files above that are imported when needed, those first that import less."""


def __getattr__(name: str) -> Any:
    """A name of a deferred file, which is imported with those before it."""
    for part in () if name.startswith("_") else _DEFERRED:
        found = vars(import_module(f"{__name__}.{part}"))
        if name in found:
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
