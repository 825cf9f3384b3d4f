"""The only module that touches PyTorch's private names.

Everything here is re-exported under a public name. The release is checked once, at import, against
the window these names were verified with; outside it the import fails and says so.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import sympy
import torch
from torch import fx, overrides

OLDEST: Final = (2, 11)
NEWEST: Final = (2, 13)


def release_of(version: str) -> tuple[int, int]:
    """The (major, minor) of a version such as ``2.13.0+cpu`` or ``2.13.0a0+git123``."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def check_release(version: str) -> None:
    """Raises ImportError when this PyTorch release was not verified with dicp."""
    if OLDEST <= release_of(version) <= NEWEST:
        return
    window = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    raise ImportError(
        f"dicp needs PyTorch {window} and found {version}. "
        f'Install one of them, for example: pip install "torch=={NEWEST[0]}.{NEWEST[1]}.*"'
    )


check_release(torch.__version__)

# ruff: noqa: E402
from torch._C._dynamo import guards as native_guards
from torch._decomp import decompositions
from torch._dynamo import compiled_autograd
from torch._dynamo import config as dynamo_config
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends import registry as backend_registry
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import GmWrapper, flatten_graph_inputs, get_metrics_context
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache, graph_compile
from torch._functorch._aot_autograd.aot_autograd_result import (
    BundledAOTAutogradResult,
    BundledCompiledBackward,
    BundledCompiledForward,
    serialize_graph_module,
)
from torch._functorch._aot_autograd.runtime_wrappers import make_runtime_safe
from torch._functorch.aot_autograd import (
    aot_stage1_graph_capture,
    create_aot_state,
    prepare_aot_module_simplified,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.codecache import FxGraphCache, FxGraphHashDetails
from torch._inductor.output_code import OutputCode
from torch._inductor.utils import BoxedBool
from torch._logging._internal import log_state, trace_log
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    SYMPY_INTERP,
    ShapeEnv,
    free_symbols,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._sympy.functions import FloorDiv, Mod
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.checkpoint import CheckpointPolicy

disable_compiled_autograd = compiled_autograd._disable


from torch._decomp import decomposition_table as all_decompositions

DECOMPOSED_BY_WRITING: Final[frozenset[OpOverload]] = (
    frozenset({torch.ops.aten.index_fill.int_Scalar, torch.ops.aten.index_fill.int_Tensor})
    if release_of(torch.__version__) < (2, 13)
    else frozenset()
)
"""Operators whose decomposition in this release copies into a fresh tensor: AOTAutograd does not
recognize that as functional and rejects it."""


empty_strided_cpu = native_guards._empty_strided_cpu  # type: ignore[attr-defined]
"""`torch.empty_strided(size, stride, dtype)` on the CPU, bypassing the dispatcher."""
reinterpret_tensor = native_guards._reinterpret_tensor  # type: ignore[attr-defined]
"""`tensor.as_strided(size, stride, tensor.storage_offset() + offset)`, bypassing the dispatcher."""


HOST: Final = "cpu"
"""PyTorch's device type of host memory."""


def frame_seconds() -> float:
    """Seconds since Dynamo began to compile the current frame; 0 outside of a compilation."""
    context = get_metrics_context()
    if not context.in_progress():
        return 0.0
    return (time.time_ns() - context._start_time_ns) / 1e9


def linear_factor(size: Any) -> tuple[int, str] | None:
    """(c, symbol) for a size c * symbol, (c, "") for the number c; None for any other."""
    if not isinstance(size, torch.SymInt):
        return (int(size), "") if isinstance(size, int) else None
    factor, rest = size.node.expr.as_coeff_Mul()
    simple = factor.is_Integer and factor > 0 and (rest.is_Symbol or rest == 1)
    if not simple:
        return None
    return int(factor), "" if rest == 1 else str(rest)


def original_module(module: Any) -> Any:
    """The module that `torch.compile` was given, for the module that it returned."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def any_number_of_compilations() -> Any:
    """A context in which Dynamo compiles one function for as many modules as call it."""
    most = 1 << 20
    return dynamo_config.patch(recompile_limit=most, accumulated_recompile_limit=most)


def compiled_call(module: Any) -> Any:
    """What `module.compile()` made of the module's call; None for a module that runs as it is."""
    return module._compiled_call_impl


def set_compiled_call(module: Any, call: Any) -> None:
    """Let the module's calls run `call`; one that is a module does not become a part of it."""
    module.__dict__["_compiled_call_impl"] = call


class _BackendTable(dict[str, Any]):
    """PyTorch's compiler functions by name; those of class `repeatable` may be registered again."""

    def __init__(self, known: dict[str, Any], repeatable: type) -> None:
        super().__init__(known)
        self.repeatable = repeatable

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) and not isinstance(self.get(str(name)), self.repeatable)

    def __getitem__(self, name: str) -> Any:
        """The compiler function; `torch.compile` looks it up before anything is traced."""
        found = super().__getitem__(name)
        if isinstance(found, self.repeatable) and hasattr(found, "before_tracing"):
            found.before_tracing(_options_of_compile(sys._getframe(1)))
        return found


