"""The stages of AOTAutograd, called alike in every release of the window."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.source import CallMethodItemSource, FloatTensorSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.runtime_wrappers import make_runtime_safe
from torch._functorch.aot_autograd import (
    aot_stage1_graph_capture,
    create_aot_state,
    prepare_aot_module_simplified,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor.output_code import OutputCode
from torch._inductor.utils import BoxedBool
from torch._logging._internal import log_state, trace_log

from dicp.torch_private.releases import release_of

inner_metadata = graph_compile._get_inner_meta
make_inference_function = graph_compile._aot_stage2c_make_inference_function

# From 2.13 on the stages take their compilers as arguments; before, they read the configuration.
STAGES_TAKE_COMPILERS: Final = release_of(torch.__version__) >= (2, 13)

if STAGES_TAKE_COMPILERS:
    from torch._functorch._activation_checkpointing import (
        remat_using_tags_for_fwd_loss_bwd_graph_pass as _checkpoints,
    )

    compile_backward = graph_compile._aot_stage2b_bw_compile
    compile_forward = graph_compile._aot_stage2b_fw_compile
    compile_inference = graph_compile._aot_stage2b_inference_compile
    make_autograd_function = graph_compile._aot_stage2c_make_autograd_function
    partition_joint_graph = graph_compile._aot_stage2a_partition
    rematerialize_checkpoints = _checkpoints.remat_using_tags_for_fwd_loss_bwd_graph
    run_passes_on_nested_graphs = graph_compile.run_joint_graph_passes_on_hops
else:

    def _configured(stage: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`stage`, called as from 2.13 on: with its compiler last, after the configuration."""

        def call(*args: Any) -> Any:
            *rest, aot_config, compiler = args
            setattr(aot_config, name, compiler)
            return stage(*rest, aot_config)

        return call

    compile_backward = _configured(graph_compile._aot_stage2b_bw_compile, "bw_compiler")
    compile_forward = _configured(graph_compile._aot_stage2b_fw_compile, "fw_compiler")
    compile_inference = _configured(
        graph_compile._aot_stage2b_inference_compile, "inference_compiler"
    )
    partition_joint_graph = _configured(graph_compile._aot_stage2a_partition, "partition_fn")

    def make_autograd_function(*args: Any) -> Any:
        """The compiler of a lazy backward, the eighth argument, is in the configuration."""
        return graph_compile._aot_stage2c_make_autograd_function(*args[:7], *args[8:])

    def rematerialize_checkpoints(graph: Any) -> Any:
        return graph  # already done during capture

    def run_passes_on_nested_graphs(graph: Any, *args: Any, **kwargs: Any) -> Any:
        return graph  # inference graphs hold no nested pairs of forward and backward


def prepare_aot(
    gm: Any, inputs: Any, decompositions: dict[Any, Any], keep_input_mutations: bool
) -> Sequence[Any]:
    """AOTAutograd's preparation before capture; the last result is empty before 2.12.

    DDPOptimizer runs each bucket with fake tensors first. These run in eager, so that the first run
    of compiled code is a real one.
    """
    if context := TracingContext.try_get():
        context.fakify_first_call = False
    known = inspect.signature(prepare_aot_module_simplified).parameters
    older = (None,) if "boxed_forward_device_index" in known else ()
    found: Sequence[Any] = prepare_aot_module_simplified(
        gm, inputs, None, decompositions, keep_input_mutations, *older, False, flatten=False,
        force_non_lazy_backward_lowering=functorch_config.force_non_lazy_backward_lowering,
    )  # fmt: skip
    return found if not older else (*found, [])


def tensorify_python_scalars(graph: fx.GraphModule) -> None:
    """AOTAutograd's pass that computes with Python's floats as tensors, as far as it can.

    For the others Dynamo starts again and makes them constants, by raising
    TensorifyScalarRestartAnalysis. It does so for a tensor of one float64 as well, which has a
    symbol for its `item()`, and then loses a write to the tensor whose result nothing reads. Such
    tensors stay as they are, unless the graph reads their `item()` and does not write to them.
    """
    read = _symbols_read(graph)
    before = set(TensorifyState.force_specializations)
    try:
        graph_compile._apply_tensorify_python_scalars(graph)
    except TensorifyScalarRestartAnalysis:
        TensorifyState.force_specializations -= _symbols_of_tensors() - read - before
        if TensorifyState.force_specializations - before:
            raise


def _symbols_read(graph: fx.GraphModule) -> set[str]:
    """Names of the symbols for `item()` of inputs that the graph does not write to."""
    aten = torch.ops.aten
    copies = graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {node.args[0] for node in copies}
    items = graph.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    values = [node.meta["val"] for node in items if node.args[0] not in written]
    return {str(v.node._expr) for v in values if isinstance(v, torch.SymFloat)}


def _symbols_of_tensors() -> set[str]:
    """Names of the symbols for `item()` of tensors that are no Python floats."""
    mode = detect_fake_mode()
    sources = mode.shape_env.var_to_sources if mode is not None and mode.shape_env else {}
    return {
        str(symbol) for symbol, (source, *_) in sources.items()
        if isinstance(source, CallMethodItemSource)
        and not isinstance(source.base, FloatTensorSource)
    }  # fmt: skip


def count_capture() -> None:
    """Count a graph that AOTAutograd captures: DDPOptimizer keeps the metadata of a bucket for the
    compilation of its backward graph if this counter changed."""
    counters["aot_autograd"]["total"] += 1


def overwritten_inputs(metadata: Any) -> list[int]:
    """The positions, among a captured graph's placeholders, of inputs whose data it changes."""
    first = len(metadata.tokens)
    return [first + n for n, info in enumerate(metadata.input_info) if info.mutates_data]


def detaches_results(inputs: Sequence[Any], results: Sequence[Any]) -> bool:
    """Whether a graph traced for inference has real results, though inputs require gradients.

    After a failed forward-mode differentiation, PyTorch may trace a graph so that has gradients.
    """
    values = [node.meta.get("val") for node in results if isinstance(node, fx.Node)]
    real = any(isinstance(v, torch.Tensor) and v.dtype.is_floating_point for v in values)
    requires = any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    return real and requires and torch.is_grad_enabled()


def logs_graphs() -> bool:
    """Whether AOTAutograd's own log of its graphs is enabled."""
    names = ("aot_graphs", "aot_joint_graph")
    return bool(trace_log.handlers) or any(map(log_state.is_artifact_enabled, names))


def log_joint_graph(joint: fx.GraphModule, aot_config: Any) -> None:
    graph_compile._log_joint_graph(joint, aot_config)


def log_split_graphs(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    subclass_meta: Any,
    metadata: Any,
    aot_config: Any,
) -> None:
    graph_compile._log_fw_bw_graphs(forward, backward, subclass_meta, metadata, aot_config)


def log_inference_graph(graph: fx.GraphModule, aot_config: Any) -> None:
    graph_compile._log_inference_graph(graph, aot_config)
