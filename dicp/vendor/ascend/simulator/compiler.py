"""The simulator's graph compiler: a recorded graph, checked against the prototypes, made runnable.

What GE would refuse is refused here: operators, ports and attributes that do not exist, attributes
of another type or missing, dtypes and formats outside the prototype, shapes that do not fit.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.errors import PrototypeError
from dicp.graphop.interpreter import Call, Interpreter, Source
from dicp.graphop.prototype import Prototype, check_call
from dicp.graphop.simulator import Refused
from dicp.torch_private import FakeTensorMode
from dicp.vendor.ascend.blocked import BLOCKED, storage_dims
from dicp.vendor.ascend.formats import PLAIN, accepts, plain_format, produced_format
from dicp.vendor.ascend.prototypes import BY_NUMBER, FORMATS, PROTOTYPES
from dicp.vendor.ascend.semantics import SEMANTICS
from dicp.vendor.ascend.simulator.memory import Order

FORMAT_NAMES = {number: name for name, number in FORMATS.items()}

SHAPES = "input_shape"

CONSTANTS = frozenset({
    ("Conv2DBackpropInput", "input_size"), ("Conv2DBackpropFilter", "filter_size"),
    ("Conv3DBackpropInput", "input_size"), ("Conv3DBackpropFilter", "filter_size"),
})  # fmt: skip
"""Inputs that have to be constants."""

DTYPE_NUMBERS = frozenset({"dst_type"})
"""Attributes of type Int that hold the number of a dtype."""


@dataclass(frozen=True)
class Tensor:
    """What is known of a tensor while a graph is compiled; a dimension of -1 is not known."""

    dtype: torch.dtype
    dims: tuple[int, ...] | None
    format: str = "ND"


@dataclass
class Model:
    """A compiled graph: how to run it, and what it holds."""

    interpreter: Interpreter
    inputs: list[Tensor]
    outputs: list[Tensor]
    order: Order
    kinds: list[str] = field(default_factory=list)

    @property
    def is_dynamic(self) -> bool:
        """Whether sizes of its inputs change from run to run."""
        return any(-1 in (tensor.dims or ()) for tensor in self.inputs)

    def check_shared(self, given: int, made: int) -> None:
        """Raise Refused unless result `made` may go over input `given`: both have one buffer."""
        calls, outputs = self.interpreter.calls, self.interpreter.outputs
        data = (list(calls).index(given), 0)
        writer = self.order.memory(outputs[made])
        late = self.order.late_reader(data, writer[0]) or self.order.mixing(data, writer[0])
        if late is not None:
            raise Refused(f"output {made} goes over input {given}, which {late.name} still reads")


class Compiler:
    """Compiles one recorded graph."""

    def __init__(self, text: str, options: Mapping[str, str] | None = None) -> None:
        self.graph = json.loads(text)
        self.options = options
        """What the graph is built with; None where a built one is loaded."""
        self.types = {op["name"]: op["type"] for op in self.graph["ops"]}
        self.calls: list[Call | torch.Tensor | int] = []
        self.places: dict[str, int] = {}
        self.results: list[list[Tensor]] = []
        self.inputs: dict[int, Tensor] = {}
        self.kinds: list[str] = []
        self.references: set[int] = set()
        self.fake_mode = FakeTensorMode()

    def compile(self) -> Model:
        """Raises Refused."""
        self._check_ends()
        for op in self.graph["ops"]:
            place = len(self.calls)
            self._add(op)
            self.places[op["name"]] = place
        outputs: list[Source] = [
            (self.places[name], index)
            for name, indices in self.graph["outputs"]
            for index in indices
        ]
        count = len(self.graph["inputs"])
        if sorted(self.inputs) != list(range(count)):
            raise Refused(f"Data indices are {sorted(self.inputs)}, not those of {count} inputs")
        self._check_shapes()
        order = self._checked_order(outputs)
        return Model(
            Interpreter(self.calls, outputs),
            [self.inputs[k] for k in range(count)],
            [self._result(*source) for source in outputs],
            order,
            self.kinds,
        )

    def _check_ends(self) -> None:
        """Refused where GE would drop a result: it follows the inputs."""
        reached = set(self.graph["inputs"])
        if not reached:
            raise Refused("the graph has no inputs")
        for op in self.graph["ops"]:
            sources = {*op["controls"], *(source for _, _, source, _ in op["inputs"])}
            if not reached.isdisjoint(sources):
                reached.add(op["name"])
        for name, _ in self.graph["outputs"]:
            if name not in reached:
                raise Refused(f"{name} ({self.types[name]}): no path leads to it from an input")

    def _check_shapes(self) -> None:
        """Refused where inputs of changing sizes are not listed by the option for these."""
        names = [op["name"] for op in self.graph["ops"] if op["type"] in ("Data", "RefData")]
        changing = any(-1 in (tensor.dims or ()) for tensor in self.inputs.values())
        if self.options is None or not changing:
            return
        listed = [part.rpartition(":")[0] for part in self.options.get(SHAPES, "").split(";")]
        if set(listed) != set(names):
            raise Refused(f"option {SHAPES} lists {listed}, the inputs are {names}")

    def _checked_order(self, outputs: Sequence[Source]) -> Order:
        """The order of reads and writes; Refused where a write may come before a read."""
        controls = {
            self.places[op["name"]]: [self.places[name] for name in op["controls"]]
            for op in self.graph["ops"]
        }
        order = Order(self.calls, controls)
        for place, call in enumerate(self.calls):
            for port in call.prototype.written if isinstance(call, Call) else ():
                self._check_write(order, place, port, outputs)
        return order

    def _check_write(self, order: Order, place: int, port: int, outputs: Sequence[Source]) -> None:
        """Refused unless the operator may write over what it is given at this port."""
        call = self.calls[place]
        assert isinstance(call, Call)
        where, name = f"{call.name} ({call.prototype.kind})", call.prototype.inputs[port].name
        source = call.sources[port]
        assert isinstance(source, tuple)
        memory = order.memory(source)
        owner = self.calls[memory[0]]
        # A copy may be written over too, by an operator that has other results.
        temporary = isinstance(owner, Call) and not call.prototype.only_writes
        handed_on = isinstance(owner, Call) and bool(owner.prototype.written)
        if memory[0] not in self.references and not handed_on and not temporary:
            raise Refused(f"{where}: {name!r} is neither a RefData nor handed on from one")
        late = order.late_reader(memory, place)
        if late is not None:
            raise Refused(f"{where}: {late.name} reads {name!r} and may run later")
        if any(value in outputs for value in order.shown(memory)):
            raise Refused(f"{where}: the graph returns {name!r} as it was")

    def _result(self, place: int, index: int) -> Tensor:
        return self.results[place][index]

    def _add(self, op: Mapping[str, Any]) -> None:
        kind = op["type"]
        for _, _, desc in op["descs"]:
            _check_storage(op, desc)
        attrs = {name: _attr_value(type_, value) for name, type_, value in op["attrs"]}
        if kind == "RefData":
            self.references.add(len(self.calls))
        if kind in ("Data", "RefData"):
            tensor = _described(op)
            index = attrs.get("index", 0)
            self.inputs[index] = tensor
            self.calls.append(index)
            self.results.append([tensor])
        elif kind == "Const":
            if "value" not in attrs:
                raise Refused(f"{op['name']} (Const): attribute 'value' is missing")
            self.calls.append(attrs["value"])
            self.results.append([Tensor(attrs["value"].dtype, tuple(attrs["value"].shape))])
        else:
            self._add_operator(op, attrs)

    def _add_operator(self, op: Mapping[str, Any], attrs: dict[str, Any]) -> None:
        kind, where = op["type"], op["name"]
        prototype = PROTOTYPES.get(kind)
        if prototype is None:
            raise Refused(f"{where}: there is no operator {kind!r}")
        ports = self._ports(op, prototype)
        try:
            check_call(prototype, {k: self._dtypes(v) for k, v in ports.items()}, attrs)
        except PrototypeError as error:
            raise Refused(f"{where} ({kind}): {error.detail}") from error
        self._check_types(op, prototype)
        for name in DTYPE_NUMBERS & attrs.keys():
            if attrs[name] not in BY_NUMBER:
                raise Refused(f"{where} ({kind}): attribute {name!r} is {attrs[name]}, no dtype")
            attrs[name] = BY_NUMBER[attrs[name]]
        self._check_formats(op, prototype, ports)
        sources = tuple(ports.get(port.name) for port in prototype.inputs)
        call = Call(where, prototype, SEMANTICS[kind], sources, attrs)
        self.calls.append(call)
        self.kinds.append(kind)
        self.results.append(self._infer(op, call))

    def _ports(self, op: Mapping[str, Any], prototype: Prototype) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for port, index, source, output in op["inputs"]:
            place = (self.places[source], self._output(source, output))
            if index < 0:
                found[port] = place
            else:
                found.setdefault(port, []).append(place)
        for direction, port, count in op["counts"]:
            if direction == "input" and len(found.get(port, [])) != count:
                raise Refused(
                    f"{op['name']} ({prototype.kind}): input {port!r} was declared with {count} "
                    f"tensors and has {len(found.get(port, []))}"
                )
        return found

    def _output(self, source: str, output: str) -> int:
        kind = self.types[source]
        if not output:
            return 0
        ports = PROTOTYPES[kind].outputs if kind in PROTOTYPES else ()
        for index, port in enumerate(ports):
            if port.name == output:
                return index
            if port.arity == "many" and output.removeprefix(port.name).isdigit():
                return int(output.removeprefix(port.name))
        raise Refused(f"{source} ({kind}): it has no output {output!r}")

    def _dtypes(self, port: Any) -> Any:
        if isinstance(port, list):
            return [self._result(*source).dtype for source in port]
        return self._result(*port).dtype

    def _check_types(self, op: Mapping[str, Any], prototype: Prototype) -> None:
        for name, given, _ in op["attrs"]:
            spec = prototype.attr(name)
            assert spec is not None
            if spec.type != given and (spec.type, given) != ("Int", "Type"):
                raise Refused(
                    f"{op['name']} ({prototype.kind}): attribute {name!r} is given as {given}, "
                    f"the prototype says {spec.type}"
                )

    def _check_formats(
        self, op: Mapping[str, Any], prototype: Prototype, ports: Mapping[str, Any]
    ) -> None:
        declared = {
            port: FORMAT_NAMES[desc["format"]]
            for direction, port, desc in op["descs"] if direction == "input"
        }  # fmt: skip
        for port in prototype.inputs:
            given = ports.get(port.name)
            for source in given if isinstance(given, list) else [given] if given else []:
                made = self._result(*source)
                fmt = declared.get(port.name, made.format) if made.format in PLAIN else made.format
                rank = len(made.dims or ())
                if fmt == "ND" and plain_format(prototype.kind, port.name, rank) != "ND":
                    raise Refused(
                        f"{op['name']} ({prototype.kind}): input {port.name!r} is an image or a "
                        "filter, and its format is ND"
                    )
                if not accepts(prototype.kind, port.name, fmt):
                    raise Refused(
                        f"{op['name']} ({prototype.kind}): input {port.name!r} does not take "
                        f"format {fmt}"
                    )

    def _infer(self, op: Mapping[str, Any], call: Call) -> list[Tensor]:
        """Result types: from fake tensors where every dimension is known."""
        sources = [s for s in call.sources if s is not None]
        flat = [s for source in sources for s in (source if isinstance(source, list) else [source])]
        known = [self._result(*s) for s in flat]
        outputs = call.prototype.outputs
        formats = {0: produced_format(call.prototype.kind, [t.format for t in known])}
        formats |= _declared_formats(op, outputs)
        found = self._run_fake(call) if all(_is_static(t) for t in known) else None
        if found is None:
            declared = _declared_dims(op, outputs)
            return [
                Tensor(_declared_dtype(call, k, known), declared.get(k), formats.get(k, "ND"))
                for k in range(64 if outputs[0].arity == "many" else len(outputs))
            ]
        return [Tensor(f.dtype, tuple(f.shape), formats.get(k, "ND")) for k, f in enumerate(found)]

    def _run_fake(self, call: Call) -> list[torch.Tensor] | None:
        """The call on fake tensors; None where it needs numbers of this run."""
        arguments: list[Any] = []
        for port, source in zip(call.prototype.inputs, call.sources, strict=True):
            if source is None:
                arguments.append(None)
            elif isinstance(source, list):
                arguments.append([self._fake(s) for s in source])
            elif port.name in call.meaning.host:
                constant = self.calls[source[0]]
                if not isinstance(constant, torch.Tensor):
                    if (call.prototype.kind, port.name) in CONSTANTS:
                        raise Refused(f"{call.name} ({call.prototype.kind}): {port.name!r} is no "
                                      "constant")  # fmt: skip
                    return None
                arguments.append(constant.tolist())
            else:
                arguments.append(self._fake(source))
        try:
            with self.fake_mode, torch.no_grad():
                result = call.meaning.function(*arguments, **call.attrs)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise Refused(f"{call.name} ({call.prototype.kind}): {error}") from error
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def _fake(self, source: Source) -> torch.Tensor:
        tensor = self._result(*source)
        with self.fake_mode:
            return torch.empty(tensor.dims or (), dtype=tensor.dtype)


def _is_static(tensor: Tensor) -> bool:
    return tensor.dims is not None and -1 not in tensor.dims


def _declared_dtype(call: Call, index: int, known: Sequence[Tensor]) -> torch.dtype:
    """The dtype of a result whose shape is not known before the run, from the prototype."""
    outputs = call.prototype.outputs
    port = outputs[min(index, len(outputs) - 1)]
    for name in ("dst_type", "type", "dtype"):
        if name in call.attrs:
            return call.attrs[name]  # type: ignore[no-any-return]
    if port.same_as:
        names = [p.name for p in call.prototype.inputs]
        given = [s for s in call.sources if s is not None]
        position = sum(s is not None for s in call.sources[: names.index(port.same_as)])
        before = sum(len(s) if isinstance(s, list) else 1 for s in given[:position])
        return known[before].dtype
    if len(port.dtypes) == 1:
        return next(iter(port.dtypes))
    return torch.int64


def _declared_formats(op: Mapping[str, Any], outputs: Sequence[Any]) -> dict[int, str]:
    names = [port.name for port in outputs]
    return {
        names.index(port): FORMAT_NAMES[desc["format"]]
        for direction, port, desc in op["descs"]
        if direction == "output" and port in names
    }


def _declared_dims(op: Mapping[str, Any], outputs: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """The plain sizes of the outputs that the graph describes."""
    names = [port.name for port in outputs]
    return {
        names.index(port): tuple(desc["origin"])
        for direction, port, desc in op["descs"]
        if direction == "output" and port in names
    }


def _check_storage(op: Mapping[str, Any], desc: Mapping[str, Any]) -> None:
    """Raises Refused where a blocked tensor is described with another storage than it has."""
    fmt = FORMAT_NAMES[desc["format"]]
    if fmt not in BLOCKED:
        return
    try:
        stored = [d if d > 0 else -1 for d in storage_dims(fmt, desc["origin"])]
    except ValueError as error:
        raise Refused(f"{op['name']} ({op['type']}): {fmt} of {desc['origin']}") from error
    given = [d if s > 0 else s for d, s in zip(desc["dims"], stored, strict=False)]
    if len(desc["dims"]) != len(stored) or given != stored:
        raise Refused(
            f"{op['name']} ({op['type']}): {fmt} of {desc['origin']} is stored as {stored}, not "
            f"as {desc['dims']}"
        )


def _described(op: Mapping[str, Any]) -> Tensor:
    """What a Data operator was told of its tensor."""
    for direction, port, desc in reversed(op["descs"]):
        if (direction, port) == ("output", "y"):
            fmt = FORMAT_NAMES[desc["format"]]
            return Tensor(BY_NUMBER[desc["dtype"]], tuple(desc["origin"]), fmt)
    raise Refused(f"{op['name']} (Data): its output has no description")


def _shortest(text: str) -> float:
    """The number a source wrote as this float32: the shortest decimal that is rounded to it.

    Eager computes with the number as it was written, and 1e-5 as a float32 is another one.
    """
    value = float.fromhex(text)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((c for c in candidates if ctypes.c_float(c).value == value), value)


def _attr_value(type_: str, value: Any) -> Any:
    match type_:
        case "Float":
            return _shortest(value)
        case "ListFloat":
            return [_shortest(v) for v in value]
        case "Type":
            return BY_NUMBER[value]
        case "Tensor":
            dtype = BY_NUMBER[value["desc"]["dtype"]]
            data = bytearray(bytes.fromhex(value["data"]))
            dims = value["desc"]["dims"]
            if not data:
                return torch.empty(dims, dtype=dtype)
            return torch.frombuffer(data, dtype=dtype).reshape(dims)
    return value