def _options_of_compile(frame: Any) -> dict[str, Any]:
    """`options` of the call of torch.compile that looks a backend up.

    PyTorch passes them to a backend with the first graph, when Dynamo has traced already.
    """
    for _ in range(3):
        if frame is None:
            break
        if isinstance(frame.f_locals.get("self"), torch._TorchCompileWrapper):
            return dict(frame.f_locals.get("options") or {})
        frame = frame.f_back
    return {}


def trace_recurrent_modules() -> None:
    """Have Dynamo trace nn.RNN, nn.GRU and nn.LSTM, from now on in the whole process."""
    dynamo_config.allow_rnn = True
    decompositions.select_one_layer_lstm_function = _layer_of_lstm


_select_layer = decompositions.select_one_layer_lstm_function


def _layer_of_lstm(input: Any, hx: Any, params: Any) -> Any:
    """The decomposition of one layer: step by step where weights need gradients.

    PyTorch's own choice looks at the input alone, and its operator for inference cannot be part of
    a training graph.
    """
    weights = pytree.tree_leaves(params)
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        return decompositions.one_layer_lstm
    return _select_layer(input, hx, params)


@dataclass(frozen=True)
class GraphBreak:
    """Code that Dynamo left to Python: its reason, and the place in the user's program."""

    reason: str
    place: str
    skipped: bool = False
    """Whether Dynamo gave the whole function up."""

    @property
    def is_recurrent(self) -> bool:
        """Whether the reason is a module that `trace_recurrent_modules` has traced."""
        return self.reason.startswith(_RECURRENT)


_RECURRENT: Final = "Attempted to wrap RNN, GRU, or LSTM"
_CONTEXT: Final = "Developer debug context:"


class GraphBreaks:
    """The graph breaks and skipped functions of the process since this object was made."""

    def __init__(self) -> None:
        self._count = len(dynamo_utils.graph_break_reasons)
        self._known = {id(metrics) for metrics in self._metrics()}

    @staticmethod
    def _metrics() -> list[Any]:
        return list(dynamo_utils.get_compilation_metrics())

    def found(self) -> list[GraphBreak]:
        reasons = dynamo_utils.graph_break_reasons
        start = self._count if self._count <= len(reasons) else 0  # torch._dynamo.reset() clears
        breaks = [_broken(r.reason, r.user_stack) for r in reasons[start:]]
        known = {(found.reason.partition("\n")[0], found.place) for found in breaks}
        for metrics in self._metrics():
            reason = (metrics.fail_reason or "").strip()
            if id(metrics) in self._known or not reason:
                continue
            file = metrics.fail_user_frame_filename or metrics.co_filename
            place = f"{file}:{metrics.fail_user_frame_lineno or metrics.co_firstlineno}"
            if (reason.partition("\n")[0], place) not in known and not file.startswith(_TORCH):
                breaks.append(GraphBreak(reason, place, skipped=True))
        return list(dict.fromkeys(breaks))


def _broken(reason: str, stack: Sequence[Any]) -> GraphBreak:
    """A break with the innermost line outside of PyTorch, or with the object that caused it."""
    own = [f"{f.filename}:{f.lineno}" for f in stack if not f.filename.startswith(_TORCH)]
    context = reason.partition(_CONTEXT)[2].strip().partition("\n")[0]
    return GraphBreak(reason, own[-1] if own else context)


