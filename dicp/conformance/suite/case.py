"""One call of an operator: arguments that are described, drawn or given, and how it is judged.

All sources of cases make these: case files, PyTorch's operator database, stored reference data.
"""

from __future__ import annotations

import importlib
import inspect
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Generator, Size, Tensor

from dicp.errors import CaseError
from dicp.torch_private import OpOverload, pytree, schema_of

PLACES: Final = (
    "torch", "torch.Tensor", "torch.fft", "torch.linalg", "torch.nn.functional", "torch.ops.aten",
    "torch.ops.prims", "torch.special", "torchvision.ops", "dicp.conformance.suite.llama",
    *(f"torch.optim.{name}" for name in (
        "adadelta", "adagrad", "adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "rprop",
        "sgd",
    )),
)  # fmt: skip
"""Where the functions of cases are, which may come from anybody: operators, and nothing that reads
a file or runs code."""
_COMPOSED: Final = ("torch.functional", "torch._lowrank", "torch._lobpcg")
"""The modules of the operators in `torch` that are no ATen operators."""
ATEN: Final = "torch.ops.aten."
DATABASE_CALL: Final = "op_db:"
"""How the call of an operator begins that only PyTorch's operator database has as a function."""
_GENERATOR: Final = re.compile(r"(\w+)(?:\(([^()]*)\))?")
Draw = Callable[..., Tensor]


def _real(shape: Size, gen: Generator) -> Tensor:
    return torch.randn(shape, generator=gen, dtype=torch.float64)


