"""Dynamo's graph through AOTAutograd: functional ATen graphs, compiled to one callable.

Dynamo FX graph -> stored result? -> load it
                   else capture -> partition -> compile_graph per graph -> store the result
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import fx

from dicp import torch_private
from dicp.dynamo_bridge.aot_graph import CompiledGraph, GraphCompiler, GraphInfo, Kind, unmarked
from dicp.dynamo_bridge.aot_results import ResultLookup, find_result, store_result
from dicp.dynamo_bridge.attention.flex import expose_flex_attention
from dicp.dynamo_bridge.executables import interpreted
from dicp.dynamo_bridge.frame_stack import in_own_chunk
from dicp.dynamo_bridge.gradient_layouts import GradientLayouts
from dicp.dynamo_bridge.number_checks import NumberChecks
from dicp.dynamo_bridge.passes.joint import (
    copy_overwritten_inputs,
    correct_log_sum_exps,
    save_compared_floats,
)
from dicp.dynamo_bridge.passes.redundancy import drop_copies, merge_equal_nodes
from dicp.dynamo_bridge.provenance import mark_dynamo_nodes
from dicp.dynamo_bridge.shared_memory import SharedMemory
from dicp.dynamo_bridge.storage_reads import StorageReads
from dicp.errors import FallbackWarning, InputLayoutError

aten = torch.ops.aten


def compile_graphs(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compiler: GraphCompiler
) -> Callable[..., Any]:
    """Compiles Dynamo's graph and returns what Dynamo calls in its place."""
    compiled: Callable[..., Any]
    if any(isinstance(value, (list, tuple, dict)) for value in example_inputs):
        compiled = torch_private.flatten_graph_inputs(
            gm, example_inputs, lambda flat_gm, inputs: _compile(compiler, flat_gm, inputs)
        )
    else:
        compiled = _compile(compiler, gm, example_inputs)
    return torch.compiler.disable(compiled, reason="compiled code is not traced")  # type: ignore


# Every graph compiled by dicp runs AOTAutograd under these settings.
# - cse: replaced by merge_equal_nodes, which does the same without importing a code generator.
# - donated_buffer: a backward graph compiled to overwrite its inputs cannot run a second time, as
#   backward(retain_graph=True) allows.
_SETTINGS: Final = {"cse": False, "donated_buffer": False}


