"""Building graph operators: typed constants and sizes in, checked and inferred values out.

Rules call a `Builder`; no rule formats text. Each operator is checked against its prototype when it
is built; its result's dtype and sizes are inferred by its semantics, run on fake tensors.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.dtypes import converted
from dicp.errors import PrototypeError, SemanticsError
from dicp.errors.text import meaning_at
from dicp.graphop.interpreter import Semantics
from dicp.graphop.program import Bound, Item, Node, Operand, Slot, Value
from dicp.graphop.prototype import Prototype, check_call
from dicp.origin import Origin
from dicp.rule_errors import definition_of, described, naming_semantics, refusal
from dicp.rules import NoRule
from dicp.torch_private import FakeTensorMode, ShapeEnv, expression_of, statically_known_true


@dataclass(frozen=True)
class Dialect:
    """A vendor's graph language: prototypes and semantics of its operators.

    Raises ValueError for operators without semantics, semantics without an operator, and those that
    take other inputs than the operator has or read one on the host which it lacks.
    """

    name: str
    prototypes: Mapping[str, Prototype]
    semantics: Semantics

    def __post_init__(self) -> None:
        if problems := "; ".join(self._problems()):
            raise ValueError(problems)

    def _problems(self) -> Iterator[str]:
        rows, meanings = self.prototypes.keys(), self.semantics.kinds()
        if missing := sorted(rows - meanings):
            yield f"{self.name} has no semantics for {', '.join(missing)}"
        if unknown := sorted(meanings - rows):
            yield f"{self.name} has semantics, but no prototype, for {', '.join(unknown)}"
        for kind in sorted(rows & meanings):
            prototype, meaning = self.prototypes[kind], self.semantics[kind]
            if unknown := sorted(meaning.host - {port.name for port in prototype.inputs}):
                yield f"{kind} has no input {', '.join(unknown)} to read on the host"
            every_call = [attr.name for attr in prototype.attrs if attr.default is None]
            others = [attr.name for attr in prototype.attrs if attr.default is not None]
            inputs = [port.name for port in prototype.inputs]
            if why := refusal(meaning.function, inputs, every_call, others):
                place = definition_of(meaning.function)
                yield f"the meaning of {kind} at {place}: {why} for {prototype.form()}"


class Builder(abc.ABC):
    """Appends nodes to one pool, in order of computation.

    While a rule runs, `meta` is the FakeTensor of the call's result, `sources` those of its
    arguments (None for an argument that is no tensor), and `is_read` tells whether the graph reads
    a result of an operator with several.
    """

    writes_over_inputs = False
    """Whether `in_place` handles results that overwrite an input; else they are copied
    afterwards."""
    bears_any_index = False
    """Whether operators neither read nor write outside of operands, whatever their indices are."""
    checks_indices = False
    """Whether the vendor's operators check indices themselves, and end the run with an error."""

    def __init__(self, dialect: Dialect, fake_mode: FakeTensorMode | None) -> None:
        self.dialect = dialect
        self.fake_mode = fake_mode or FakeTensorMode()
        self.nodes: list[Item] = []
        self.origin: Origin | None = None
        self.meta: Any = None
        self.sources: Sequence[torch.Tensor | None] = ()
        self.is_read: Callable[[int], bool] = lambda index: True
        self._constants: dict[Any, Value] = {}
        self._count = 0

    # ---- what a vendor adds ---------------------------------------------------------------------

    @abc.abstractmethod
    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        """`x` with its dimensions in `order`."""

    # ---- nodes ----------------------------------------------------------------------------------

    def op(self, kind: str, *operands: Operand | None, **attrs: Any) -> Value:
        """One operator with a single result; `operands` in the order of the prototype."""
        return self.ops(kind, *operands, **attrs)[0]

    def ops(self, kind: str, *operands: Operand | None, **attrs: Any) -> list[Value]:
        """One operator and all its results.

        Raises NoRule where the operator does not take these dtypes, PrototypeError where the rule
        violates the operator's prototype.
        """
        prototype = self.dialect.prototypes.get(kind)
        if prototype is None:
            raise PrototypeError(kind, f"{self.dialect.name} has no such operator")
        ports, named = prototype.inputs, {}
        for position, value in enumerate(operands):
            if value is not None and position >= len(ports):
                known = [port.name for port in ports]
                raise PrototypeError(kind, f"it has no operand {position + 1} but {known}")
            if value is not None:
                named[ports[position].name] = value
        attrs = {k: list(v) if isinstance(v, (tuple, list)) else v for k, v in attrs.items()}
        self._check_dtypes(prototype, named)
        check_call(prototype, {k: _dtypes(v) for k, v in named.items()}, attrs, str(self.origin))
        node = Node(self._name(kind), kind, named, attrs, self.origin)
        node.outputs += [Value(node, k, f) for k, f in enumerate(self.infer(node))]
        self.nodes.append(node)
        return node.outputs

    def _check_dtypes(self, prototype: Prototype, named: Mapping[str, Operand]) -> None:
        for port in prototype.inputs:
            operand = named.get(port.name, ())
            for value in [operand] if isinstance(operand, Value) else operand:
                if value.dtype not in port.dtypes:
                    name = str(value.dtype).removeprefix("torch.")
                    raise NoRule(f"{prototype.kind} does not take {name}")

    def infer(self, node: Node) -> list[torch.Tensor]:
        """The results of an operator on the fake tensors of its inputs."""
        prototype = self.dialect.prototypes[node.kind]
        meaning = self.dialect.semantics[node.kind]
        arguments: list[Any] = []
        for port in prototype.inputs:
            operand = node.inputs.get(port.name)
            if operand is None:
                arguments.append(None)
            elif not isinstance(operand, Value):
                arguments.append([v.fake for v in operand])
            elif port.name in meaning.host:
                arguments.append(_host_value(operand, node))
            else:
                arguments.append(operand.fake)
        with self.inferring():
            with naming_semantics(node.kind, meaning.function):
                result = meaning.function(*arguments, **node.attrs)
            results = result if isinstance(result, (tuple, list)) else [result]
            if problem := _fault(node, prototype, results):
                raise SemanticsError(node.kind, problem, definition_of(meaning.function))
            return [r.contiguous() for r in results]

    def meaning_of(self, value: Any) -> str:
        """The meaning of the operator that made a value, with its line; empty for other values."""
        kind = value.node.kind if isinstance(value, Value) else ""
        if kind not in self.dialect.semantics:
            return ""
        return meaning_at(kind, definition_of(self.dialect.semantics[kind].function))

    @contextlib.contextmanager
    def inferring(self) -> Iterator[None]:
        """Work on fake tensors, adding no guards to the user's program."""
        env = self.fake_mode.shape_env
        with self.fake_mode, torch.no_grad():
            with env.suppress_guards() if isinstance(env, ShapeEnv) else contextlib.nullcontext():
                yield

    def _leaf(self, kind: str, fake: torch.Tensor, known: Any, **attrs: Any) -> Value:
        node = Node(self._name(kind), kind, {}, attrs, None)
        node.outputs.append(Value(node, 0, fake, known))
        self.nodes.append(node)
        return node.outputs[0]

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind.lower()}_{self._count}"

    def fake(self, shape: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        """A row-major fake tensor."""
        with self.inferring():
            return torch.empty(tuple(shape), dtype=dtype)

    # ---- leaves ---------------------------------------------------------------------------------

    def const(self, content: Any, dtype: torch.dtype) -> Value:
        """A constant: a number, or a flat list of numbers, converted to `dtype`.

        Raises NoRule for a number whose conversion to this dtype is undefined.
        """
        shape = () if isinstance(content, (bool, int, float)) else (len(content),)
        given = (content,) if shape == () else tuple(content)
        numbers = tuple(converted(number, dtype) for number in given)
        if None in numbers:
            raise NoRule(f"the conversion of {content} to {dtype} is undefined")
        key = (dtype, shape, tuple((type(n), str(n)) for n in numbers))
        if key not in self._constants:
            known = given if all(isinstance(n, int) for n in given) else None
            self._constants[key] = self._leaf(
                "const", self.fake(shape, dtype), known, numbers=numbers
            )
        return self._constants[key]

    def ints(self, sizes: Sequence[Any], dtype: torch.dtype = torch.int64) -> Value:
        """A vector of integers, some of which may be symbolic: the host computes those at run
        time."""
        if all(isinstance(size, int) for size in sizes):
            return self.const([int(size) for size in sizes], dtype)
        key = ("sizes", dtype, tuple(_expression(size) for size in sizes))
        if key not in self._constants:
            fake = self.fake((len(sizes),), dtype)
            self._constants[key] = self._leaf("sizes", fake, tuple(sizes), sizes=tuple(sizes))
        return self._constants[key]

    def ints_input(self, numbers: Sequence[int]) -> Value:
        """Known numbers as an input from the host: a vendor's compiler may take no graph without an
        input."""
        return self._leaf("sizes", self.fake([len(numbers)], torch.int64), None,
                          sizes=tuple(numbers))  # fmt: skip

    def number(self, value: Any, dtype: torch.dtype) -> Value:
        """A 0-dim value: a number, or a symbolic number that the host computes."""
        if isinstance(value, (bool, int, float)):
            return self.const(value, dtype)
        key = ("sizes", dtype, _expression(value))
        if key not in self._constants:
            known = (value,) if isinstance(value, torch.SymInt) else None
            self._constants[key] = self._leaf("sizes", self.fake((), dtype), known, sizes=value)
        return self._constants[key]

    def seed(self) -> Value:
        """A random number that the host draws anew for every run: uint64, shape (1,)."""
        return self._leaf("seed", self.fake((1,), torch.uint64), None)

    def input(self, slot: Slot, order: Sequence[int]) -> Value:
        """A tensor from outside the graph, its dimensions in `order` (row-major in that order)."""
        fake = slot.fake
        shape = [fake.shape[d] for d in order]
        bound = Bound(slot, tuple(order))
        return self._leaf("input", self.fake(shape, fake.dtype), None, bound=bound)

    # ---- between graphs -------------------------------------------------------------------------

    def stored(self, value: Value) -> torch.Tensor:
        """A value as stored in memory: larger than its sizes where the vendor pads it."""
        return value.fake

    def received(self, value: Value, slot: Slot) -> Value:
        """`value`, left in `slot` by another graph, as an input; in the format it was left in."""
        bound = Bound(slot, tuple(range(slot.fake.dim())))
        leaf = self._leaf("input", value.fake, None, bound=bound)
        fmt = value.node.formats.get(str(value.index))
        leaf.node.formats = {} if fmt is None else {"0": fmt}
        return leaf

    # ---- questions about sizes ------------------------------------------------------------------

    def proves(self, relation: Any) -> bool:
        """Whether a relation between sizes holds whatever the symbols are; adds no guard."""
        return bool(statically_known_true(relation))

    def same(self, left: Any, right: Any) -> bool:
        """Two sizes that are equal whatever the symbols are; adds no guard."""
        return isinstance(left, int) and left == right or statically_known_true(left == right)

    def same_shape(self, left: Sequence[Any], right: Sequence[Any]) -> bool:
        return len(left) == len(right) and all(
            self.same(a, b) for a, b in zip(left, right, strict=True)
        )


def _fault(node: Node, prototype: Prototype, results: Sequence[Any]) -> str:
    """Why results are not those of an operator's outputs, by number or by dtype; empty if they
    are."""
    arities = [port.arity for port in prototype.outputs]
    many = "many" in arities
    counted = many or arities.count("one") <= len(results) <= len(arities)
    if not counted or not all(isinstance(result, torch.Tensor) for result in results):
        given = described(results[0] if len(results) == 1 else results)
        return f"returns {given} for {prototype.form()}"
    ports = prototype.outputs[:1] * len(results) if many else prototype.outputs
    for port, result in zip(ports, results, strict=False):
        leader = node.inputs.get(port.same_as)
        first = leader if isinstance(leader, Value) else next(iter(leader or ()), None)
        if first is not None and result.dtype != first.dtype:
            wanted = f"that of {port.same_as!r}, {first.dtype}"
            return f"returns {result.dtype} for {port.name!r}, whose dtype is {wanted}"
        if not port.same_as and result.dtype not in port.dtypes:
            return f"returns {result.dtype} for {port.name!r}, which does not have it"
    return ""


def _dtypes(operand: Operand) -> Any:
    return operand.dtype if isinstance(operand, Value) else [v.dtype for v in operand]


def _host_value(value: Value, node: Node) -> Any:
    if value.known is None:
        raise NoRule(f"{node.kind} needs sizes that are known before the run")
    return value.known[0] if value.ndim == 0 else list(value.known)


def _expression(size: Any) -> Any:
    found = expression_of(size)
    return found if found is not size else (type(size), size)