_TORCH: Final = f"{Path(torch.__file__).parent}"


def register_repeatedly(kind: type) -> None:
    """Let backends of class `kind` be registered more than once.

    Threads that look one up at the same time, before it is registered, all load it from its entry
    point and register it, and PyTorch refuses all but the first: "duplicate name".
    """
    known = backend_registry._COMPILER_FNS
    backend_registry._COMPILER_FNS = _BackendTable(known, kind)


def recompute_in_backward(node: fx.Node) -> None:
    """Ask the partitioner to compute `node` again in backward and not to save it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def do_not_recompute(node: fx.Node) -> None:
    """Have the partitioner save `node`, or results of it, unless the program marked it."""
    node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def saved_for_backward(node: fx.Node) -> None:
    """Let the partitioner decide whether `node` is recomputed, whatever the program asked."""
    node.meta.pop("recompute", None)


def profiling() -> bool:
    """Whether a profiler is recording in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was written in place; -1 for one that does not count that."""
    return -1 if tensor.is_inference() else int(tensor._version)


def push_function_mode(mode: Any) -> None:
    """Enter a TorchFunctionMode in this thread until `pop_function_mode`."""
    overrides._push_mode(mode)


def pop_function_mode(mode: Any) -> None:
    """Leave `mode`, wherever it stands among this thread's modes."""
    above = []
    while overrides._len_torch_function_stack():
        top = overrides._pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        overrides._push_mode(other)


def current_stream(device: int) -> int:
    """The handle of a GPU's current stream, without creating a Python object for it."""
    return int(torch._C._cuda_getCurrentRawStream(device))  # type: ignore[attr-defined]


def capturing() -> bool:
    """Whether the GPU's current stream is being captured into a graph, to be replayed later."""
    return torch.cuda.is_current_stream_capturing()


def schema_of(op: Any) -> Any:
    """The schema of an operator: name, arguments with types and alias annotations, returns.

    None for a callable without one, such as a higher-order operator.
    """
    return getattr(op, "_schema", None)


def overload_name(op: OpOverload) -> str:
    """The name of an overload among those of its operator: `Tensor` for `add.Tensor`."""
    return op._overloadname


def is_composite(op: OpOverload) -> bool:
    """Whether PyTorch computes the operator by other operators, whatever the backend."""
    return op._can_decompose()


def expression_of(value: Any) -> Any:
    """The expression of a symbolic number, comparable with `==` without adding a guard.

    Any other value is returned as it is.
    """
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return value.node.expr if symbolic else value


_SYMBOLIC: Final = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def depends_on_data(value: Any) -> bool:
    """Whether a value, or a size of a tensor in it, is known only at run time."""
    leaves = pytree.tree_leaves(value)
    return any(isinstance(x, _SYMBOLIC) and bool(free_unbacked_symbols(x)) for x in leaves)


UNKNOWN_SIZE: Final = 1 << 20
"""What a size that depends on data counts as where layouts and costs are compared."""


def hint_of(size: Any) -> int:
    """An integer, or the value that a symbolic one was traced with."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else UNKNOWN_SIZE


def registered_names() -> Iterator[tuple[str, str, str]]:
    """Namespace, packet and overload ("" for the default one) of every registered operator."""
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        yield space, packet, overload


@cache
def twin_of(op: OpOverload) -> OpOverload:
    """An object that works as `op` and is equal to no other operator."""
    twin = object.__new__(type(op))
    twin.__dict__ |= {**op.__dict__, _ORIGINAL: op}
    return twin


def original_of(op: Any) -> Any:
    """The operator that `op` is a twin of, or `op` itself."""
    return getattr(op, "__dict__", {}).get(_ORIGINAL, op)


_ORIGINAL: Final = "_dicp_original"


def is_backward(node: fx.Node) -> bool:
    """Whether a captured node computes gradients, rather than the user's functions."""
    return bool(node.meta.get("autograd_backward"))


