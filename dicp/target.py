"""The interface between shared code and a vendor: facts, decisions, and stages from graph to code.

A target states what it can do and provides `lower`, `render`, `build` and `load`. Shared code asks
for capabilities and never for names. Third parties register a class through the entry-point group
`dicp.targets`.
"""

from __future__ import annotations

import abc
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, get_origin, get_type_hints

import torch
from torch import fx

from dicp.cache import Cache
from dicp.config import OPTIONS, Config, Kind, Option
from dicp.discovery import discover, rivals
from dicp.errors import (
    ConfigValueError,
    InvalidTargetError,
    SimulatorWarning,
    TargetNotFoundError,
)
from dicp.fused_attention import FusedAttention
from dicp.origin import Origin
from dicp.outline import Outline
from dicp.rule_errors import definition_of, line_in, refusal, worded
from dicp.rules import DecisionKind, RuleTable
from dicp.torch_private import OpOverload

NO_RULE = "no rule for this operator"
"""Why an operator runs in eager for which the target has no rule."""


@dataclass(frozen=True)
class Decision:
    """How one graph node is executed: generated code, a library call, a view, or eager ATen."""

    kind: DecisionKind
    reason: str = ""


def unreadable(node: fx.Node) -> str:
    """Why kernels cannot read or write a node's tensors in memory; empty where they can.

    Eager calls handle sparse tensors, and the bits that mark a tensor as the negative or the
    conjugate of what its memory holds. Selecting one of several results reads nothing.
    """
    if node.target is operator.getitem:
        return ""
    for tensor in tensors_of(node):
        if tensor.layout != torch.strided:
            return "a tensor without strides"
        if tensor.is_neg() or tensor.is_conj():
            return "a tensor whose memory holds its negative or conjugate"
    return ""


@dataclass(frozen=True)
class Facts:
    """What a target's hardware and libraries can do; graph passes read these and nothing else."""

    dtypes: frozenset[torch.dtype]
    symbolic_shapes: bool = True
    """Whether programs take symbolic sizes; else each set of sizes gets a graph of its own."""
    keep: frozenset[Any] = frozenset()
    """ATen overloads that are not decomposed for the target."""
    in_float32: Mapping[Any, frozenset[torch.dtype]] = field(default_factory=dict)
    """ATen overloads that are computed in float32, and the dtypes of which their results are: those
    for which the target's library has no kernels."""
    narrow_rows: int = 0
    """Rows of a product with a column-major matrix, such as weights, up to which it stays in its
    dtype, as the conversion of the matrix would take longer."""
    fusions: frozenset[str] = frozenset()
    """Names of the graph-level pattern families the target wants."""
    fast_signed_int8: bool = False
    """Whether products of signed bytes take no longer than those of unsigned ones, to which 128 was
    added, with any number of rows; with one row they never do."""
    frozen_fusions: frozenset[str] = frozenset()
    """Families that pay off only with frozen parameters, whose arithmetic is then done once."""
    attention: Mapping[str, FusedAttention] = field(default_factory=dict)
    """The fused attention of the target's graphs, by type of the device that their tensors are on;
    attention on other devices stays unfused."""
    channels_last: frozenset[torch.dtype] = frozenset()
    """Dtypes whose 2-d convolutions want channels-last tensors; one makes all in its graph so."""
    channels_last_depthwise: frozenset[torch.dtype] = frozenset()
    """The same, of depthwise convolutions."""
    conv1d_as_conv2d: bool = False
    """Whether 1-d convolutions of these dtypes are computed as 2-d ones, of images of one row."""
    recomputes_operands: bool = False
    """Whether backward rematerializes elementwise results of other saved tensors even if a library
    call reads them: one more kernel, one saved tensor less. Results that elementwise operators
    alone read are rematerialized on every target."""

    def wants_channels_last(self, weight: torch.Tensor, groups: Any) -> bool:
        """Whether a convolution by `weight` makes the convolutions of its graph channels-last."""
        if is_depthwise(weight.shape, groups) and weight.dtype in self.channels_last_depthwise:
            return True
        return weight.dtype in self.channels_last

    def is_conv2d(self, weight: torch.Tensor, groups: Any) -> bool:
        """Whether a 1-d convolution by `weight` is computed as a 2-d one of channels-last images.

        Measured with the host's library: depthwise ones take 0.1 to 0.5 of the time (gradients of
        filters by our kernels), dense ones in bfloat16 0.6 to 0.9; those with other groups or a
        single channel up to 2.6.
        """
        if not (self.conv1d_as_conv2d and self.wants_channels_last(weight, groups)):
            return False
        channels = weight.shape[1]
        dense = groups == 1 and isinstance(channels, int) and channels > 1
        return dense or is_depthwise(weight.shape, groups)


