"""A random program as plain data: it prints itself as Python source and is run from that source."""

from __future__ import annotations

import dataclasses
import linecache
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

NAME = re.compile(r"\b[ivx]\d+\b")
CALLS = 2
"""How often a program is called: the second time with other values, and other sizes if dynamic."""


@dataclass(frozen=True)
class TensorInput:
    """A tensor argument; its values follow from its name, `seed` and the number of the call."""

    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    layout: str = "contiguous"
    values: str = "normal"
    seed: int = 0
    grad: bool = False
    base: str = ""
    """The input in whose memory this one lies in the calls that `overlaps` names."""
    overlaps: tuple[str, ...] = ()

    def build(self, call: int, wide: bool = False) -> torch.Tensor:
        """The tensor of one call; `wide` gives a floating point one the same values in float64."""
        shape, dtype = self.shapes[call], getattr(torch, self.dtype)
        gen = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {call}".encode()))
        value = VALUES[self.values](shape, dtype, gen)
        if wide and dtype.is_floating_point:
            value = value.double()
        value = LAYOUTS[self.layout](value)
        return value.requires_grad_() if self.grad else value


@dataclass(frozen=True)
class NumberInput:
    """An int or float argument, one value per call."""

    name: str
    numbers: tuple[int | float, ...]

    def build(self, call: int, wide: bool = False) -> int | float:
        return self.numbers[call]


Input = TensorInput | NumberInput


@dataclass(frozen=True)
class Statement:
    """`targets = template.format(**args)`, inside `context` where that is not empty.

    The arguments are Python source. No targets: the statement changes a value in place. `wide` is
    the template in float64 where another is needed to keep the roundings of a cast.
    """

    template: str
    args: Mapping[str, str]
    targets: tuple[str, ...] = ()
    context: str = ""
    wide: str = ""

    def expression(self, wide: bool = False) -> str:
        return (wide and self.wide or self.template).format(**self.args)

    def uses(self) -> set[str]:
        return {name for text in self.args.values() for name in NAME.findall(text)}

    def line(self, wide: bool = False) -> str:
        left = f"{', '.join(self.targets)} = " if self.targets else ""
        text = left + self.expression(wide)
        return f"with {self.context}:\n        {text}" if self.context and not wide else text


@dataclass(frozen=True)
class Program:
    """Straight-line code over its inputs.

    parts: how many outputs each of the programs has that were merged into this one.
    """

    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    parts: tuple[int, ...] = ()

    def source(self, wide: bool = False, hooked: bool = False) -> str:
        """As a function; `hooked`: each tensor, inputs too, passes through `hook(name, value)`."""
        tensors = (each.name for each in self.inputs if isinstance(each, TensorInput))
        body = [f"{n} = hook({n!r}, {n})" for n in tensors if hooked]
        for statement in self.statements:
            body.append(statement.line(wide))
            body += [f"{n} = hook({n!r}, {n})" for n in statement.targets if hooked]
        body.append(f"return ({', '.join(self.outputs)},)")
        lines = "".join(f"\n    {line}" for line in body)
        return f"def program({', '.join(each.name for each in self.inputs)}):{lines}\n"

    def function(
        self, wide: bool = False, hook: Callable[[str, Any], Any] | None = None
    ) -> Callable[..., Any]:
        """The program as a function, whose source errors can show."""
        source = self.source(wide, hook is not None)
        name = f"<program {zlib.crc32(source.encode()):08x}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        namespace = {**names(), "hook": hook}
        exec(compile(source, name, "exec"), namespace)
        function: Callable[..., Any] = namespace["program"]
        return function

    def build(self, call: int, wide: bool = False) -> list[torch.Tensor | int | float]:
        """The arguments of one call."""
        return list(build_all(self.inputs, call, wide).values())

    def shares_memory(self) -> bool:
        """Whether inputs share memory in some call."""
        return any(isinstance(each, TensorInput) and each.overlaps for each in self.inputs)

    def pruned(self) -> Program:
        """Without inputs that nothing uses."""
        used = set(self.outputs).union(*(statement.uses() for statement in self.statements))
        return replace(self, inputs=tuple(each for each in self.inputs if each.name in used))

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Program:
        inputs = tuple(
            TensorInput(
                **{
                    **each,
                    "shapes": tuple(map(tuple, each["shapes"])),
                    "overlaps": tuple(each["overlaps"]),
                }
            )
            if "shapes" in each
            else NumberInput(each["name"], tuple(each["numbers"]))
            for each in plain["inputs"]
        )
        statements = tuple(
            Statement(**{**each, "targets": tuple(each["targets"])}) for each in plain["statements"]
        )
        return cls(inputs, statements, tuple(plain["outputs"]), tuple(plain.get("parts", ())))