def traced_from(node: fx.Node) -> OpOverload | None:
    """The operator that was decomposed into `node` and others; the node's own if none was."""
    original = node.meta.get("original_aten")
    return original if isinstance(original, OpOverload) else None


def overloads_of(namespace: str) -> Iterator[OpOverload]:
    """Every operator overload registered under `namespace`."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == namespace:
            yield getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def python_size(size: Any) -> str:
    """A symbolic size as a Python expression of its symbols' names."""
    return str(PythonPrinter().doprint(size))


def size_expression(size: torch.SymInt) -> sympy.Expr:
    """The expression of a symbolic integer; its symbols' signs are those that ShapeEnv has proved.

    A size's symbol is positive from the start. That of an integer argument, or of a size that
    depends on data, is of any sign until a guard bounds it.
    """
    node = size.node
    ranges = node.shape_env.var_to_range
    signs = {
        symbol: _with_sign(symbol, ranges[symbol].lower, ranges[symbol].upper)
        for symbol in node.expr.free_symbols
        if symbol.is_nonnegative is None and symbol in ranges
    }
    return node.expr.xreplace(signs) if signs else node.expr


def _with_sign(symbol: sympy.Symbol, low: Any, high: Any) -> sympy.Symbol:
    for sign, holds in (
        ("positive", low >= 1), ("nonnegative", low >= 0),
        ("negative", high <= -1), ("nonpositive", high <= 0),
    ):  # fmt: skip
        if holds:
            return sympy.Symbol(symbol.name, integer=True, **{sign: True})
    return symbol


def shape_env_of(gm: fx.GraphModule) -> ShapeEnv | None:
    """The ShapeEnv of the symbols in a graph's arguments; None where no argument is symbolic."""
    for node in gm.graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        for size in val.shape if isinstance(val, torch.Tensor) else (val,):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env  # type: ignore[no-any-return]
    return None


def is_proved(relation: sympy.Basic, shape_env: ShapeEnv) -> bool:
    """Whether ranges and guards of ShapeEnv prove a relation between symbolic integers.

    Adds no guard. Symbols are matched by name, whatever signs `size_expression` gave them.
    """
    own = {symbol.name: symbol for symbol in shape_env.var_to_range}
    known = {symbol: own.get(str(symbol), symbol) for symbol in relation.free_symbols}
    return shape_env._maybe_evaluate_static(relation.xreplace(known)) is sympy.true


def floor_division(size: Any, divisor: Any) -> Any:
    """`size // divisor` of sizes that may be symbolic."""
    return FloorDiv(size, divisor)


def number_at(number: Any, values: Mapping[Any, int]) -> Any:
    """A symbolic number as int, float or bool, its symbols having `values`.

    Returned unchanged if it has other symbols too; so is a plain number.
    """
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    if free_symbols(number) - values.keys():
        return number
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(number)](number.node.expr.xreplace(values))


def remainder(size: Any, divisor: Any) -> Any:
    """`size % divisor` of sizes that may be symbolic, as PyTorch's guards have it."""
    return Mod(size, divisor)


def first_sizes(tensors: Iterable[Any]) -> dict[Any, int]:
    """The symbols in the shapes of fake tensors, and their values in the first call."""
    found: dict[Any, int] = {}
    for tensor in tensors:
        for size in tensor.shape if isinstance(tensor, torch.Tensor) else (tensor,):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.has_hint():
                found[size.node.expr] = int(size.node.hint)
    return found


# ---- the stages that AOTAutograd runs after capture ----------------------------------------------

inner_metadata = graph_compile._get_inner_meta
make_inference_function = graph_compile._aot_stage2c_make_inference_function
tensorify_python_scalars = graph_compile._apply_tensorify_python_scalars

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
    """AOTAutograd's preparation before capture; the last result is empty before 2.12."""
    known = inspect.signature(prepare_aot_module_simplified).parameters
    older = (None,) if "boxed_forward_device_index" in known else ()
    found: Sequence[Any] = prepare_aot_module_simplified(
        gm, inputs, None, decompositions, keep_input_mutations, *older, False, flatten=False,
        force_non_lazy_backward_lowering=functorch_config.force_non_lazy_backward_lowering,
    )  # fmt: skip
    return found if not older else (*found, [])