def _compile(compiler: GraphCompiler, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    with torch_private.functorch_config.patch(_SETTINGS), _collection_paused():
        return in_own_chunk(_compile_in_stages, compiler, gm, example_inputs)


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Compiling allocates much and frees little: full collections take a quarter of its time.

    The objects made meanwhile join the oldest generation. In the youngest one, as usual, the next
    collection would visit them all and then find a full one due: a tenth of the time again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() == 0:  # unfreezing would undo the user's own freeze
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _compile_in_stages(
    compiler: GraphCompiler, gm: Any, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    with contextlib.ExitStack() as stack:
        prepared = torch_private.prepare_aot(
            gm, example_inputs, dict(compiler.decompositions), keep_input_mutations=True
        )
        function, parameters, _, _, fake_inputs, descriptions, aot_config, *rest = prepared
        fake_mode, shape_env, _, _, active_inputs = rest
        aot_config = dataclasses.replace(aot_config, enable_log=torch_private.logs_graphs())

        lookup = find_result(compiler, gm, fake_inputs, aot_config)
        run, writes = lookup.loaded, lookup.writes
        if run is None:
            compiler.before_capture()
            torch_private.count_capture()
            expose_flex_attention(torch_private.graph_module_of(gm))
            stack.enter_context(torch_private.disable_compiled_autograd())
            state = torch_private.create_aot_state(
                stack, function, fake_inputs, descriptions, aot_config, fake_mode, shape_env
            )
            state.fw_metadata.act_input_indices = active_inputs
            capture = torch_private.aot_stage1_graph_capture(state, function)
            compile_fn = _compile_autograd if state.needs_autograd else _compile_inference
            run = compile_fn(compiler, state, capture, lookup)
            writes = bool(torch_private.overwritten_inputs(state.fw_metadata))
        own = fake_inputs[len(parameters) :]
    return _with_parameters(gm, run, parameters, _checks(gm, own, writes))


Check = Callable[[Sequence[Any]], bool]
"""Whether a call with these inputs has to run in eager."""


def _checks(gm: Any, traced: Sequence[Any], writes: bool) -> list[Check]:
    """The checks of each call of a graph with inputs `traced`; `writes`: to some of these."""
    module = torch_private.graph_module_of(gm)
    numbers, gradients = NumberChecks(module.graph, traced), GradientLayouts(module.graph, traced)
    storages = StorageReads(module, traced, writes)
    checks: list[Check] = [SharedMemory(traced).differs] if writes else []
    checks += [storages.reach_beyond] if storages else []
    checks += [gradients.differ] if gradients else []
    return checks + ([numbers.fail] if numbers else [])


def _with_parameters(
    gm: Any, run: Any, parameters: list[Any], checks: Sequence[Check]
) -> Callable[..., Any]:
    """`run` with Dynamo's signature: without the module's own parameters, inputs not boxed.

    Inputs with tangents (forward-mode differentiation) run `gm` in eager: compiled code has none.
    So do fake tensors, those of a library's own layout, which kernels cannot read, and those that
    share memory otherwise than the traced ones did, if the graph writes to its inputs, or lie in
    larger storages, if the graph addresses these. And so do integers from which compiled code
    cannot compute what Python does, and gradients that an optimizer reads if they lie in memory
    otherwise than the traced ones.
    """

    def need_eager(inputs: Sequence[Any]) -> bool:
        if torch_private.need_eager(inputs, parameters):
            return True
        return bool(checks) and any(check(inputs) for check in checks)

    def call(inputs: Sequence[Any]) -> Any:
        if need_eager(inputs):
            return gm(*inputs)
        everything = [*parameters, *inputs]
        if isinstance(inputs, list) and _all_strided(everything):  # eager will not need them
            inputs.clear()
        try:
            return run(everything)
        except InputLayoutError as error:
            warnings.warn(FallbackWarning(f"a graph runs eagerly: {error}"), stacklevel=3)
            return gm(*inputs)

    def forward(*inputs: Any) -> Any:
        return call(inputs)

    return call if isinstance(gm, torch_private.GmWrapper) else forward


def _all_strided(inputs: Sequence[Any]) -> bool:
    return all(x.layout == torch.strided for x in inputs if isinstance(x, torch.Tensor))


def _compile_inference(
    compiler: GraphCompiler, state: Any, capture: Any, lookup: ResultLookup
) -> Any:
    graph, metadata, subclass = capture.graph_module, state.fw_metadata, capture.maybe_subclass_meta
    torch_private.log_inference_graph(graph, state.aot_config)
    torch_private.tensorify_python_scalars(graph)
    graph = torch_private.run_passes_on_nested_graphs(
        graph, None, state.aot_config, default_partition_fn=partial(_partition, compiler)
    )
    graph = torch_private.rematerialize_checkpoints(graph)
    mark_dynamo_nodes(graph.graph)
    detached = torch_private.detaches_results(state.flat_args, graph.graph.output_node().args[0])
    made: list[CompiledGraph] = []

    def compile_one(graph: fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        static = torch_private.inner_metadata(subclass, metadata).static_input_indices
        info = GraphInfo("inference", tuple(static or ()))
        made.append(compiler.compile_graph(graph, list(inputs), info))
        return made[0]

    compiled = torch_private.compile_inference(
        graph, capture.updated_flat_args, subclass, metadata, state.aot_config, compile_one
    )
    torch_private.make_runtime_safe(metadata, subclass)
    store_result(
        compiler,
        lookup,
        metadata,
        made,
        "no result requires a gradient, though an input does" if detached else "",
        compiled_fw=torch_private.BundledCompiledForward(made[0]),
        compiled_bw=None,
        dispatch_wrappers=capture.wrappers,
        maybe_subclass_meta=subclass,
        num_fw_outs_saved_for_bw=None,
        indices_of_inps_to_detach=[],
        aot_config=state.aot_config,
        serialized_bw_module=None,
    )
    compiled_run, _ = torch_private.make_inference_function(
        state.aot_config, metadata, compiled, capture.wrappers, None
    )
    return compiled_run


def _partition(
    compiler: GraphCompiler,
    joint: fx.GraphModule,
    inputs: Any,
    overwritten: Sequence[int] = (),
    **known: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Rewrites a joint graph, of whose inputs some are overwritten, and splits it in two."""
    mark_dynamo_nodes(joint.graph)
    drop_copies(joint.graph)
    merge_equal_nodes(joint.graph)
    correct_log_sum_exps(joint.graph)
    copy_overwritten_inputs(joint.graph, overwritten)
    save_compared_floats(joint.graph)
    compiler.joint_passes(joint)
    settings = {"ban_recompute_materialized_backward": not compiler.recomputes_operands}
    with torch_private.functorch_config.patch(settings):
        return torch_private.min_cut_rematerialization_partition(joint, inputs, **known)


def _split(compiler: GraphCompiler, state: Any, capture: Any) -> tuple[Any, ...]:
    """AOTAutograd's split of a joint graph: forward, backward, and what connects them."""
    joint, metadata, aot_config = capture.graph_module, state.fw_metadata, state.aot_config
    subclass = capture.maybe_subclass_meta
    overwritten = torch_private.overwritten_inputs(torch_private.inner_metadata(subclass, metadata))
    torch_private.log_joint_graph(joint, aot_config)
    torch_private.tensorify_python_scalars(joint)
    forward, backward, *rest = torch_private.partition_joint_graph(
        joint,
        capture.updated_flat_args,
        subclass,
        metadata,
        aot_config,
        partial(_partition, compiler, overwritten=overwritten),
    )
    torch_private.log_split_graphs(forward, backward, subclass, metadata, aot_config)
    return forward, backward, *rest


@dataclasses.dataclass(eq=False)
class _Training:
    """Compiles both graphs of a training step and stores the result; keeps neither graph."""

    compiler: GraphCompiler
    lookup: ResultLookup
    capture: Any
    forward_info: GraphInfo
    backward_info: GraphInfo
    saved_count: int
    saved_symints: Any
    detached: list[int]
    made: dict[Kind, CompiledGraph] = dataclasses.field(default_factory=dict)

    def compile_forward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        self.made["forward"] = self.compiler.compile_graph(graph, list(inputs), self.forward_info)
        return self.made["forward"]

    def compile_backward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def compiled() -> Any:
            with _collection_paused(), torch_private.without_autocast():
                made = in_own_chunk(
                    self.compiler.compile_graph, graph, list(inputs), self.backward_info
                )
            self.made["backward"] = made
            return _untraced(made)

        return self.compiler.attempt(compiled, lambda: CompiledGraph(None, interpreted(graph)))

    def store_later(self, *known: Any) -> None:
        """As `store`, in the first run of backward."""
        self.compiler.attempt(lambda: self.store(*known), lambda: None)

    def store(
        self, compiled: Any, backward: fx.GraphModule, metadata: Any, aot_config: Any
    ) -> None:
        """Stores both halves once backward is compiled, which may be in its first run."""
        made = self.made
        store_result(
            self.compiler,
            self.lookup,
            metadata,
            list(made.values()),
            compiled_fw=torch_private.BundledCompiledForward(made["forward"]),
            compiled_bw=torch_private.BundledCompiledBackward(
                made["backward"], [], self.saved_symints
            ),
            dispatch_wrappers=self.capture.wrappers,
            maybe_subclass_meta=self.capture.maybe_subclass_meta,
            num_fw_outs_saved_for_bw=self.saved_count,
            indices_of_inps_to_detach=self.detached,
            aot_config=aot_config,
            serialized_bw_module=torch_private.serialize_graph_module(backward),
        )


def _compile_autograd(
    compiler: GraphCompiler, state: Any, capture: Any, lookup: ResultLookup
) -> Any:
    metadata, aot_config = state.fw_metadata, state.aot_config
    subclass = capture.maybe_subclass_meta
    forward, backward, saved_count, symints, detached, inputs = _split(compiler, state, capture)
    inner = torch_private.inner_metadata(subclass, metadata)
    metadata.bw_donated_idxs = inner.bw_donated_idxs = []  # None would forbid retain_graph as well
    static = tuple(inner.static_input_indices or ())
    _mark_tangents(backward)
    training = _Training(
        compiler,
        lookup,
        capture,
        GraphInfo("forward", static),
        GraphInfo("backward", _same_names(forward, static, backward), _tangents(backward)),
        saved_count,
        symints,
        detached,
    )
    compile_backward = _untraced(training.compile_backward)
    strides, compiled_forward = torch_private.compile_forward(
        forward, inputs, subclass, metadata, saved_count, aot_config, training.compile_forward
    )
    lazy, compiled_backward = torch_private.compile_backward(
        backward, subclass, metadata, strides, symints, aot_config, compile_backward
    )
    torch_private.make_runtime_safe(metadata, subclass)
    later = None
    if lookup.key and compiled_backward is not None:
        training.store(compiled_backward, backward, metadata, aot_config)
    elif lookup.key:
        later = training.store_later
    run, _ = torch_private.make_autograd_function(
        aot_config,
        state.flat_args,
        metadata,
        subclass,
        capture.wrappers,
        compiled_forward,
        compiled_backward,
        compile_backward,
        lazy,
        later,
        None,
        detached,
        symints,
    )
    return run


def _untraced(function: Any) -> Any:
    """Dynamo may be tracing when backward runs: it must not trace compiler or compiled code."""
    return torch.compiler.disable(function, reason="compiled code is not traced")


def _same_names(
    forward: fx.GraphModule, positions: tuple[int, ...], backward: fx.GraphModule
) -> tuple[int, ...]:
    """Positions in `backward` of the placeholders that `forward` has at `positions`."""
    theirs = forward.graph.find_nodes(op="placeholder")
    names = {theirs[position].name for position in positions}
    ours = backward.graph.find_nodes(op="placeholder")
    return tuple(position for position, node in enumerate(ours) if node.name in names)


def _tangents(backward: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the input tensors that are gradients of forward's results; the tokens that order
    side effects, which are None in a call, are named like them."""
    inputs = enumerate(backward.graph.find_nodes(op="placeholder"))
    return tuple(
        position for position, node in inputs
        if node.name.startswith("tangents") and not node.name.startswith("tangents_token")
        and isinstance(node.meta.get("val"), torch.Tensor)
    )  # fmt: skip


def _mark_tangents(backward: fx.GraphModule) -> None:
    """Mark gradients as the conjugates or negatives that they were traced as.

    A gradient is traced with the bits of its result. In a call it has any, which `CompiledGraph`
    resolves.
    """
    inputs = backward.graph.find_nodes(op="placeholder")
    for node in (inputs[position] for position in _tangents(backward)):
        val = node.meta["val"]
        node.meta["val"] = unmarked(val)
        bits = (val.is_neg(), val.is_conj())
        for ops in (
            (aten._neg_view.default, aten._conj.default),
            (aten.neg.default, aten.conj_physical.default),
        ):
            for op, is_set in zip(ops, bits, strict=True):
                if is_set:
                    _insert_after(node, op, inputs[-1])


def _insert_after(node: fx.Node, op: Any, place: fx.Node) -> None:
    """Insert a call of `op` between `node` and its users, at `place`."""
    with node.graph.inserting_after(place):
        call = node.graph.call_function(op, (node,))
    call.meta["val"] = op(node.meta["val"])
    node.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)
