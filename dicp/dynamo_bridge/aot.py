"""Dynamo's graph through AOTAutograd: functional ATen graphs, compiled to one callable.

    Dynamo FX graph -> stored result? -> load it
                       else capture -> partition -> compile_graph per graph -> store the result

dicp's own cache keeps AOTAutograd's result (which graphs run, and the wrappers of their inputs and
outputs), signed with the user's secret, under a key that includes the backend's identity. A process
that finds it traces and compiles nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import fx

from dicp import torch_private
from dicp.cache import Cache, Entry, key_of
from dicp.dynamo_bridge.passes.joint import drop_copies, keep_compared, merge_equal_nodes
from dicp.dynamo_bridge.provenance import mark_dynamo_nodes
from dicp.errors import CacheWarning

Kind = Literal["forward", "backward", "inference"]
Executable = Callable[[list[Any]], Sequence[Any]]

_CACHE_KIND: Final = "aot"
_FORMAT: Final = 1
_VARIANTS: Final = 8  # results kept per graph, told apart by their guards on sizes


@dataclasses.dataclass(frozen=True)
class GraphInfo:
    """What AOTAutograd knows about a graph beyond its nodes.

    static_inputs: positions of placeholders that are parameters or buffers: the same storage at
        every call, so that values which depend on them alone can be kept between calls.
    user_outputs: how many leading outputs the caller gets (mutated inputs included); the outputs
        that follow in a forward graph are saved for its backward graph.
    """

    kind: Kind
    static_inputs: tuple[int, ...] = ()
    user_outputs: int = 0


class OtherLinesError(Exception):
    """Stored code contains user lines, and the current graph comes from other lines."""


class CompiledGraph(torch_private.OutputCode):
    """A compiled graph: `executable` runs it, `artifact_json` is its serialized form.

    Called with a list of inputs that it may clear (boxed calling), returns a sequence of outputs.
    A graph that cannot be serialized has `artifact_json` None: it works and is never stored.
    `tangents` are the positions of gradients that autograd passes in: their negative and conjugate
    bits are known only at the call.
    """

    def __init__(
        self,
        artifact_json: str | None,
        executable: Executable | None,
        tangents: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.artifact_json = artifact_json
        self.executable = executable
        self.tangents = tangents
        self._boxed_call = True  # on the instance: wrappers copy an object's own attributes only

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self.executable is not None, "a stored graph runs after post_compile"
        for position in self.tangents:
            tangent = inputs[position]
            if tangent.is_neg() or tangent.is_conj():
                inputs = inputs if isinstance(inputs, list) else list(inputs)
                inputs[position] = tangent.resolve_conj().resolve_neg()
        return self.executable(inputs)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledGraph, (self.artifact_json, None, self.tangents)

    def prepare_for_serialization(self) -> None:
        self.executable = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Loads the executable of a graph from the cache."""
        self.executable = graph_kwargs["load_graph"](self.artifact_json).executable


CompileGraph = Callable[[fx.GraphModule, list[Any], GraphInfo], CompiledGraph]
LoadGraph = Callable[[str], CompiledGraph]
JointPasses = Callable[[fx.GraphModule, Any], object]

CacheState = Literal["off", "hit", "miss", "stored", "bypass", "damaged"]
OnCache = Callable[[CacheState, str], object]


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    """The arguments of one call of `compile_graphs`."""

    decompositions: dict[Any, Callable[..., Any]]
    compile_graph: CompileGraph
    load_graph: LoadGraph
    identity: str
    cache: Cache | None
    joint_passes: JointPasses | None
    recompute_operands: bool
    on_cache: OnCache
    before_capture: Callable[[], object]
    keep_inference_input_mutations: bool

    def partition(self, joint: fx.GraphModule, inputs: Any, **known: Any) -> Any:
        mark_dynamo_nodes(joint.graph)
        drop_copies(joint.graph)
        merge_equal_nodes(joint.graph)
        keep_compared(joint.graph)
        if self.joint_passes is not None:
            self.joint_passes(joint, inputs)
        settings = {"ban_recompute_materialized_backward": not self.recompute_operands}
        with torch_private.functorch_config.patch(settings):
            return torch_private.min_cut_rematerialization_partition(joint, inputs, **known)