def storable_result(aot_config: Any, **parts: Any) -> Any:
    """AOTAutograd's result in the form that is stored."""
    if "min_cut_info_str" in BundledAOTAutogradResult.__dataclass_fields__:
        parts["min_cut_info_str"] = None
    return BundledAOTAutogradResult(
        sanitized_aot_config=(
            aot_config.to_cacheable()
            if hasattr(aot_config, "to_cacheable")
            else graph_compile.sanitize_aot_config(aot_config)
        ),
        aot_joint_graph_str=None,
        aot_forward_graph_str=None,
        aot_backward_graph_str=None,
        forward_time_taken_ns=0,
        backward_time_taken_ns=0,
        **parts,
    )


def logs_graphs() -> bool:
    """Whether AOTAutograd's own log of its graphs is enabled."""
    names = ("aot_graphs", "aot_joint_graph")
    return bool(trace_log.handlers) or any(map(log_state.is_artifact_enabled, names))


def log_joint_graph(joint: torch.fx.GraphModule, aot_config: Any) -> None:
    graph_compile._log_joint_graph(joint, aot_config)


def log_split_graphs(
    forward: torch.fx.GraphModule,
    backward: torch.fx.GraphModule,
    subclass_meta: Any,
    metadata: Any,
    aot_config: Any,
) -> None:
    graph_compile._log_fw_bw_graphs(forward, backward, subclass_meta, metadata, aot_config)


def log_inference_graph(graph: torch.fx.GraphModule, aot_config: Any) -> None:
    graph_compile._log_inference_graph(graph, aot_config)


class NotCacheableError(Exception):
    """AOTAutograd's result for this graph must not be stored; the text says why."""


class _OwnDetails(FxGraphHashDetails):
    """Replaces the hash of what Inductor, PyTorch's own code generator, depends on.

    Computing that imports Inductor and hashes PyTorch's sources, none of which matters here.
    """

    def __init__(self, gm: Any, example_inputs: Any, fx_config: Any, inputs_to_check: Any) -> None:
        self.gm = gm
        self.example_inputs = list(example_inputs)
        self.fx_kwargs: dict[str, object] = {}
        self.cache_key_tag = torch.compiler.config.cache_key_tag
        self.torch_version = f"{torch.__version__} {torch.version.git_version}".encode()
        self.default_dtype = torch.get_default_dtype()
        self.default_device = str(torch.get_default_device())
        self.autocast = [
            f"{device} {torch.get_autocast_dtype(device)}"
            for device in torch._C._autocast_supported_devices()
            if torch.is_autocast_enabled(device)
        ]
        self.deterministic_algorithms_settings = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )
        shape_env = current_shape_env()
        hints = shape_env.var_to_hint_override if shape_env is not None else {}
        self.var_to_hint_override = {str(name): hints[name] for name in sorted(hints, key=str)}


class _KeyDetails(autograd_cache.AOTAutogradCacheDetails, _OwnDetails):
    """Everything that determines AOTAutograd's result for a graph."""

    def get_triton_source_codes_from_gm(self, gm: torch.fx.GraphModule) -> list[str]:
        return []  # only custom operators hold such sources, and those are not cached at all

    def _init_fx_graph_hash_details(self, gm: Any, example_inputs: Any, fx_config: Any) -> None:
        """Called by releases from 2.13 on, where older ones call `super().__init__`."""
        FxGraphCache._check_can_cache(gm, example_inputs, fx_config)
        _OwnDetails.__init__(self, gm, example_inputs, fx_config, [])


def autograd_key(gm: Any, fake_inputs: list[Any], aot_config: Any) -> str:
    """A hash of everything that AOTAutograd's result for `gm` depends on.

    Raises NotCacheableError for a graph whose result may differ between processes although
    everything that can be hashed is equal.
    """
    graph = gm.gm if isinstance(gm, GmWrapper) else gm
    with (
        autograd_cache.sanitize_gm_for_cache(graph),
        inductor_config.patch(fx_graph_cache=True, freezing=False),
    ):
        try:
            autograd_cache.check_cacheable(graph)
            for module in graph.modules():
                _check_no_custom_operator(module)
            details = _KeyDetails(graph, fake_inputs, aot_config, {})  # type: ignore[arg-type]
            return autograd_cache.AOTAutogradCachePickler(graph).get_hash(details)
        except Exception as error:  # PyTorch's own cache treats every failure as a bypass
            raise NotCacheableError(str(error) or type(error).__name__) from error


