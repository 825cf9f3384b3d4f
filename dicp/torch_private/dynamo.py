"""Dynamo: its table of backends, its graph breaks, and what it traces."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo as dynamo_module
from torch import fx
from torch._decomp import decompositions
from torch._dynamo import compiled_autograd
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards as dynamo_guards
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends import registry as backend_registry
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.source import GradSource, is_from_optimizer_source
from torch._dynamo.utils import GmWrapper, flatten_graph_inputs, get_metrics_context
from torch._dynamo.utils import counters as dynamo_counters
from torch.utils import _pytree as pytree

disable_compiled_autograd = compiled_autograd._disable
_TORCH: Final = f"{Path(torch.__file__).parent}"
_RECURRENT: Final = "Attempted to wrap RNN, GRU, or LSTM"
_CONTEXT: Final = "Developer debug context:"
_select_layer = decompositions.select_one_layer_lstm_function


def frame_seconds() -> float:
    """Seconds since Dynamo began to compile the current frame; 0 outside of a compilation."""
    context = get_metrics_context()
    if not context.in_progress():
        return 0.0
    return (time.time_ns() - context._start_time_ns) / 1e9


def any_number_of_compilations() -> Any:
    """A context in which Dynamo compiles one function for as many modules as call it."""
    most = 1 << 20
    return dynamo_config.patch(recompile_limit=most, accumulated_recompile_limit=most)


def shorten_compilations() -> None:
    """Leave out what Dynamo does once per compilation for its logs and for the memory in use.

    It times the guards after emptying the processor's caches, and collects garbage: each some 30
    ms, which is a tenth of the time of tests that compile small functions.
    """
    dynamo_config.run_gc_after_compile = False
    dynamo_guards.profile_guard_manager = lambda *_: 0.0


def original_module(module: Any) -> Any:
    """The module that `torch.compile` was called with, for the module that it returned."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def compiled_call(module: Any) -> Any:
    """The compiled call of `module.compile()`; None for a module that is not compiled."""
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


def register_repeatedly(kind: type) -> None:
    """Let backends of class `kind` be registered more than once.

    Threads that look one up at the same time, before it is registered, all load it from its entry
    point and register it, and PyTorch refuses all but the first: "duplicate name".
    """
    known = backend_registry._COMPILER_FNS
    backend_registry._COMPILER_FNS = _BackendTable(known, kind)


def trace_recurrent_modules() -> None:
    """Have Dynamo trace nn.RNN, nn.GRU and nn.LSTM, from now on in the whole process."""
    dynamo_config.allow_rnn = True
    decompositions.select_one_layer_lstm_function = _layer_of_lstm


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
    """Whether Dynamo skipped the whole function."""

    @property
    def is_recurrent(self) -> bool:
        """Whether the reason is a module that `trace_recurrent_modules` has traced."""
        return self.reason.startswith(_RECURRENT)


UNRECORDED = "<file not recorded>"
"""The place of a failure of PyTorch's before it has looked at a function."""


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
            file = metrics.fail_user_frame_filename or metrics.co_filename or UNRECORDED
            place = f"{file}:{metrics.fail_user_frame_lineno or metrics.co_firstlineno or 0}"
            if (reason.partition("\n")[0], place) not in known and not file.startswith(_TORCH):
                breaks.append(GraphBreak(reason, place, skipped=True))
        return list(dict.fromkeys(breaks))


def _broken(reason: str, stack: Sequence[Any]) -> GraphBreak:
    """A break with the innermost line outside of PyTorch, or with the object that caused it."""
    own = [f"{f.filename}:{f.lineno}" for f in stack if not f.filename.startswith(_TORCH)]
    context = reason.partition(_CONTEXT)[2].strip().partition("\n")[0]
    return GraphBreak(reason, own[-1] if own else context)


def unguarded_gradients(graph: fx.Graph) -> tuple[int, ...]:
    """Positions of the inputs of Dynamo's graph that are gradients read by an optimizer: it guards
    that there are any, and none of their properties."""
    inputs = enumerate(graph.find_nodes(op="placeholder"))
    return tuple(k for k, node in inputs if _is_unguarded(getattr(node, "_dynamo_source", None)))


def _is_unguarded(source: Any) -> bool:
    return isinstance(source, GradSource) and is_from_optimizer_source(source)
