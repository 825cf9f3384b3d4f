"""How tools get between a program and its operators: one mode per thread, a stack of features.

    program -> ToolMode (or a wrapped attribute) -> feature -> feature -> the operator

Calls nested in a hooked operator are not hooked again. While Dynamo traces, nothing is hooked:
compiled graphs are looked into by `dicp.op_tools.compiled`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import GeneratorType
from typing import Any, ClassVar, Self

import torch
from torch.overrides import TorchFunctionMode

from dicp.config import misspelled_tool_variables
from dicp.errors import OperatorNameError, ToolVariableError, ToolWarning
from dicp.op_tools import trees
from dicp.op_tools.names import COLLECTIVES, name_of, resolve
from dicp.op_tools.records import CallId, CallSite, current_call_site, heading, logger
from dicp.op_tools.selection import entries, is_selected, unmatched_names
from dicp.op_tools.tables import argument_table
from dicp.torch_private import (
    CHECKPOINTS,
    is_nested_or_transformed,
    pop_function_mode,
    push_function_mode,
)

Proceed = Callable[["Call"], Any]
_ONE_PASS = (GeneratorType, map, filter, zip)
"""Arguments that can be read once, such as parameters of a module; tools run a call more often."""


@dataclass
class Call:
    """One call of an operator: features replace its arguments before it runs."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call_site: CallSite = field(default_factory=current_call_site)
    plain: Callable[..., Any] | None = None
    """The operator itself where `func` is a compiled form of it."""

    @property
    def operator(self) -> Callable[..., Any]:
        return self.plain or self.func

    @cached_property
    def id(self) -> CallId:
        """Every feature that sees the call knows it by the same id."""
        return CallId.new()

    def heading(self, *more: str) -> str:
        return heading(self.name, self.id, self.call_site, *more)