def build_all(
    inputs: Iterable[Input], call: int, wide: bool = False
) -> dict[str, torch.Tensor | int | float]:
    """The arguments of one call by name, in one memory where inputs share it."""
    inputs = tuple(inputs)
    values = {each.name: each.build(call, wide) for each in inputs}
    for each in inputs:
        if not isinstance(each, TensorInput) or not each.overlaps or each.base not in values:
            continue
        base, other = values[each.base], values[each.name]
        assert isinstance(base, torch.Tensor) and isinstance(other, torch.Tensor)
        if (base.shape, base.dtype) == (other.shape, other.dtype):
            pair = _as_views(base, other, each.overlaps, call)
            values |= zip((each.base, each.name), pair, strict=True)
    return values


OVERLAPS = {"same": 0.0, "half": 0.5, "beside": 1.0}
"""Where an input begins in the memory of another one, in lengths of that one. In calls that are
"separate" it begins there in memory of its own."""


def _as_views(
    base: torch.Tensor, other: torch.Tensor, overlaps: Sequence[str], call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of one shape and dtype as views of one tensor, or each of one, in a call."""
    count = base.numel()
    is_shared = overlaps[call] in OVERLAPS
    start = next(OVERLAPS[each] for each in (overlaps[call], *overlaps) if each in OVERLAPS)
    offset = int(start * count)
    memory = torch.zeros(2 * count, dtype=base.dtype)
    second = memory[offset : offset + count].view(base.shape)
    second.copy_(other.detach())
    first = (memory if is_shared else memory.clone())[:count].view(base.shape)
    first.copy_(base.detach())
    return first.requires_grad_(base.requires_grad), second.requires_grad_(other.requires_grad)


def names() -> dict[str, Any]:
    """What the source of a program may name."""
    return {
        "torch": torch,
        "F": torch.nn.functional,
        "math": math,
        "nullcontext": nullcontext,
        "inf": math.inf,
        "nan": math.nan,
        "widened": widened,
        "rounded": rounded,
    }


def widened(value: Any) -> Any:
    """A floating point tensor, or each of several, in float64."""
    if isinstance(value, tuple | list):
        return tuple(widened(each) for each in value)
    is_float = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return value.double() if is_float else value


def rounded(value: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """A tensor converted to each dtype in turn, in float64; its gradient is not rounded."""
    narrow = value
    for dtype in dtypes:
        narrow = narrow.to(dtype)
    if not narrow.requires_grad:
        return widened(narrow)  # type: ignore[no-any-return]
    return _StraightThrough.apply(value, widened(narrow.detach()))  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    """The second operand, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        return narrow.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def merged(programs: Iterable[Program]) -> Program:
    """One program that does what all do, each with names of its own."""
    inputs: list[Input] = []
    statements: list[Statement] = []
    outputs: list[str] = []
    parts: list[int] = []
    for number, program in enumerate(programs):

        def rename(text: str, number: int = number) -> str:
            return NAME.sub(lambda found: f"{found.group()}{number:03d}", text)

        inputs += [_renamed(each, rename) for each in program.inputs]
        statements += [
            replace(
                each,
                args={key: rename(text) for key, text in each.args.items()},
                targets=tuple(map(rename, each.targets)),
            )
            for each in program.statements
        ]
        outputs += map(rename, program.outputs)
        parts.append(len(program.outputs))
    return Program(tuple(inputs), tuple(statements), tuple(outputs), tuple(parts))


def _renamed(each: Input, rename: Callable[[str], str]) -> Input:
    if isinstance(each, TensorInput):
        return replace(each, name=rename(each.name), base=rename(each.base))
    return replace(each, name=rename(each.name))


def _normal(shape: Sequence[int], dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    # In a fixed dtype: the default one, which other numbers come from, differs in float64 runs.
    if dtype is torch.bool:
        return torch.rand(shape, generator=gen, dtype=torch.float64) > 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)
    low = -9 if dtype.is_signed else 0
    return torch.randint(low, 10, shape, generator=gen).to(dtype)


def _grid(shape: Sequence[int], dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    """Multiples of 1/4, whose sums and products are exact; ties are frequent."""
    values = torch.randint(-12, 13, shape, generator=gen)
    return (values / 4).to(dtype) if dtype.is_floating_point else _normal(shape, dtype, gen)


def _drawn_from(
    numbers: Sequence[float], shape: Sequence[int], dtype: torch.dtype, gen: torch.Generator
) -> torch.Tensor:
    table = torch.tensor(numbers, dtype=torch.float64)
    return table[torch.randint(0, len(numbers), shape, generator=gen)].to(dtype)


def _special(shape: Sequence[int], dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return _normal(shape, dtype, gen)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        odd = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 60.0, -60.0, info.tiny, info.max, -info.max)
        return _drawn_from((*odd, math.inf, -math.inf, math.nan), shape, dtype, gen)
    whole = torch.iinfo(dtype)
    table = torch.tensor([0, 1, 2, whole.max, whole.min, whole.max - 1], dtype=dtype)
    return table[torch.randint(0, len(table), shape, generator=gen)]


def _with_special_numbers(
    shape: Sequence[int], dtype: torch.dtype, gen: torch.Generator
) -> torch.Tensor:
    """Ordinary numbers, and few that are infinite or none."""
    value = _normal(shape, dtype, gen)
    if not dtype.is_floating_point:
        return value
    odd = _drawn_from((math.inf, -math.inf, math.nan), shape, dtype, gen)
    return torch.where(torch.rand(shape, generator=gen, dtype=torch.float64) < 0.06, odd, value)


def _added(lowest: bool) -> Callable[..., torch.Tensor]:
    """A mask that is added to scores: -inf or the lowest number where they are hidden."""

    def draw(shape: Sequence[int], dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
        if not dtype.is_floating_point:
            return _normal(shape, dtype, gen)
        low = torch.finfo(dtype).min if lowest else -math.inf
        return _drawn_from((0.0, 0.0, 1.5, low), shape, dtype, gen)

    return draw


VALUES: dict[str, Callable[..., torch.Tensor]] = {
    "normal": _normal,
    "grid": _grid,
    "special": _special,
    "zeros": lambda shape, dtype, gen: torch.zeros(shape, dtype=dtype),
    "spiked": _with_special_numbers,
    "added_infinity": _added(lowest=False),
    "added_lowest": _added(lowest=True),
}


def _sliced(value: torch.Tensor) -> torch.Tensor:
    """Every other element of a longer last dimension, from an offset."""
    if value.ndim == 0:
        return value
    base = value.new_zeros((*value.shape[:-1], value.shape[-1] * 2 + 1))
    return base[..., 1::2].copy_(value)


def _offset(value: torch.Tensor) -> torch.Tensor:
    """Contiguous, from the second element of its storage."""
    return value.new_zeros(value.numel() + 1)[1:].view(value.shape).copy_(value)


def _rows(value: torch.Tensor) -> torch.Tensor:
    """Rows with gaps between them."""
    if value.ndim < 2:
        return value
    base = value.new_zeros((*value.shape[:-1], value.shape[-1] + 3))
    return base[..., : value.shape[-1]].copy_(value)


def _channels_last(value: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if value.ndim not in formats:
        return value
    return value.contiguous(memory_format=formats[value.ndim])


def _gaps(value: torch.Tensor) -> torch.Tensor:
    """Channels last, with gaps in every dimension."""
    base = _channels_last(value.new_zeros([2 * n for n in value.shape]))
    return base[tuple(slice(None, None, 2) for _ in value.shape)].copy_(value)


def _single_strides(value: torch.Tensor) -> torch.Tensor:
    """Channels last, but for strides of dimensions of size 1, which are no format's."""
    value = _channels_last(value)
    pairs = zip(value.shape, value.stride(), strict=True)
    return value.as_strided(value.shape, [1 if n == 1 else stride for n, stride in pairs])


def _backwards(value: torch.Tensor) -> list[int]:
    return list(reversed(range(value.ndim)))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda value: value,
    "transposed": lambda value: value.mT.contiguous().mT if value.ndim > 1 else value,
    "reversed": lambda value: (
        value.permute(_backwards(value)).contiguous().permute(_backwards(value))
    ),
    "sliced": _sliced,
    "rows": _rows,
    "offset": _offset,
    "expanded": lambda value: value[:1].expand(value.shape) if value.ndim else value,
    "expanded_last": lambda value: value[..., :1].expand(value.shape) if value.ndim else value,
    "channels_last": _channels_last,
    "gaps": _gaps,
    "single_strides": _single_strides,
}