def is_depthwise(filters: Sequence[Any], groups: Any) -> bool:
    """Whether each of a convolution's groups reads one channel; `filters`: their sizes."""
    return bool(filters[1] == 1 and groups != 1)


def options_of_one_row(
    stride: Any, padding: Any, dilation: Any, transposed: Any, output_padding: Any, groups: Any
) -> list[Any]:
    """A 1-d convolution's options for the 2-d one, of images of one row, that it is."""
    return [[1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups]


@dataclass(frozen=True)
class Check:
    """One line of `python -m dicp doctor`."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class NodeReport:
    """The decision on one operator of the graph, and its place in the user's program."""

    origin: Origin
    decision: DecisionKind
    reason: str

    @property
    def name(self) -> str:
        return self.origin.node

    @property
    def op(self) -> str:
        return self.origin.op

    @property
    def user_line(self) -> str:
        return self.origin.user_line


@dataclass(frozen=True)
class KernelReport:
    """One generated kernel: its name, the graph nodes it computes, and its loop program."""

    name: str
    origins: tuple[Origin, ...]
    describe: Callable[[], str] = field(default=str, repr=False, compare=False)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(map(str, self.origins))

    @property
    def text(self) -> str:
        return self.describe()


@dataclass(frozen=True)
class Source:
    """Generated source text: of each kernel (or graph) by name, and as files to read."""

    texts: Mapping[str, str]
    as_files: Callable[[], Mapping[str, str]] = field(repr=False)

    @property
    def files(self) -> Mapping[str, str]:
        return self.as_files()


@dataclass(frozen=True)
class LowerContext:
    """What lowering needs besides the graph."""

    config: Config
    kind: str
    static_inputs: frozenset[int] = frozenset()
    target: str = ""


class Program(Protocol):
    """A lowered graph: readable text and reports."""

    nodes: Sequence[NodeReport]

    def text(self) -> str: ...

    def kernels(self) -> Sequence[KernelReport]: ...


Executable = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Artifact:
    """A built program: everything `Target.load` needs, in this or another process.

    `program` and `units` hold what JSON can hold, and Origins.
    """

    target: str
    program: dict[str, Any]
    units: Mapping[str, Any] = field(default_factory=dict)
    objects: Sequence[Any] = ()
    """Objects that JSON cannot hold, such as subgraphs; with any, the artifact is not stored."""
    baked: Sequence[Origin] = ()
    """Origins whose user lines are compiled into the built code and cannot be changed there."""


class Target(abc.ABC):
    """A kind of hardware (or its simulator) that graphs are compiled for."""

    name: str
    device_type: str
    facts: Facts
    priority: int = 0
    """Of several targets for a device type, backend="dicp" takes the one of highest priority."""
    platform: str = ""
    """What flags of per-operator checks call the hardware (`--PLATFORM`); empty: they have none."""
    limits: Sequence[str] = ()
    """How the reasons begin for which calls stay eager that nothing of the vendor's could compute:
    its hardware lacks the dtype, or its library the operator."""
    chips: Sequence[str] = ()
    """What the chips are called that its programs run on, for the headings of tables."""
    options: Sequence[Option] = ()
    """Options of this target's own, made by `dicp.config.vendor_option`; their values are in
    `Config.vendor`."""
    _warned = False

    @abc.abstractmethod
    def decide(self, node: fx.Node) -> Decision:
        """Decide how `node`, whose `meta["val"]` is set, is executed."""

    def devices(self, config: Config) -> frozenset[str]:
        """The types of the devices, beside the host, whose tensors compiled graphs work on."""
        return frozenset({self.device_type})

    def rule_kind(self, op: Any) -> DecisionKind | None:
        """The decision on `op` if its arguments allow it; None if there is no rule."""
        return None

    @abc.abstractmethod
    def lower(self, gm: fx.GraphModule, context: LowerContext) -> Any:
        """Turn a functional ATen graph into a program."""

    def padding_refusal(self, gm: fx.GraphModule, context: LowerContext) -> str | None:
        """Why one program of a symbolic graph does not serve all sizes by padding inputs up to
        shape buckets; None if it does. Asked of targets without symbolic shapes."""
        return "the target pads no inputs"

    @abc.abstractmethod
    def render(self, program: Any, config: Config) -> Source:
        """Write the program's source text."""

    def prepare(self, gm: fx.GraphModule, train: bool, cache: Cache, config: Config) -> None:
        """Start in parallel to the front end those parts of `build` that Dynamo's graph `gm` needs.

        Nothing waits for it and nothing depends on it; `train`: gradients are needed too.
        """
        return None

    @abc.abstractmethod
    def build(self, program: Any, source: Source, cache: Cache, config: Config) -> Artifact:
        """Compile those parts of a program and its rendered source that the cache does not hold."""

    @abc.abstractmethod
    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        """Make a built program runnable in this process."""

    @abc.abstractmethod
    def fingerprint(self, config: Config) -> str:
        """Everything outside the graph that changes the code: toolchain, flags, versions."""

    def simulated(self, config: Config) -> bool:
        """Whether programs run on a simulator here, as `runs_on` and the machine have it."""
        return False

    def warn_of_simulator(self, what: str) -> None:
        """Warn, once in a process, that `what` stands in for the device."""
        if self._warned:
            return
        self._warned = True
        message = (
            f"{self.name}graph runs CPU tensors through {what}: "
            "its numerics count, its speed does not."
        )
        warnings.warn(SimulatorWarning(message), stacklevel=3)

    def outline(self, program: Any, sizes: Mapping[str, int]) -> Outline | None:
        """A program's steps, tensors and memory for these sizes of its symbols, for tools.

        None if the target gives none. Raises NameError for a size known only at run time.
        """
        return None

    def untimed(self, program: Any, config: Config) -> str:
        """Why times of the program's steps say nothing about the hardware; empty if they do."""
        return f"{self.name} runs on a simulator here" if self.simulated(config) else ""

    @abc.abstractmethod
    def doctor(self, config: Config) -> list[Check]:
        """Say what is present, what is missing and how to fix it."""


class RuleTarget(Target):
    """A target whose decisions follow from its rules, the dtypes it states and its device."""

    rules: RuleTable

    def decide(self, node: fx.Node) -> Decision:
        if computes_size(node):
            return Decision("view")
        if not isinstance(node.target, OpOverload):
            return Decision("eager", "not an ATen operator")
        kind = self.rules.kind(node.target)
        if kind is None:
            own = self.unsupported(node) if node.target.namespace == "dicp" else ""
            return Decision("eager", own or NO_RULE)
        reason = self.unsupported(node)
        return Decision("eager", reason) if reason else Decision(kind)

    def rule_kind(self, op: Any) -> DecisionKind | None:
        return self.rules.kind(op)

    def unsupported(self, node: fx.Node) -> str:
        """Why the target cannot take the node's tensors; empty where it can."""
        for tensor in tensors_of(node):
            if tensor.layout != torch.strided:
                return f"{tensor.layout} tensor"
            if tensor.dtype not in self.facts.dtypes:
                return f"dtype {tensor.dtype} is not generated for {self.name}"
        return ""


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The result and operand tensors of a node."""
    found: list[torch.Tensor] = []
    for item in [node, *node.all_input_nodes]:
        val = item.meta.get("val")
        values = val if isinstance(val, (tuple, list)) else [val]
        found += [v for v in values if isinstance(v, torch.Tensor)]
    return found


def is_number(value: Any) -> bool:
    """Whether the value of a node is one number, symbolic or known."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def computes_size(node: fx.Node) -> bool:
    """Whether a node is arithmetic on sizes, or selects one of several results (getitem)."""
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    return is_number(node.meta.get("val"))


@cache
def find_target(name: str) -> Target:
    """The target called `name`.

    Raises TargetNotFoundError, which lists the installed targets, and InvalidTargetError.
    """
    points = discover()
    if name not in points:
        raise TargetNotFoundError(name, sorted(points))
    point = points[name]
    if packages := rivals(name):
        problem = f"several packages register the name: {', '.join(packages)}"
        raise InvalidTargetError(name, point.value, [problem])
    try:
        target = point.load()()
    except Exception as error:
        place = line_in(error, point.module.partition(".")[0])
        problem = f"loading it raises {worded(error)}{place and f', at {place}'}"
        raise InvalidTargetError(name, point.value, [problem]) from error
    problems = list(_problems(target, name))
    if problems:
        raise InvalidTargetError(name, point.value, problems)
    return target


_EXPECTED: dict[str, type] = {
    "name": str, "device_type": str, "facts": Facts, "priority": int, "platform": str,
    "options": Sequence, "chips": Sequence,
}  # fmt: skip
_FACTS = get_type_hints(Facts)
_MEMBERS = {
    "dtypes": (torch.dtype, "torch.dtype"),
    "channels_last": (torch.dtype, "torch.dtype"),
    "channels_last_depthwise": (torch.dtype, "torch.dtype"),
    "keep": (OpOverload, "overloads such as torch.ops.aten.sqrt.default"),
    "fusions": (str, "names"),
    "frozen_fusions": (str, "names"),
    "attention": (FusedAttention, "dicp.fused_attention.FusedAttention"),
}
"""Fact -> the type of its members, and what a message calls it."""


def _problems(target: Any, name: str) -> Iterator[str]:
    """How an installed target violates the interface."""
    if not isinstance(target, Target):
        yield f"{type(target).__name__} is no dicp.target.Target"
        return
    expected = _EXPECTED | ({"rules": RuleTable} if isinstance(target, RuleTarget) else {})
    wrong = [a for a, kind in expected.items() if not isinstance(getattr(target, a, None), kind)]
    yield from (f"its {attribute} is not a {expected[attribute].__name__}" for attribute in wrong)
    yield from _problems_of_functions(type(target))
    if getattr(target, "name", name) != name:
        yield f"it calls itself {target.name!r}, unlike its entry point"
    if "facts" not in wrong:
        yield from _problems_of_facts(target.facts)
    if "options" not in wrong:
        yield from _problems_of_options(target.options)


def _problems_of_functions(kind: type) -> Iterator[str]:
    """Functions that do not take what shared code passes: the arguments of the class which is the
    first to declare them."""
    for name in dir(kind):
        own = inspect.getattr_static(kind, name)
        first = next(vars(base)[name] for base in reversed(kind.__mro__) if name in vars(base))
        if own is first or name.startswith("_") or not inspect.isfunction(first):
            continue
        declared = inspect.signature(first).parameters
        if not callable(own):
            yield f"its {name} is a {type(own).__name__}, not a function"
        elif why := inspect.isfunction(own) and refusal(own, declared):
            passed = ", ".join(list(declared)[1:])
            yield f"its {name}, at {definition_of(own)}, does not take ({passed}): {why}"


def _problems_of_facts(facts: Facts) -> Iterator[str]:
    for fact, hint in _FACTS.items():
        value, kind = getattr(facts, fact), get_origin(hint) or hint
        if not isinstance(value, kind):
            yield f"facts.{fact} is a {type(value).__name__}, not a {kind.__name__}"
        elif fact in _MEMBERS:
            member, described = _MEMBERS[fact]
            held = value.values() if isinstance(value, Mapping) else value
            if unknown := [str(v) for v in held if not isinstance(v, member)]:
                yield f"facts.{fact} holds {', '.join(unknown)}, not {described}"


def _problems_of_options(options: Sequence[Any]) -> Iterator[str]:
    taken = {word for option in OPTIONS for word in (option.name, *option.environment)}
    for option in options:
        if not isinstance(option, Option) or not isinstance(option.kind, Kind):
            yield f"option {option!r} is not made by dicp.config.vendor_option"
            continue
        own = {option.name, *option.environment}
        yield from (f"option {option.name!r}: {word!r} is another's" for word in own & taken)
        taken |= own
        try:
            option.parse(option.default, f"the default of option {option.name!r}")
        except ConfigValueError as error:
            yield str(error).rstrip(".")