class Feature:
    """Base of the tools: selection, start and stop, printing.

    ops, exclude: names or regular expressions, as a list or separated by commas; they replace the
    environment's lists.
    condition: called with the operator's own arguments; False leaves the call alone.
    quiet: files and the summary only. style: "table", or "line" for one short line per record.
    """

    feature: ClassVar[str]
    hook: ClassVar[str]
    variable: ClassVar[str]
    changes_results: ClassVar[bool] = False
    """Whether calls compute otherwise than without the tool, as recomputed ones then must, too."""

    def __init__(
        self,
        ops: str | Sequence[str] | None = None,
        *,
        exclude: str | Sequence[str] | None = None,
        condition: Callable[..., Any] | None = None,
        quiet: bool = False,
        style: str = "table",
    ) -> None:
        if style not in ("table", "line"):
            raise ToolVariableError("style", style, "'table' or 'line'")
        self.ops = entries(ops)
        self.exclude = entries(exclude, "exclude")
        self.condition = condition
        self.quiet = quiet
        self.silent = False
        """Whether records are kept in memory alone."""
        self.style = style
        self.chosen_only = False
        """Whether nothing is said of operators beyond `ops`."""
        self._depth = 0
        self._announced: set[tuple[str, str]] = set()
        self._lock = threading.RLock()

    # ---- what a tool defines --------------------------------------------------------------------

    def around(self, call: Call, proceed: Proceed) -> Any:
        """Run the call, by `proceed(call)`, and do the tool's work around it."""
        return proceed(call)

    def skips(self, name: str) -> bool:
        """Whether the tool leaves an operator alone by nature."""
        return False

    def flush(self) -> None:
        """Write what waits to be written."""

    def forget(self) -> None:
        """In a process that was forked: drop what the parent process writes."""

    def finish(self) -> None:
        """Print the summary; called once per start and stop."""

    # ---- start and stop -------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to look at the operators that this thread calls. May be nested and repeated, in
        several threads too."""
        with self._lock:
            self._depth += 1
            first = self._depth == 1
            if first:
                self._announced.clear()
        for name, near in misspelled_tool_variables().items() if first else ():
            message = f"{name} is no variable of the operator tools. Did you mean {near}?"
            warnings.warn(ToolWarning(message), stacklevel=2)
        FRAME.add(self)
        return self

    def stop(self) -> None:
        """Stop looking, write what waits and print the summary."""
        with self._lock:
            if self._depth == 0:
                return
            self._depth -= 1
            last = self._depth == 0
        FRAME.remove(self)
        if not last:
            return
        with FRAME.unhooked():
            self.flush()
            self.finish()
            self._warn_of_unknown_names()

    def _warn_of_unknown_names(self) -> None:
        """Warn of names to look at that lead to no function: a misspelled one matches nothing."""
        ran = {name for _, name in self._announced}
        for name in unmatched_names(self.variable, self.ops, ran):
            try:
                resolve(name)
            except OperatorNameError as error:
                warnings.warn(ToolWarning(f"{self.feature}: {error}"), stacklevel=4)

    @contextlib.contextmanager
    def silently(self) -> Iterator[Self]:
        """The tool runs within, and nothing of it is printed or written."""
        with self._lock:
            self._depth += 1
            before = self.quiet, self.silent
            self.quiet = self.silent = True
        FRAME.add(self)
        try:
            yield self
        finally:
            with self._lock:
                self._depth -= 1
                self.quiet, self.silent = before
            FRAME.remove(self)

    def end(self) -> None:
        """The same as `stop`."""
        self.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As a decorator: the tool runs while the function does."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return run

    @property
    def running(self) -> bool:
        return self._depth > 0

    # ---- what the frame asks --------------------------------------------------------------------

    def wants(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the tool looks at this call; the first answer per operator is printed."""
        if self.skips(name):
            return False
        wanted = is_selected(self.variable, name, self.ops, self.exclude)
        if self.chosen_only and not wanted:
            return False
        given = trees.tensors((args, kwargs))  # values of some tensors cannot be read
        wanted = wanted and not any(map(is_nested_or_transformed, given))
        wanted = wanted and self._condition_holds(name, args, kwargs)
        self._log_once("apply" if wanted else "skip", name)
        return wanted

    def _condition_holds(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        if self.condition is None:
            return True
        try:
            with FRAME.unhooked():
                return bool(self.condition(*args, **kwargs))
        except Exception as error:
            shown = ", ".join(map(_summary, (*args, *kwargs.values())))
            logger().warning(
                f"the condition for {self.feature} on {name}({shown}) raises "
                f"{type(error).__name__}: {error}; the operator runs plainly"
            )
            return False

    def _log_once(self, verb: str, name: str) -> None:
        if (verb, name) not in self._announced:
            self._announced.add((verb, name))
            self.say(f"{verb} {self.hook} on {name}")

    def say(self, text: str) -> None:
        if not self.quiet:
            logger().info(text)

    def say_arguments(self, call: Call, rows: Sequence[tuple[str, Any]], *more: str) -> None:
        """Print a call's arguments and results: their table under its heading, or one line."""
        if self.style == "line":
            shown = (f"{label.removeprefix(call.name).strip()} {_summary(v)}" for label, v in rows)
            self.say(f"{self.hook}: {' '.join((call.name, *more))} {', '.join(shown)}")
        elif not self.quiet:
            self.say(call.heading(*more))
            self.say(argument_table(rows))


def _summary(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)[:60]


class ToolMode(TorchFunctionMode):
    """Hands torch's calls of this thread to the frame.

    Dynamo compiles a function anew for a thread that has the mode, and traces through it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return FRAME.call(func, args, kwargs or {})


class _Thread(threading.local):
    """What one thread does: no state of a hook is shared with another thread."""

    def __init__(self) -> None:
        self.features: dict[Feature, int] = {}
        """How often the thread has started each, in the order in which they came."""
        self.mode: ToolMode | None = None
        self.depth = 0


_INHERITED = object()


@dataclass
class _Wrapped:
    """An attribute that is replaced, what stood there, and how often it is wanted."""

    owner: Any
    attribute: str
    plain: Any
    count: int = 0

    def restore(self) -> None:
        if self.plain is _INHERITED:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.plain)


@dataclass(frozen=True)
class _Bound:
    """A class's static or class method, each binding of which is hooked."""

    plain: Any
    around: Callable[[Callable[..., Any]], Callable[..., Any]]

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return self.around(self.plain.__get__(instance, owner))


class Frame:
    """The features of each thread, and the attributes that are wrapped while one is running."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self._lock = threading.RLock()
        self._wrapped: dict[tuple[int, str], _Wrapped] = {}
        self._running: weakref.WeakSet[Feature] = weakref.WeakSet()
        atexit.register(self._finish)
        os.register_at_fork(after_in_child=self._forked)

    # ---- features -------------------------------------------------------------------------------

    def add(self, feature: Feature) -> None:
        thread = self._thread
        thread.features = {f: n for f, n in thread.features.items() if f.running}
        thread.features[feature] = thread.features.get(feature, 0) + 1
        if thread.mode is None:
            thread.mode = ToolMode()
            push_function_mode(thread.mode)
        with self._lock:
            if not self._running:
                self._wrap_functions()
            self._running.add(feature)

    def remove(self, feature: Feature) -> None:
        thread = self._thread
        thread.features[feature] = thread.features.get(feature, 0) - 1
        thread.features = {f: n for f, n in thread.features.items() if f.running and n > 0}
        if not thread.features and thread.mode is not None:
            pop_function_mode(thread.mode)
            thread.mode = None
        with self._lock:
            if not feature.running:
                self._running.discard(feature)
            if not self._running:
                self._unwrap_functions()

    @property
    def features(self) -> list[Feature]:
        """The features that run in this thread, in the order in which they came."""
        return [feature for feature in self._thread.features if feature.running]

    @property
    def anywhere(self) -> bool:
        """Whether a feature runs in any thread."""
        return bool(self._running)

    def _finish(self) -> None:
        for feature in list(self._running):
            with contextlib.suppress(Exception), self.unhooked():  # the interpreter is ending
                feature.flush()
                feature.finish()

    def _forked(self) -> None:
        for feature in self._running:
            feature.forget()

    # ---- calls ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unhooked(self) -> Iterator[None]:
        """The tools' own work: no call in here is hooked."""
        self._thread.depth += 1
        try:
            yield
        finally:
            self._thread.depth -= 1

    def call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str = "",
        plain: Callable[..., Any] | None = None,
    ) -> Any:
        """Run an operator through the features that want it; `plain` as in `Call`."""
        thread = self._thread
        if thread.depth or not thread.features:
            return func(*args, **kwargs)
        name = name or name_of(func)
        if not name:
            return func(*args, **kwargs)
        wanting = [f for f in thread.features if f.running and f.wants(name, args, kwargs)]
        if not wanting:
            return func(*args, **kwargs)
        args = tuple(list(a) if isinstance(a, _ONE_PASS) else a for a in args)
        with self.unhooked():
            return _through(wanting, Call(name, func, args, kwargs, plain=plain))

    # ---- functions that reach no mode -----------------------------------------------------------

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Make a function that is an attribute of a module or class reach the frame."""

        def run(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self.call(plain, args, kwargs, name)

        self._replace(owner, attribute, run)

    def _replace(self, owner: Any, attribute: str, run: Callable[..., Any]) -> None:
        """Have calls of an attribute run by `run(the function, *args, **kwargs)` until `unwrap`."""
        with self._lock:
            wrapped = self._wrapped.get((id(owner), attribute))
            if wrapped is None:
                wrapped = _Wrapped(owner, attribute, vars(owner).get(attribute, _INHERITED))
                self._wrapped[id(owner), attribute] = wrapped
                setattr(owner, attribute, _hooked(owner, attribute, run))
            wrapped.count += 1

    def unwrap(self, owner: Any, attribute: str) -> None:
        with self._lock:
            wrapped = self._wrapped.get((id(owner), attribute))
            if wrapped is None:
                return
            wrapped.count -= 1
            if not wrapped.count:
                del self._wrapped[id(owner), attribute]
                wrapped.restore()

    def _wrap_functions(self) -> None:
        for name in _collectives():
            self.wrap(torch.distributed, name, f"torch.distributed.{name}")
        for owner, attribute in CHECKPOINTS:
            self._replace(owner, attribute, self._checkpoint)

    def _unwrap_functions(self) -> None:
        for name in _collectives():
            self.unwrap(torch.distributed, name)
        for owner, attribute in CHECKPOINTS:
            self.unwrap(owner, attribute)

    def _checkpoint(
        self, plain: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A checkpoint that recomputes `function` in backward, where calls reach no mode, with the
        features by which its results were changed in forward, and no others."""
        features = [feature for feature in self.features if feature.changes_results]

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():  # in forward
                return function(*args, **kwargs)
            mode, thread = ToolMode(), self._thread
            with contextlib.ExitStack() as stack:
                for feature in features:
                    stack.enter_context(feature.silently())
                stack.callback(setattr, thread, "features", thread.features)
                thread.features = dict.fromkeys(features, 1)
                push_function_mode(mode)
                stack.callback(pop_function_mode, mode)
                return function(*args, **kwargs)

        return plain(run if features else function, *args, **kwargs)


def _hooked(owner: Any, attribute: str, run: Callable[..., Any]) -> Any:
    """A function or method that is called by `run(the original, *args, **kwargs)`."""
    found = inspect.getattr_static(owner, attribute)

    def around(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain(*args, **kwargs)
            return run(plain, *args, **kwargs)

        return hooked

    if isinstance(found, (staticmethod, classmethod)):
        return _Bound(found, around)
    return around(found)


def _collectives() -> list[str]:
    if not torch.distributed.is_available():
        return []
    return [name for name in COLLECTIVES if hasattr(torch.distributed, name)]


def _through(features: Sequence[Feature], call: Call) -> Any:
    """The call inside all features, the first one outermost."""
    if not features:
        return call.func(*call.args, **call.kwargs)
    first, rest = features[0], features[1:]
    return first.around(call, lambda inner: _through(rest, inner))


FRAME = Frame()