def _check_no_custom_operator(module: torch.nn.Module) -> None:
    for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
        target = node.target
        if not isinstance(target, (OpOverload, OpOverloadPacket)):
            continue
        name = target.name() if isinstance(target, OpOverload) else str(target)
        if name.replace(".", "::").split("::")[0] not in ("aten", "prims"):
            raise NotCacheableError(
                f"custom operator {name}: its decomposition and gradient may change unnoticed"
            )


def current_shape_env() -> ShapeEnv | None:
    """The symbols and guards of the compilation under way, if any."""
    context = TracingContext.try_get()
    return context.fake_mode.shape_env if context is not None and context.fake_mode else None


def ranges_of(symints: Iterable[torch.SymInt]) -> list[str]:
    """The values that ShapeEnv allows the symbols of `symints`."""
    nodes = [symint.node for symint in symints]
    return [f"{n.expr} in {n.shape_env.bound_sympy(n.expr)}" for n in nodes]


def is_plain_symbol(size: Any) -> bool:
    """Whether a size is a symbol alone, so that its value is the symbol's."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


def backed_symints(inputs: list[Any]) -> list[torch.SymInt]:
    return autograd_cache.AOTAutogradCache._filter_backed_symints(inputs)


class ShapeFacts:
    """What ShapeEnv knows of the symbols in one graph, and the guards it has added since."""

    def __init__(self, shape_env: ShapeEnv | None, symbols: Iterable[Any]) -> None:
        self.shape_env = shape_env
        self.symbols = sorted(symbols, key=str)
        self._before = len(shape_env.guards) if shape_env is not None else 0

    @classmethod
    def of(cls, gm: fx.GraphModule) -> ShapeFacts:
        shape_env, symbols = None, set[Any]()
        for node in gm.graph.nodes:
            for value in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                    shape_env = value.node.shape_env
                    symbols |= free_symbols(value)
                elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
                    sizes = [s for s in (*value.shape, *value.stride()) if type(s) is not int]
                    for size in sizes:
                        shape_env = size.node.shape_env
                        symbols |= free_symbols(size)
        return cls(shape_env, symbols)

    def known(self) -> list[str]:
        """What holds so far: the symbols' ranges, and the guards that mention them."""
        if self.shape_env is None:
            return []
        ranges = [f"{s} in {self.shape_env.var_to_range.get(s)}" for s in self.symbols]
        ours = set(self.symbols)
        guards = (guard.expr for guard in self.shape_env.guards[: self._before])
        return ranges + sorted(str(expr) for expr in guards if ours & expr.free_symbols)

    def added(self) -> list[str] | None:
        """The guards added since, as Python; None if one mentions other symbols too."""
        if self.shape_env is None:
            return []
        new = [guard.expr for guard in self.shape_env.guards[self._before :]]
        if any(expr.free_symbols - set(self.symbols) for expr in new):
            return None
        return [str(PythonPrinter().doprint(expr)) for expr in new]

    def hold(self, guards: Iterable[str]) -> bool:
        """Whether `guards` hold for the sizes that this compilation is for; adds no guard."""
        hints = {str(symbol): value for symbol, value in self._hints().items()}
        return all(eval(guard, SYMPY_INTERP, hints) for guard in guards)

    def add(self, guards: Iterable[str]) -> None:
        """Add guards that hold to this compilation's own."""
        if self.shape_env is None:
            return
        of_kind = {int: self.shape_env.create_symintnode, float: self.shape_env.create_symfloatnode}
        symbolic = {
            str(symbol): of_kind[type(value)](symbol, hint=value)
            for symbol, value in self._hints().items()
        }
        for guard in guards:
            assert bool(eval(guard, SYMPY_INTERP, symbolic)), guard

    def _hints(self) -> dict[Any, int | float]:
        """The symbols' values in the call that this compilation is for."""
        values: dict[Any, Any] = getattr(self.shape_env, _HINTS, {})
        found = {symbol: values[symbol] for symbol in self.symbols if symbol in values}
        return {s: int(v) if s.is_integer else float(v) for s, v in found.items()}