def _uniform(shape: Size, gen: Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    return torch.rand(shape, generator=gen, dtype=torch.float64) * (high - low) + low


def _randint(shape: Size, gen: Generator, low: float = 0, high: float = 10) -> Tensor:
    return torch.randint(int(low), int(high), shape, generator=gen)


def _symmetric(shape: Size, gen: Generator) -> Tensor:
    drawn = _real(shape, gen)
    return (drawn + drawn.mT) / 2


def _positive_definite(shape: Size, gen: Generator) -> Tensor:
    drawn = _real(shape, gen)
    return drawn @ drawn.mT + shape[-1] * torch.eye(shape[-1], dtype=torch.float64)


def _permutation(shape: Size, gen: Generator) -> Tensor:
    rows = [torch.randperm(shape[-1], generator=gen) for _ in range(shape[:-1].numel())]
    return torch.stack(rows).reshape(shape)


def _boxes(shape: Size, gen: Generator, size: float = 16.0) -> Tensor:
    """Corners (x1, y1, x2, y2) of boxes inside of an image of `size` by `size`."""
    corner, extent = _uniform(Size((*shape[:-1], 2, 2)), gen).unbind(-2)
    start = corner * size * 0.6
    return torch.cat([start, start + extent * size * 0.35 + 0.5], -1)


def _regions(shape: Size, gen: Generator, size: float = 16.0, images: float = 1) -> Tensor:
    """Boxes, each behind the number of its image."""
    number = _randint(Size((*shape[:-1], 1)), gen, 0, images)
    return torch.cat([number, _boxes(shape, gen, size)], -1)


GENERATORS: Final[Mapping[str, Draw]] = {
    "randn": lambda shape, gen, scale=1.0: _real(shape, gen) * scale,
    "uniform": _uniform,
    "randint": _randint,
    "positive": lambda shape, gen: _real(shape, gen).abs() + 0.1,
    "probabilities": lambda shape, gen: _real(shape, gen).softmax(-1),
    "log_probabilities": lambda shape, gen: _real(shape, gen).log_softmax(-1),
    "mask": lambda shape, gen, share=0.5: _uniform(shape, gen) < share,
    "sym": _symmetric,
    "spd": _positive_definite,
    "perm": _permutation,
    "zeros": lambda shape, gen: torch.zeros(shape),
    "ones": lambda shape, gen: torch.ones(shape),
    "boxes": _boxes,
    "regions": _regions,
}
"""Name -> function of the shape, the generator and the numbers in parentheses. What they draw is
float64, integer or bool and is then cast to the operand's dtype."""


def check_generator(text: str) -> None:
    """Raises CaseError for a generator that is not one of GENERATORS with numbers."""
    _generator(text)


def _generator(text: str) -> tuple[Draw, list[float]]:
    found = _GENERATOR.fullmatch(text.replace(" ", ""))
    if found is None or found[1] not in GENERATORS:
        raise CaseError(text, "generator", GENERATORS)
    try:
        numbers = [float(part) for part in (found[2] or "").split(",") if part]
    except ValueError:
        raise CaseError(text, "generator", GENERATORS) from None
    return GENERATORS[found[1]], numbers


@dataclass(frozen=True)
class Operand:
    """A tensor of a case. Strides may be 0 and may leave gaps; None: contiguous.

    value: what it holds; without it, `gen` draws that.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    gen: str = "randn"
    grad: bool = False
    value: Tensor | None = field(default=None, compare=False, repr=False)

    def draw(self, generator: Generator) -> Tensor:
        """The tensor, on the host."""
        if self.value is not None:
            return self.value
        draw, numbers = _generator(self.gen)
        dtype: torch.dtype = getattr(torch, self.dtype)
        drawn = draw(Size(self.shape), generator, *numbers)
        if dtype.is_complex:
            drawn = torch.complex(drawn.double(), draw(Size(self.shape), generator, *numbers))
        drawn = drawn.to(dtype)
        return drawn if self.strides is None else strided(drawn, self.strides)

    def __str__(self) -> str:
        strides = "" if self.strides is None else f" strides {list(self.strides)}"
        return f"{self.dtype}{list(self.shape)}{strides}"


def strided(value: Tensor, strides: Sequence[int]) -> Tensor:
    """The values with other strides; along strides of 0, those at index 0."""
    room = value.new_zeros(span(value.shape, strides))
    firsts = tuple(slice(None) if stride else slice(0, 1) for stride in strides)
    shape = value[firsts].shape
    room.as_strided(shape, strides).copy_(value[firsts])
    return room.as_strided(value.shape, strides)


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory a tensor reaches over."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


@dataclass(frozen=True)
class Saved:
    """Arguments that are results of another call: name of the argument -> number of the result.

    That call takes those arguments of the case that `given` names.
    """

    call: str
    given: tuple[str, ...]
    results: Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """See the module. `args` and `kwargs` are trees of operands and plain values.

    call: a dotted name. inplace: it writes an operand. random: its results are compared by their
    distribution. reference: whether its results have values at all. tolerance: atol and rtol; None:
    those of the dtype. tags: domains, and models that call it so.
    """

    name: str
    key: str
    call: str
    dtype: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    inplace: bool = False
    random: bool = False
    reference: bool = True
    saved: Saved | None = None
    tolerance: tuple[float, float] | None = None
    tags: tuple[str, ...] = ()

    @property
    def operands(self) -> list[Operand]:
        """The tensors, in the order of the arguments."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Operand)]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by the names of the function's parameters, as far as these are known."""
        names = parameter_names(self.call, len(self.args), self.kwargs)
        return dict(zip(names, self.args, strict=False)) | dict(self.kwargs)

    @property
    def flags(self) -> list[bool]:
        """Which operands' gradients are compared."""
        return [operand.grad and not self.inplace for operand in self.operands]

    @property
    def seed(self) -> int:
        return zlib.crc32(f"{self.name} {self.key}".encode())

    def drawn(self) -> Case:
        """The case with the values of its operands, those of results of other calls included."""
        generator = Generator().manual_seed(self.seed)
        args, kwargs = pytree.tree_map(
            lambda leaf: (
                replace(leaf, value=leaf.draw(generator)) if isinstance(leaf, Operand) else leaf
            ),
            (self.args, dict(self.kwargs)),
        )
        if self.saved is not None:
            given = values((), {name: kwargs[name] for name in self.saved.given})[1]
            results = function(self.saved.call)(**given)
            for name, number in self.saved.results.items():
                kwargs[name] = given_operand(results[number])
        return replace(self, args=args, kwargs=kwargs, saved=None)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a drawn case."""
        return values(self.args, self.kwargs)

    def __str__(self) -> str:
        words = [*map(_shown, self.args), *(f"{k}={_shown(v)}" for k, v in self.kwargs.items())]
        return f"{self.call}({', '.join(words)})"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)


def given_operand(value: Tensor, grad: bool = False) -> Operand:
    """An operand that holds a tensor."""
    gapped = value.layout is torch.strided and not value.is_contiguous()
    strides = tuple(value.stride()) if gapped else None
    dtype = str(value.dtype).removeprefix("torch.")
    return Operand(tuple(value.shape), dtype, strides, "value", grad, value)


def values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.value if isinstance(leaf, Operand) else leaf, (args, dict(kwargs))
    )


def function(call: str) -> Callable[..., Any]:
    """The function of a dotted name, found by attributes alone.

    Raises CaseError if there is none, or if it is not in one of PLACES.
    """
    if call.startswith(DATABASE_CALL):
        from dicp.conformance.suite.database import database_function  # takes seconds

        return database_function(call.removeprefix(DATABASE_CALL))
    place = call.rpartition(".")[0]
    is_overload = place.startswith(ATEN)
    if is_overload:
        place = ATEN.removesuffix(".")
    found: Any = None
    for owner, name in _owners(call) if place in PLACES else ():
        found = getattr(owner, name, None) if owner is not None else None
    if (
        not callable(found)
        or (is_overload and not isinstance(found, OpOverload))
        or (place == "torch" and not _is_operator(found, call))
        or ".from_file" in call
    ):
        raise CaseError(call, "call", PLACES)
    return found  # type: ignore[no-any-return]


def _is_operator(found: Any, call: str) -> bool:
    """Whether a function of `torch` is an operator, and not torch.load or torch.compile."""
    name = call.rpartition(".")[2]
    of_aten = hasattr(torch.ops.aten, name) and name != "from_file"
    return of_aten or getattr(found, "__module__", "") in _COMPOSED


def parameter_names(call: str, positional: int = 0, keywords: Collection[str] = ()) -> list[str]:
    """The names of a function's parameters, from its signature or its schema; empty if unknown.

    positional, keywords: of a call, which choose among the overloads of an operator.
    """
    dotted = f"torch.{call.removeprefix(DATABASE_CALL)}" if DATABASE_CALL in call else call
    try:
        found = function(dotted)
        if (schema := schema_of(found)) is not None:
            return [argument.name for argument in schema.arguments]
        return list(inspect.signature(found).parameters)
    except CaseError:
        return []
    except ValueError:  # of a builtin
        packet = getattr(torch.ops.aten, dotted.rpartition(".")[2], None)
    for overload in packet.overloads() if packet else ():
        names = [argument.name for argument in schema_of(getattr(packet, overload)).arguments]
        fits = len(names) >= positional and {*keywords} <= {*names, "input"}
        if fits and "out" not in names:
            return names
    return []


def _owners(call: str) -> Iterator[tuple[Any, str]]:
    """The owners and the names of the attributes behind the longest part that is a module."""
    parts = call.split(".")
    owner: Any = None
    known = 0
    for count in range(1, len(parts)):
        try:
            owner, known = importlib.import_module(".".join(parts[:count])), count
        except (ImportError, RuntimeError):  # no module, or an extension of another release
            break
    for name in parts[known:]:
        yield owner, name
        owner = getattr(owner, name, None)