def compile_graphs(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    decompositions: Mapping[Any, Callable[..., Any]],
    compile_graph: CompileGraph,
    load_graph: LoadGraph,
    identity: str,
    cache: Cache | None,
    joint_passes: JointPasses | None = None,
    recompute_operands: bool = False,
    on_cache: OnCache | None = None,
    before_capture: Callable[[], object] = lambda: None,
    keep_inference_input_mutations: bool = True,
) -> Callable[..., Any]:
    """Compiles Dynamo's graph and returns what Dynamo calls in its place.

    compile_graph: compiles each functional graph; the backward graph at the first backward run, or
        at once where its sizes are symbolic.
    load_graph: loads a compiled graph from its stored `artifact_json`; may raise OtherLinesError.
    identity: names everything else the result depends on: backend, target, versions, options, and
        the decompositions and passes in use.
    cache: where results are stored; None compiles without a cache.
    joint_passes: rewrites the joint graph in place before it is split into forward and backward.
    recompute_operands: whether the backward graph rematerializes an operand of a library call that
        elementwise operators compute from other saved tensors.
    on_cache: called with what the cache did, and why.
    before_capture: called before the graph is traced, where no stored result is found.
    """
    job = _Job(
        decompositions=dict(decompositions),
        compile_graph=compile_graph,
        load_graph=load_graph,
        identity=identity,
        cache=cache,
        joint_passes=joint_passes,
        recompute_operands=recompute_operands,
        on_cache=on_cache or (lambda state, reason: None),
        before_capture=before_capture,
        keep_inference_input_mutations=keep_inference_input_mutations,
    )
    compiled: Callable[..., Any]
    if any(isinstance(value, (list, tuple, dict)) for value in example_inputs):
        compiled = torch_private.flatten_graph_inputs(
            gm, example_inputs, lambda flat_gm, inputs: _compile(job, flat_gm, inputs)
        )
    else:
        compiled = _compile(job, gm, example_inputs)
    return torch.compiler.disable(compiled, reason="compiled code is not traced")  # type: ignore


# Every graph compiled by dicp runs AOTAutograd under these settings.
# - cse: replaced by merge_equal_nodes, which does the same without importing a code generator.
# - donated_buffer: a backward graph compiled to overwrite its inputs cannot run a second time, as
#   backward(retain_graph=True) allows.
_SETTINGS: Final = {"cse": False, "donated_buffer": False}