_HINTS: Final = "backed_var_to_val" if release_of(torch.__version__) >= (2, 13) else "var_to_val"


def guards_on(symints: list[torch.SymInt]) -> str:
    """The guards taken on `symints` so far, as an expression ("" for none)."""
    if not symints:
        return ""
    shape_env = symints[0].node.shape_env  # a backward compiled later is in no tracing context
    guards = shape_env.get_pruned_guards(symints)
    return shape_env.produce_guards_expression(placeholders=symints, guards=guards) or ""


_hint = getattr(autograd_cache, "guarding_hint_or_throw", None) or autograd_cache.size_hint


def guards_hold(expression: str, symints: list[torch.SymInt]) -> bool:
    """Whether `expression` holds for the current sizes; adds no guard."""
    if not symints:
        return False
    shape_env = symints[0].node.shape_env
    hints = [_hint(symint) for symint in symints]
    return bool(shape_env.evaluate_guards_expression(expression, hints))


def record_on_device(
    run: Callable[[], list[Any]], device: torch.device
) -> tuple[Callable[[], None], list[Any]]:
    """Records the work that `run` puts on the stream, without executing it.

    Returns the replay function and the results, which replays fill. Raises RuntimeError if the
    driver cannot record some of the work.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        try:
            # A stream of this device: PyTorch's default stream is of the first that recorded.
            # Relaxed: a kernel may have to be loaded for the alignment of the recording's buffers.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="relaxed"):
                outputs = run()
        except RuntimeError:
            # A failed recording leaves its stream current and the random generator waiting for
            # the end of the recording.
            torch.cuda.set_stream(before)
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
    return graph.replay, outputs


# ---- the eager device ----------------------------------------------------------------------------

from torch.fx.experimental.proxy_tensor import make_fx

privateuse1_name = torch._C._get_privateuse1_backend_name
register_device_module = torch._register_device_module
_get_device = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]


def true_device(tensor: torch.Tensor) -> torch.device:
    """A tensor's device, whatever name the attribute `device` shows."""
    if torch._C._len_torch_function_stack() == 0:
        return _get_device(tensor)  # type: ignore[no-any-return]
    with torch._C.DisableTorchFunction():  # a mode would look the attribute up again
        return _get_device(tensor)  # type: ignore[no-any-return]


def is_wrapped_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a Python number, which promotes no dtype."""
    return bool(getattr(tensor, "_is_wrapped_number", lambda: False)())


def traced_guards(graph: fx.GraphModule) -> str:
    """The conditions on sizes under which a graph traced with symbolic sizes holds; "" for none."""
    inputs = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    env = getattr(graph, "shape_env", None)
    if env is None:
        return ""
    return str(env.produce_guards_expression(inputs) or "")


def traced_guards_hold(graph: fx.GraphModule, guards: str, inputs: Sequence[Any]) -> bool:
    """Whether `inputs` satisfy the guards of a traced graph."""
    return bool(graph.shape_env.evaluate_guards_expression(guards, inputs))


def dispatches_alone(op: OpOverload, key: str) -> bool:
    """Whether `op` has a kernel of its own for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def actual_device_type(kind: str) -> str:
    """The device type behind a name: a registered device may answer to the name of another."""
    module = getattr(torch, privateuse1_name(), None)
    return str(getattr(module, "answers_to", {}).get(kind, kind))


def aten_names() -> list[tuple[str, str]]:
    """The names of all ATen operators, each with that of its overload ("" for the unnamed one)."""
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    return [(base, overload) for base, _, overload in (n[6:].partition(".") for n in names)]


def aten_operators() -> list[OpOverload]:
    """All ATen operators that Python can call."""
    found = []
    for base, overload in aten_names():
        packet = getattr(torch.ops.aten, base, None)
        op = getattr(packet, overload or "default", None)
        if isinstance(op, OpOverload):
            found.append(op)
    return found
