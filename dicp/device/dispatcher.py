"""How every operator of the device is executed: its path.

In order: forced to the CPU; drawn from the device's random state; the vendor's operator library; a
library call or one compiled operator of the device's target; PyTorch's decomposition into other
operators of the device; the CPU, said once. Views and allocations are native and never come here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from threading import Lock, local
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dicp.config import Config, DeviceSettings
from dicp.device.call import Call, NotCompiled
from dicp.device.hosted import DEVICE_TYPE, host_target
from dicp.device.output import say
from dicp.device.patterns import Patterns
from dicp.device.scalars import with_tensor_for_scalar
from dicp.device.schemas import (
    Functional,
    arguments_of,
    bound,
    bound_with_results,
    functional_of,
    inputs_of,
    is_number_for_tensor,
    keep_dtypes,
    name_of,
    packet_name,
    single_element,
    tensor_places,
    with_tensors_for_numbers,
)
from dicp.dynamo_bridge.decompose import InDomain, decompositions
from dicp.errors import FallbackWarning
from dicp.target import Target
from dicp.torch_private import (
    OpOverload,
    all_decompositions,
    dispatches_alone,
    pytree,
    schema_of,
    true_device,
)

if TYPE_CHECKING:
    from dicp.device.compile import CompiledOperator, OperatorCompiler

logger = logging.getLogger("dicp.device")

Observer = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any], Callable[[], Any]], Any]
"""Runs an operator by its last argument, and looks at what goes in and comes out."""

WITHOUT_GENERATOR = frozenset({"native_dropout"})
"""Random operators without an argument for a generator."""


@cache
def draws(op: OpOverload) -> bool:
    """Whether an operator draws numbers: one of its overloads takes a generator.

    Such operators have one path, and are never compared with the CPU.
    """
    packet = op.overloadpacket
    overloads = (getattr(packet, name) for name in packet.overloads())
    arguments = (argument for one in overloads for argument in schema_of(one).arguments)
    return packet_name(op) in WITHOUT_GENERATOR or any(a.name == "generator" for a in arguments)


@dataclass
class PathCounts:
    """How often each operator took which path."""

    taken: dict[tuple[str, str], int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, path: str, reason: str = "") -> None:
        self.taken[name, path] = self.taken.get((name, path), 0) + 1
        if reason:
            self.reasons[name] = reason


class FunctionLibrary(Protocol):
    """A vendor's operator library, which takes calls before the target does."""

    def name_for(self, op: OpOverload) -> str | None:
        """The name of the first function for an operator; None where the library has none."""

    def function_for(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str | None:
        """The name of the function that takes a call; None where none does."""

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call of `op`; NotImplemented where the library does not take it."""


class Dispatcher:
    """The Python side of every operator: decides its path once, and installs the fast ones."""

    def __init__(self, native: Any, config: Config, settings: DeviceSettings) -> None:
        self.native, self.config, self.settings = native, config, settings
        self.forced = Patterns("DIPU_FORCE_FALLBACK_OPS_LIST", settings.fallback)
        self.kept = Patterns("DIPU_KEEP_TORCHOP_DEFAULT_IMPL_OPS", settings.kept)
        self.observers: list[Observer] = []
        self.counts = PathCounts()
        self._said: set[str] = set()
        self._functional: dict[OpOverload, Functional | None] = {}
        self._here = local()
        self._lock, self._forcing = Lock(), 0  # blocks of `forcing`, in all threads
        self.forced_changed: Callable[[Patterns], None] = lambda patterns: None
        self.operator_library: FunctionLibrary | None = None

    @cached_property
    def target(self) -> Target:
        """The target whose code runs on the device."""
        return host_target()

    @cached_property
    def compiler(self) -> OperatorCompiler:
        """The compiled operators. They need Dynamo, which takes seconds to import."""
        from dicp.device.compile import OperatorCompiler

        unasked = replace(self.config, eager_ops=(), native_ops=())  # which `run` looks up itself
        return OperatorCompiler(self.target, unasked)

    # ---- entry ----------------------------------------------------------------------------------

    def __call__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run() -> Any:
            return self.run(op, args, kwargs)

        for observer in self.observers:
            run = _observed(observer, op, args, kwargs, run)
        result = run()
        if self.settings.synchronous:
            self.native.synchronize(self.native.current_device())
        return result

    def close(self) -> None:
        """Drop the observers, as the interpreter ends."""
        self.observers.clear()

    def update_watching(self, forcing: int = 0) -> None:
        """Whether every call has to come through Python. `forcing`: blocks that begin, or end."""
        with self._lock:
            self._forcing += forcing
            watches = self.observers or self._forcing or self.settings.synchronous
            self.native.set_watching(bool(watches))

    @contextmanager
    def forcing(self) -> Iterator[None]:
        """Operators inside run on the CPU: the parts of a forced composite operator."""
        before = getattr(self._here, "forcing", False)
        self._here.forcing = True
        self.update_watching(1)  # so that no part takes a faster path
        try:
            yield
        finally:
            self._here.forcing = before
            self.update_watching(-1)

    def set_fallback_ops(self, patterns: Sequence[str]) -> None:
        """Run the operators that match on the CPU, and no others."""
        self.forced = Patterns("set_fallback_ops", ",".join(patterns))
        self.native.forget_paths()
        self.forced_changed(self.forced)

    # ---- paths ----------------------------------------------------------------------------------

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(op)
        if getattr(self._here, "forcing", False):
            return self.on_host(op, args, kwargs)
        if self.forced.match(name):
            self.say_once(f"force fallback has been set, {name} will be fallback to cpu")
            self.counts.add(name, "forced")
            return self.on_host(op, args, kwargs)
        if draws(op):
            return self._random(op, args, kwargs)
        try:
            if self.kept.match(name):
                raise NotCompiled("DIPU_KEEP_TORCHOP_DEFAULT_IMPL_OPS keeps PyTorch's own")
            result = self._by_library(op, name, args, kwargs)
            if result is not NotImplemented:
                return result
            return self._by_target(op, name, args, kwargs)
        except NotCompiled as reason:
            return self._decomposed_or_on_cpu(op, name, args, kwargs, str(reason))

    def _random(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.counts.add(name_of(op), "random")
        if packet_name(op) in WITHOUT_GENERATOR:
            return _dropout(*args, **kwargs)
        if any(argument.name == "generator" for argument in schema_of(op).arguments):
            self.native.run_on_host(schema_of(op).name, schema_of(op).overload_name)
            given = bound(op, args, kwargs)
            if given["generator"] is None:
                given["generator"] = self.native.default_generator(self.index_of(args, kwargs))
            args, kwargs = arguments_of(op, given)
        return self.on_host(op, args, kwargs)

    def on_host(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = schema_of(op)
        return self.native.host_call(schema.name, schema.overload_name, args, kwargs)

    def _by_library(
        self, op: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of the vendor's operator library; NotImplemented: it takes no such call."""
        if self.operator_library is None:
            return NotImplemented
        result = self.operator_library.run(op, args, kwargs)
        if result is not NotImplemented:
            self.counts.add(name, "operator library")
        elif dispatches_alone(op, "CompositeImplicitAutograd"):
            return op.decompose(*args, **kwargs)
        return result

    def _by_target(
        self, op: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        functional = self.functional(op)
        if functional is None:
            raise NotCompiled("it writes to its arguments in a way of its own")
        kind = self.target.rule_kind(functional.op)
        if kind == "library" and self.native.host_addressable():
            self.counts.add(name, "library")
            self.native.run_on_host(schema_of(op).name, schema_of(op).overload_name)
            return self.on_host(op, args, kwargs)
        if kind is None and self.decomposition(functional.op) is None:
            raise NotCompiled("the target has no rule for it")
        result = self._compiled(op, functional, args, kwargs)
        self.counts.add(name, "compiled")
        return result

    # ---- the compiled path ----------------------------------------------------------------------

    def _compiled(
        self, op: OpOverload, form: Functional, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the compiled operator, and where it is one native call, install it for the next."""
        schema = schema_of(op)
        signature = self.native.signature(schema.name, schema.overload_name, args, kwargs)
        given, outs = bound_with_results(op, form, args, kwargs)
        if any(map(_repeats, outs)):
            raise NotCompiled("elements of a result share memory")
        if outs or keep_dtypes(op, given):  # which are the same if a number is a tensor
            given = with_tensors_for_numbers(op, given)
        run: Callable[..., Any] = form.op
        if len(outs) == 1:
            run, given = with_tensor_for_scalar(form.op, given, outs[0].dtype)
        inputs = inputs_of(form, given, outs)
        device = self.index_of(args, kwargs)
        call = self.native.HostCall(device)
        self.native.wait_for_queue(device)
        positional, named = arguments_of(form.op, _map_tensors(call.on_host, inputs))
        dtypes = (None,) * form.fresh + tuple(out.dtype for out in outs)
        prepared = Call(run, positional, named, dtypes if outs else ())
        compiled, dense = self.compiler.compiled(prepared)
        converted = compiled.returned.converted and run is form.op
        if converted and not _takes_results(op, form, given):
            raise NotCompiled("it does not convert its results to that dtype")
        compiled.prepare(dense)
        copied = [a is not b for a, b in zip(_tensors(prepared), dense, strict=False)]
        one_call = not any(copied[position] for position in compiled.written)
        if signature is not None and one_call and self.native.host_addressable():
            plan = self._plan(op, form, given, compiled, dense, copied)
            if plan is not None:
                names = schema.name, schema.overload_name
                result = self.native.install(*names, args, kwargs, signature, plan)
                if result is not NotImplemented:
                    return result
        with self.native.HostMemory(device):
            made = compiled(dense)
            results: list[Any] = [r if r is None else call.on_device(r) for r in made]
            self._keep_written(call, prepared, compiled, dense)
        pairs = list(zip(outs, results[form.fresh :], strict=bool(outs)))
        if not _fit(form, given, pairs):
            raise NotCompiled("it broadcasts what it writes to")
        _give(pairs)
        if form.fresh or outs:
            return _returned(form, outs, results)
        return results[0] if compiled.returned.single else tuple(results)

    @staticmethod
    def _keep_written(
        call: Any, prepared: Call, compiled: CompiledOperator, dense: Sequence[Any]
    ) -> None:
        """What was overwritten reaches the tensors given: code has copies of some."""
        tensors = _tensors(prepared)
        for position in compiled.written:
            if tensors[position] is not dense[position]:
                tensors[position].copy_(dense[position])
        if compiled.written:
            call.write_back()

    def index_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """The index of the device that a call runs on."""
        device = device_of(args, kwargs)
        if device is None or device.index is None:
            return int(self.native.current_device())
        return device.index

    @staticmethod
    def _plan(
        op: OpOverload,
        form: Functional,
        given: Mapping[str, Any],
        compiled: CompiledOperator,
        dense: Sequence[Any],
        copied: Sequence[bool],
    ) -> dict[str, Any] | None:
        """How the native part runs calls of the same signature; None unless as one native call.

        `dense`: the inputs of compiled code. `copied`: which of them are copies of what was
        given.
        """
        plan = None if form.fresh else compiled.native_call(dense)
        if plan is None:
            return None
        tensors = [one for one in dense if isinstance(one, torch.Tensor)]
        order = [place for a in schema_of(op).arguments if str(a.type) != "number"
                 for place in tensor_places(a.name, given[a.name])]  # fmt: skip
        taken = [a.name for a in schema_of(form.op).arguments if a.name in given]
        names = [place for name in taken for place in tensor_places(name, given[name])]
        numbers = [a for a in schema_of(op).arguments if is_number_for_tensor(a, given[a.name])]
        if len(names) != len(tensors) or numbers:
            return None
        outputs: list[dict[str, Any]] = []
        for slot, shape, strides, dtype in plan.outputs:
            fresh = {"sizes": list(shape), "strides": list(strides), "dtype": dtype}
            outputs.append({"slot": slot, "argument": -1, **fresh})
        for name, (number, view) in zip(form.outs, plan.results, strict=bool(form.outs)):
            out, (_, shape, strides, dtype) = given[name], plan.outputs[number]
            laid_out = tuple(out.shape) == shape and _laid_out(out, strides)
            resized = tuple(out.shape) != shape and out.numel() == 0  # eager warns of others
            resized = resized and not _in_place(form, given, out)
            if view is not None or out.dtype != dtype or not (laid_out or resized):
                return None
            outputs[number]["argument"] = order.index((name, 0))
        constants = {s: tensors[p] for s, p in plan.inputs if names[p] not in order}
        table = list(plan.table)
        for slot, number in constants.items():  # part of the signature
            table[slot] = number.data_ptr()
        return {
            "run": plan.run, "launches": plan.launches, "count": plan.count, "table": table,
            "inputs": [
                {"slot": s, "argument": order.index(names[p]), "copied": copied[p]}
                for s, p in plan.inputs if names[p] in order
            ],
            "workspace": plan.workspace[0], "parts": plan.workspace[1],
            "outputs": outputs, "aliases": plan.aliases,
            "results": compiled.returned.with_absent(plan.results, (-1, None)),
            "pointwise": torch.Tag.pointwise in form.op.tags, "keep": (plan.keep, constants),
            "bytes": sum(t.numel() * t.element_size() for t in tensors),
        }  # fmt: skip

    # ---- what the target does not take ----------------------------------------------------------

    def _decomposed_or_on_cpu(
        self, op: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> Any:
        form = self.functional(op)
        rule = self.decomposition(form.op) if form is not None else None
        running: set[str] = self._here.__dict__.setdefault("running", set())
        if form is not None and rule is not None and name not in running:
            running.add(name)
            try:
                result = self._decomposed(op, form, rule, args, kwargs)
                if result is not NotImplemented:
                    self.counts.add(name, "decomposed", reason)
                    return result
            except NotImplementedError:
                pass
            except TypeError as error:  # it lacks an argument of this call, or is wrong
                reason = f"{reason}; its decomposition raised {error!r}"
            finally:
                running.discard(name)
        self.counts.add(name, "cpu", reason)
        self._say_fallback(name, reason)
        always = rule is None and (form is None or self.target.rule_kind(form.op) is None)
        if always and not self.settings.log_fallback:
            self.native.run_on_host(schema_of(op).name, schema_of(op).overload_name)
        return self.on_host(op, args, kwargs)

    def _decomposed(
        self,
        op: OpOverload,
        form: Functional,
        rule: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given, outs = bound_with_results(op, form, args, kwargs)
        positional, named = arguments_of(form.op, inputs_of(form, given, outs))
        if any(map(_repeats, outs)):
            return NotImplemented  # eager's error is the host's
        result = rule(*positional, **named)
        if result is NotImplemented or not outs:
            return result
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        pairs = list(zip(outs, results[form.fresh :], strict=True))
        converted = any(value.dtype != out.dtype for out, value in pairs)
        refused = converted and not _takes_results(op, form, given)
        if refused or not _fit(form, given, pairs):
            return NotImplemented  # eager's error is the host's
        _give(pairs)
        return _returned(form, outs, results)

    def _say_fallback(self, name: str, reason: str) -> None:
        if self.settings.log_fallback:
            logger.warning("%s runs on the CPU: %s", name, reason)
        if name not in self._said:
            self._said.add(name)
            message = f"{name} runs on the CPU, once for each call: {reason}"
            warnings.warn(FallbackWarning(message), stacklevel=4)

    def say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            say(line)

    def decomposition(self, op: OpOverload) -> Callable[..., Any] | None:
        """What the target decomposes `op` by, else PyTorch's own decomposition."""
        rule = decompositions(self.target).get(op)
        if rule is None and op in all_decompositions:
            rule = InDomain(op, all_decompositions[op])
        return rule

    def functional(self, op: OpOverload) -> Functional | None:
        """The functional overload behind `op`; None if there is none with the same arguments."""
        if op not in self._functional:
            self._functional[op] = functional_of(op)
        return self._functional[op]


def _returned(form: Functional, outs: Sequence[torch.Tensor], results: Sequence[Any]) -> Any:
    """What a call returns: its fresh results, else the tensors given for results."""
    if form.fresh:
        return tuple(results[: form.fresh])
    return outs[0] if len(outs) == 1 else tuple(outs)


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], given: Any) -> Any:
    """`given` with host tensors for device tensors, and the host for the device."""

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    return pytree.tree_map(one, given)


def _tensors(call: Call) -> list[torch.Tensor]:
    return [leaf for leaf in call.leaves()[0] if isinstance(leaf, torch.Tensor)]


def _fit(
    form: Functional,
    given: Mapping[str, Any],
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> bool:
    """Whether the results have the sizes of the tensors that are overwritten in place."""
    return all(out.shape == r.shape or not _in_place(form, given, out) for out, r in pairs)


def _in_place(form: Functional, given: Mapping[str, Any], out: torch.Tensor) -> bool:
    """Whether a given result is an operand, too: which of them eager resizes, the host knows."""
    operands = (value for name, value in given.items() if name not in form.outs)
    return not form.resizes or any(value is out for value in operands)


def _give(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each result to the tensor given for it, which is resized where its shape is another.

    Eager keeps the order in memory of the operands' dimensions.
    """
    for out, result in pairs:
        if out.shape != result.shape:
            strides = torch.empty_like(result, device="meta").stride()
            out.resize_(result.shape).as_strided_(result.shape, strides)
        out.copy_(result)


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _takes_results(op: OpOverload, form: Functional, given: Mapping[str, Any]) -> bool:
    """Whether an operator surely converts its results to the dtypes of the given ones.

    Pointwise ones do, unless eager refuses a single element. Others have rules of their own.
    """
    if torch.Tag.pointwise not in form.op.tags:
        return False
    given = with_tensors_for_numbers(op, given)
    if form.resizes:  # silently, where they are empty
        given |= {o: torch.empty(0, dtype=given[o].dtype, device="cpu") for o in form.outs}
    positional, named = pytree.tree_map(single_element, arguments_of(op, given))
    try:
        op(*positional, **named)
    except Exception:  # it is refused, or cannot be checked: the host does
        return False
    return True


def _laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size < 2 or a == b for size, a, b in pairs)


def device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device of the first device tensor among the arguments, else the device asked for."""
    asked = None
    for leaf in pytree.tree_leaves((list(args), dict(kwargs))):
        if isinstance(leaf, torch.Tensor) and true_device(leaf).type == DEVICE_TYPE:
            return true_device(leaf)
        if isinstance(leaf, torch.device) and leaf.type == DEVICE_TYPE:
            asked = leaf
    return asked


def _dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[Any, Any]:
    """`native_dropout`: the result and the mask of kept elements."""
    if not (train or train is None) or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p)
    return input * mask * (1.0 / (1.0 - p) if p < 1 else 0.0), mask


def _observed(
    observer: Observer,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[[], Any],
) -> Callable[[], Any]:
    return lambda: observer(op, args, kwargs, run)