def _compile(job: _Job, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    with torch_private.functorch_config.patch(_SETTINGS), _collection_paused():
        return _compile_in_stages(job, gm, example_inputs)


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Compiling allocates much and frees little: full collections take a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _compile_in_stages(job: _Job, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    with contextlib.ExitStack() as stack:
        prepared = torch_private.prepare_aot(
            gm, example_inputs, job.decompositions, job.keep_inference_input_mutations
        )
        function, parameters, _, _, fake_inputs, descriptions, aot_config, *rest = prepared
        fake_mode, shape_env, _, _, active_inputs = rest
        aot_config = dataclasses.replace(aot_config, enable_log=torch_private.logs_graphs())

        slot = _find_slot(job, gm, fake_inputs, aot_config)
        run = slot.loaded
        if run is None:
            job.before_capture()
            stack.enter_context(torch_private.disable_compiled_autograd())
            state = torch_private.create_aot_state(
                stack, function, fake_inputs, descriptions, aot_config, fake_mode, shape_env
            )
            state.fw_metadata.act_input_indices = active_inputs
            capture = torch_private.aot_stage1_graph_capture(state, function)
            compile_fn = _compile_autograd if state.needs_autograd else _compile_inference
            run = compile_fn(job, state, capture, slot)
    return _with_parameters(gm, run, parameters)


def _with_parameters(gm: Any, run: Any, parameters: list[Any]) -> Callable[..., Any]:
    """`run` with Dynamo's signature: without the module's own parameters, inputs not boxed."""
    if isinstance(gm, torch_private.GmWrapper):

        def forward_boxed(inputs: list[Any]) -> Any:
            everything = [*parameters, *inputs]
            inputs.clear()
            return run(everything)

        return forward_boxed

    def forward(*inputs: Any) -> Any:
        return run([*parameters, *inputs])

    return forward


def _compile_inference(job: _Job, state: Any, capture: Any, slot: _Slot) -> Any:
    graph, metadata, subclass = capture.graph_module, state.fw_metadata, capture.maybe_subclass_meta
    torch_private.log_inference_graph(graph, state.aot_config)
    torch_private.tensorify_python_scalars(graph)
    graph = torch_private.run_passes_on_nested_graphs(
        graph, None, state.aot_config, default_partition_fn=job.partition
    )
    graph = torch_private.rematerialize_checkpoints(graph)
    mark_dynamo_nodes(graph.graph)
    made: list[CompiledGraph] = []

    def compile_one(graph: fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        static = torch_private.inner_metadata(subclass, metadata).static_input_indices
        info = GraphInfo("inference", tuple(static or ()), len(_outputs(graph)))
        made.append(job.compile_graph(graph, list(inputs), info))
        return made[0]

    compiled = torch_private.compile_inference(
        graph, capture.updated_flat_args, subclass, metadata, state.aot_config, compile_one
    )
    torch_private.make_runtime_safe(metadata, subclass)
    _store(
        job,
        slot,
        metadata,
        made,
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


def _split(job: _Job, state: Any, capture: Any) -> tuple[Any, ...]:
    """AOTAutograd's split of a joint graph: forward, backward, and what connects them."""
    joint, metadata, aot_config = capture.graph_module, state.fw_metadata, state.aot_config
    subclass = capture.maybe_subclass_meta
    torch_private.log_joint_graph(joint, aot_config)
    torch_private.tensorify_python_scalars(joint)
    forward, backward, *rest = torch_private.partition_joint_graph(
        joint, capture.updated_flat_args, subclass, metadata, aot_config, job.partition
    )
    torch_private.log_split_graphs(forward, backward, subclass, metadata, aot_config)
    return forward, backward, *rest


@dataclasses.dataclass(eq=False)
class _Training:
    """Compiles both graphs of a training step and stores the result; keeps neither graph."""

    job: _Job
    slot: _Slot
    capture: Any
    forward_info: GraphInfo
    backward_info: GraphInfo
    saved_count: int
    saved_symints: Any
    detached: list[int]
    made: dict[Kind, CompiledGraph] = dataclasses.field(default_factory=dict)

    def compile_forward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        self.made["forward"] = self.job.compile_graph(graph, list(inputs), self.forward_info)
        return self.made["forward"]

    def compile_backward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with _collection_paused():
            compiled = self.job.compile_graph(graph, list(inputs), self.backward_info)
        compiled.tangents = _tangents(graph)
        self.made["backward"] = compiled
        return _untraced(compiled)

    def store(
        self, compiled: Any, backward: fx.GraphModule, metadata: Any, aot_config: Any
    ) -> None:
        """Stores both halves once backward is compiled, which may be in its first run."""
        made = self.made
        _store(
            self.job,
            self.slot,
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


def _compile_autograd(job: _Job, state: Any, capture: Any, slot: _Slot) -> Any:
    metadata, aot_config = state.fw_metadata, state.aot_config
    subclass = capture.maybe_subclass_meta
    forward, backward, saved_count, symints, detached, inputs = _split(job, state, capture)
    inner = torch_private.inner_metadata(subclass, metadata)
    metadata.bw_donated_idxs = inner.bw_donated_idxs = []  # None would forbid retain_graph as well
    static = tuple(inner.static_input_indices or ())
    training = _Training(
        job,
        slot,
        capture,
        GraphInfo("forward", static, len(_outputs(forward)) - saved_count),
        GraphInfo("backward", _same_names(forward, static, backward), len(_outputs(backward))),
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
    if slot.key and compiled_backward is not None:
        training.store(compiled_backward, backward, metadata, aot_config)
    elif slot.key:
        later = training.store
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


def _outputs(graph: fx.GraphModule) -> Sequence[Any]:
    return graph.graph.output_node().args[0]  # type: ignore[return-value]


def _tangents(backward: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the input tensors that are gradients of forward's results."""
    inputs = enumerate(backward.graph.find_nodes(op="placeholder"))
    return tuple(
        position for position, node in inputs
        if node.name.startswith("tangents") and isinstance(node.meta.get("val"), torch.Tensor)
    )  # fmt: skip


def _same_names(
    forward: fx.GraphModule, positions: tuple[int, ...], backward: fx.GraphModule
) -> tuple[int, ...]:
    """Positions in `backward` of the placeholders that `forward` has at `positions`."""
    theirs = forward.graph.find_nodes(op="placeholder")
    names = {theirs[position].name for position in positions}
    ours = backward.graph.find_nodes(op="placeholder")
    return tuple(position for position, node in enumerate(ours) if node.name in names)


# ---- results stored and loaded -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Slot:
    """Where this compilation's result is stored (no key: nowhere), or the result found there."""

    key: str = ""
    symints: tuple[torch.SymInt, ...] = ()
    loaded: Any = None


def _find_slot(job: _Job, gm: Any, fake_inputs: list[Any], aot_config: Any) -> _Slot:
    """Looks the graph up among the stored results; a damaged entry raises nothing."""
    if job.cache is None:
        job.on_cache("off", "no cache")
        return _Slot()
    try:
        symints = tuple(_all_symints(fake_inputs))
        ranges = torch_private.ranges_of(symints)
        base = key_of(
            _FORMAT, torch_private.autograd_key(gm, fake_inputs, aot_config), ranges, job.identity
        )
    except torch_private.NotCacheableError as error:
        job.on_cache("bypass", str(error))
        return _Slot()
    for variant in range(_VARIANTS):
        slot = _Slot(key_of(base, variant), symints)
        entry = job.cache.get(_CACHE_KIND, slot.key)
        if entry is None:
            break
        try:
            guards = entry.read("guards").decode()
            if guards and not torch_private.guards_hold(guards, list(symints)):
                continue
            loaded = _load(job, entry, fake_inputs, aot_config)
        except OtherLinesError:
            continue
        except Exception as error:  # a damaged entry is compiled again
            job.on_cache("damaged", f"{type(error).__name__}: {error}")
            warnings.warn(
                f"a stored compilation result could not be loaded and is rebuilt ({error})",
                CacheWarning,
                stacklevel=2,
            )
            return slot
        job.on_cache("hit", "")
        return dataclasses.replace(slot, loaded=loaded)
    job.on_cache("miss", "")
    return slot


def _all_symints(fake_inputs: list[Any]) -> list[torch.SymInt]:
    """The symbolic sizes among the inputs; guards on any other symbol could not be stored."""
    symints = torch_private.backed_symints(fake_inputs)
    plain = [symint for symint in symints if torch_private.is_plain_symbol(symint)]
    known = {symbol for symint in plain for symbol in torch_private.free_symbols(symint)}
    for value in fake_inputs:
        if isinstance(value, (torch.Tensor, torch.SymInt)):
            unknown = torch_private.free_symbols(value) - known
            if unknown:
                raise torch_private.NotCacheableError(f"sizes {unknown} are not inputs themselves")
    return symints


def _load(job: _Job, entry: Entry, fake_inputs: list[Any], aot_config: Any) -> Any:
    # The cache has verified the entry against the user's secret: no other user wrote this pickle.
    result = pickle.loads(entry.read("result"))
    settings = {
        "cudagraphs": torch_private.BoxedBool(False),
        "boxed_forward_device_index": None,
        "compile_region_name": None,
        "load_graph": job.load_graph,
    }
    return result.wrap_post_compile(fake_inputs, aot_config, settings)


def _store(job: _Job, slot: _Slot, metadata: Any, made: list[CompiledGraph], **parts: Any) -> None:
    """Stores AOTAutograd's result, or reports why not; a failure loses only the cache entry."""
    if job.cache is None or not slot.key:
        return
    reason = ""
    if metadata.tokens:
        reason = "operators with side effects are ordered by tokens, which are not restored"
    elif any(graph.artifact_json is None for graph in made):
        reason = "a compiled graph has no stored form"
    if reason:
        job.on_cache("bypass", reason)
        return
    try:
        guards = torch_private.guards_on(list(slot.symints))
        result = torch_private.storable_result(
            runtime_metadata=metadata, guards_expr=guards or None, **parts
        )
        with torch_private.disable_current_modes():
            content = pickle.dumps(result)
    except Exception as error:  # pickling runs arbitrary __reduce__ methods
        job.on_cache("bypass", f"no stored form: {error}")
        return
    job.cache.put(_CACHE_KIND, slot.key, {"result": content, "guards": guards.encode()})
    job.on_cache("stored", "")
