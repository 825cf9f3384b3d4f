"""How the arguments of a row are drawn: a function per kind of slot, from the values so far."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from dicp.fuzz.program import CALLS, OVERLAPS, Input, NumberInput, TensorInput, build_all

FLOATS = ("float32", "float32", "float32", "float32", "float32", "float64", "bfloat16", "float16")
INTEGERS = ("int64", "int64", "int32", "uint8", "int8", "int16")
NUMBERS = ("0", "1", "-1", "2", "0.5", "-2.5", "3", "0.1", "-0.75", "1e-3", "7")
EXPONENTS = ("0.5", "0.5", "-0.5", "-0.5", "0", "0.0", "1", "2", "2.0", "3", "-1", "-2", "1.5", "4")
LOWEST = ("-inf", "-inf", "-1e4", "-1e9", "torch.finfo(torch.float32).min", "0", "2.5")
"""What hidden scores are replaced by."""
LAYOUTS = ("transposed", "reversed", "sliced", "rows", "offset", "expanded", "expanded_last",
           "gaps")  # fmt: skip
IMAGE_LAYOUTS = ("channels_last", "gaps", "single_strides", "transposed")
"""Of tensors of rank 4 and 5."""
SIZES = (2, 3, 4, 5, 6, 7, 9, 16, 17, 33)
MAX_RANK = 5


class Undrawable(Exception):
    """The values so far have no argument for this slot."""


@dataclass(frozen=True)
class Choices:
    """What the programs of one batch have in common."""

    dynamic: bool = False
    grad: bool = False
    sizes: tuple[tuple[int, ...], ...] = ()
    """Sizes of dimensions, one per call."""
    numbers: bool = False
    """Python numbers change between the calls."""
    special: float = 0.04
    """The share of inputs that hold infinities, NaN, both zeros and the largest numbers."""
    shared: bool = False
    """Inputs share memory in some calls."""
    whole: float = 0.08
    """The share of integer and boolean tensors where an operator is written for floats."""


@dataclass
class Scope:
    """The values of a program while it is drawn: their tensors in each call, in eager and wide."""

    rng: random.Random
    choices: Choices
    values: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    wide: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    numbers: dict[str, NumberInput] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    exact: set[str] = field(default_factory=set)

    def shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(value.shape) for value in self.values[name])

    def dtype(self, name: str) -> torch.dtype:
        return self.values[name][0].dtype

    def rank(self, name: str) -> int:
        return self.values[name][0].ndim

    def new_tensor(
        self,
        shapes: Sequence[Sequence[int]],
        dtype: str,
        plain: bool = False,
        grad: bool = True,
        values: str = "",
    ) -> str:
        """A new input tensor; `plain`: contiguous or channels last, of ordinary values."""
        rng = self.rng
        is_float = dtype in FLOATS
        is_image = len(shapes[0]) in (4, 5)
        layout = "contiguous"
        if is_image and rng.random() < 0.35:
            layout = "channels_last" if plain else rng.choice(IMAGE_LAYOUTS)
        elif not plain and rng.random() > 0.6:
            layout = rng.choice(LAYOUTS)
        if not values:
            odd = self.choices.special
            values = "normal" if plain else rng.choices(
                ("normal", "grid", "special", "spiked", "zeros"),
                (0.74 - 2 * odd, 0.25, odd, odd, 0.01),
            )[0]  # fmt: skip
        each = TensorInput(
            f"x{len(self.inputs)}",
            dtype,
            tuple(map(tuple, shapes)),
            layout,
            values,
            rng.randrange(2**31),
            grad and self.choices.grad and is_float and rng.random() < 0.7,
        )
        self.inputs.append(each)
        self._build([each])
        return each.name

    def _build(self, inputs: Sequence[TensorInput]) -> None:
        for values, wide in ((self.values, False), (self.wide, True)):
            calls = [build_all(inputs, call, wide) for call in range(CALLS)]
            for each in inputs:
                tensors = [call[each.name] for call in calls]
                values[each.name] = [v for v in tensors if isinstance(v, torch.Tensor)]
        self.exact |= {each.name for each in inputs}

    def new_pair(self) -> None:
        """Two input tensors, the second one in the memory of the first in some call."""
        shapes = self.new_shapes(self.rng.choice((1, 1, 2, 2, 3)))
        dtype = self.rng.choice((*FLOATS, "int64"))
        for _ in range(2):
            self.new_tensor(shapes, dtype, plain=True)
        overlaps = ("separate",) * CALLS
        while set(overlaps) == {"separate"}:
            overlaps = tuple(self.rng.sample(("separate", "separate", *OVERLAPS), CALLS))
        base, other = (each for each in self.inputs[-2:] if isinstance(each, TensorInput))
        other = replace(other, base=base.name, overlaps=overlaps)
        self.inputs[-1] = other
        self._build([base, other])

    def new_number(self, numbers: Sequence[int | float]) -> str:
        each = NumberInput(f"i{len(self.inputs)}", tuple(numbers))
        self.inputs.append(each)
        self.numbers[each.name] = each
        return each.name

    def size(self) -> tuple[int, ...]:
        """A size in each call."""
        if self.choices.sizes and self.rng.random() < 0.9:
            return self.rng.choice(self.choices.sizes)
        if not self.choices.dynamic and self.rng.random() < 0.08:
            return (self.rng.choice((0, 1, 1)),) * CALLS
        return (self.rng.choice(SIZES),) * CALLS

    def new_shapes(self, rank: int) -> list[tuple[int, ...]]:
        sizes = [self.size() for _ in range(rank)]
        if rank > 3:  # keeps programs small
            sizes = [tuple(min(size, 6) for size in each) for each in sizes]
            sizes = [(1,) * CALLS if self.rng.random() < 0.12 else each for each in sizes]
        return [tuple(size[call] for size in sizes) for call in range(CALLS)]


@dataclass
class Draw:
    """The arguments of one statement while they are drawn."""

    scope: Scope
    exact: bool
    args: dict[str, str] = field(default_factory=dict)
    subject: str = ""

    @property
    def rng(self) -> random.Random:
        return self.scope.rng

    def fill(self, slot: str) -> None:
        """Draw the argument of `slot`. Raises Undrawable."""
        kind = slot.split("_")[0]
        kind = {"t_float": "tfloat", "t_float_b": "tfloat", "at_all": "atall"}.get(slot, kind)
        kind = {"perm_h": "permh"}.get(slot, kind)
        text = SLOTS[kind](self)
        self.args[slot] = text
        if not self.subject and text in self.scope.values:
            self.subject = text

    def usable(self, name: str) -> bool:
        return not self.exact or name in self.scope.exact

    def pick(self, allowed: Callable[[str], bool], make: Callable[[], str]) -> str:
        """A value that is allowed, recent ones more often, or a new input."""
        names = [n for n in self.scope.values if self.usable(n) and allowed(n)]
        if not names or self.rng.random() < 0.15:
            return make()
        # What takes one value twice says little: a mask chooses between equal values.
        if set(names) <= set(self.args.values()) and self.rng.random() < 0.8:
            return make()
        names = [n for n in names if n not in self.args.values()] or names
        computed = [name for name in names if name.startswith("v")]
        if computed and self.rng.random() < 0.7:
            return self.rng.choice(computed[-3:])
        return self.rng.choice(names)

    def of_subject(self) -> str:
        if not self.subject:
            raise Undrawable
        return self.subject

    def sizes_of(self, dim: int) -> list[int]:
        shapes = self.scope.shapes(self.of_subject())
        if not shapes[0]:
            raise Undrawable
        return [shape[dim] for shape in shapes]


def _typed(*groups: Sequence[str]) -> Callable[[Draw], str]:
    """A value, or a new input of up to four dimensions, of one of the dtypes."""
    dtypes = [dtype for group in groups for dtype in group]
    wanted = {getattr(torch, dtype) for dtype in dtypes}

    def draw(self: Draw) -> str:
        def make() -> str:
            rank = self.rng.choices((0, 1, 2, 3, 4), (4, 20, 45, 23, 8))[0]
            return self.scope.new_tensor(self.scope.new_shapes(rank), self.rng.choice(dtypes))

        return self.pick(lambda name: self.scope.dtype(name) in wanted, make)

    return draw


def _float(self: Draw) -> str:
    """A floating point value, or one of a dtype that most such operators convert."""
    whole = not self.exact and self.rng.random() < self.scope.choices.whole
    return (_typed(INTEGERS, ("bool",)) if whole else _typed(FLOATS))(self)


def _odd(self: Draw) -> str:
    """A new input of special numbers, or any floating point value."""
    if self.rng.random() < 0.3:
        return _typed(FLOATS)(self)
    shapes = self.scope.new_shapes(self.rng.choice((1, 2, 2, 3)))
    dtype = self.rng.choice(tuple(dict.fromkeys(FLOATS)))
    return self.scope.new_tensor(shapes, dtype, values="special")


def _ranked(rank: int) -> Callable[[Draw], str]:
    """A floating point value of a rank."""

    def draw(self: Draw) -> str:
        scope = self.scope

        def allowed(name: str) -> bool:
            return scope.dtype(name).is_floating_point and scope.rank(name) == rank

        def make() -> str:
            return scope.new_tensor(scope.new_shapes(rank), self.rng.choice(FLOATS))

        if self.subject and rank < 3:  # a second operand of the subject's dtype
            dtype = scope.dtype(self.subject)
            return self.pick(
                lambda name: scope.dtype(name) is dtype and scope.rank(name) == rank,
                lambda: scope.new_tensor(scope.new_shapes(rank), str(dtype)[6:]),
            )
        return self.pick(allowed, make)

    return draw


def _beside(dtypes: Sequence[str] = (), same_shape: bool = False) -> Callable[[Draw], str]:
    """A value that broadcasts with the subject, of one of the dtypes or of the subject's."""

    def draw(self: Draw) -> str:
        scope, subject = self.scope, self.of_subject()
        shapes = scope.shapes(subject)
        wanted = {getattr(torch, d) for d in dtypes} or {scope.dtype(subject)}

        def allowed(name: str) -> bool:
            if scope.dtype(name) not in wanted:
                return False
            others = scope.shapes(name)
            if same_shape:
                return others == shapes
            return all(map(_broadcasts, shapes, others))

        def make() -> str:
            mine = shapes if same_shape else _narrowed(self.rng, shapes)
            dtype = self.rng.choice(dtypes) if dtypes else str(scope.dtype(subject))[6:]
            return scope.new_tensor(mine, dtype)

        if not dtypes and not same_shape and self.rng.random() < 0.1:
            wanted |= {torch.float32, torch.int64, torch.bfloat16}
        return self.pick(allowed, make)

    return draw


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    pairs = zip(reversed(a), reversed(b), strict=False)
    return all(m == n or m == 1 or n == 1 for m, n in pairs)


def _narrowed(rng: random.Random, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Shapes that broadcast to `shapes`: without leading dimensions, or with some of size 1."""
    rank = len(shapes[0])
    if rng.random() < 0.6:
        return [tuple(shape) for shape in shapes]
    cut = rng.randint(0, rank)
    ones = {d for d in range(rank) if rng.random() < 0.3}
    return [tuple(1 if d in ones else shape[d] for d in range(cut, rank)) for shape in shapes]


def _formed(
    form: Callable[[Draw, tuple[int, ...]], tuple[int, ...]], dtype: str = "", grad: bool = True
) -> Callable[[Draw], str]:
    """A new input of a dtype, or of the subject's, whose shape follows from the subject's."""

    def draw(self: Draw) -> str:
        subject = self.of_subject()
        state = self.rng.getstate()
        shapes = []
        for shape in self.scope.shapes(subject):
            self.rng.setstate(state)  # the same choice for every call
            try:
                shapes.append(form(self, shape))
            except IndexError:
                raise Undrawable from None
        held = str(self.scope.dtype(subject))[6:]
        return self.scope.new_tensor(shapes, dtype or held, plain=True, grad=grad)

    return draw


def _index(
    form: Callable[[Draw, tuple[int, ...]], tuple[int, ...]], name: str
) -> Callable[[Draw], str]:
    """Indices into dimension `name` of the subject, as an expression that keeps them in range."""

    def draw(self: Draw) -> str:
        subject = self.of_subject()
        state = self.rng.getstate()
        shapes = []
        for shape in self.scope.shapes(subject):
            self.rng.setstate(state)
            shapes.append(form(self, shape))
        tensor = self.scope.new_tensor(shapes, "int64", plain=True)
        dim = "-1" if name == "last" else self.args.get(name, "0")
        size = f"{subject}.numel()" if name == "all" else f"{subject}.shape[{dim}]"
        negative = f" - {size}" if self.rng.random() < 0.2 else ""
        return f"({tensor} % {size}{negative})"

    return draw


def _dim(self: Draw) -> str:
    rank = self.scope.rank(self.of_subject())
    if rank == 0:
        return self.rng.choice(("0", "-1"))
    return str(self.rng.randrange(-rank, rank))


def _dims(self: Draw) -> str:
    rank = self.scope.rank(self.of_subject())
    dims = self.rng.sample(range(rank), self.rng.randint(min(1, rank), rank))
    return str(tuple(d - rank if self.rng.random() < 0.3 else d for d in dims))


def _number(low: int, high: int) -> Callable[[Draw], str]:
    """A whole number, or an argument that changes between the calls."""

    def draw(self: Draw) -> str:
        if self.scope.choices.numbers and self.rng.random() < 0.3:
            return self.scope.new_number([self.rng.randint(low, high) for _ in range(CALLS)])
        return str(self.rng.randint(low, high))

    return draw


def _chosen(texts: Sequence[str], share: float) -> Callable[[Draw], str]:
    """One of the numbers, or in a share of the cases an argument that changes between the calls."""

    def draw(self: Draw) -> str:
        if self.scope.choices.numbers and self.rng.random() < share:
            return self.scope.new_number([float(self.rng.choice(texts)) for _ in range(CALLS)])
        text = self.rng.choice(texts)
        return f"({text})" if text.startswith("-") else text

    return draw


def _bound(self: Draw) -> str:
    """An end of a slice, often out of range or of other sign in the second call."""
    sizes = self.sizes_of(0)
    low, high = -max(sizes) - 1, max(sizes) + 1
    if self.scope.choices.numbers and self.rng.random() < 0.5:
        return self.scope.new_number([self.rng.randint(low, high) for _ in range(CALLS)])
    return self.rng.choice((str(self.rng.randint(low, high)), f"{self.subject}.shape[0] // 2", "1"))


def _at(self: Draw) -> str:
    sizes = self.sizes_of(int(self.args.get("d", "0")))
    low = min(sizes)
    if low == 0:
        raise Undrawable
    if self.scope.choices.numbers and self.rng.random() < 0.5:
        return self.scope.new_number([self.rng.randrange(-low, low) for _ in range(CALLS)])
    return str(self.rng.randrange(-low, low))


def _view(self: Draw) -> str:
    """A shape for `reshape`: two neighbours merged, one split, or a new dimension."""
    subject = self.of_subject()
    rank = self.scope.rank(subject)
    dims = [f"{subject}.shape[{d}]" for d in range(rank)]
    how = self.rng.randrange(4)
    if how == 0 and rank > 1:
        d = self.rng.randrange(rank - 1)
        dims[d : d + 2] = ["-1"]
    elif how == 1 and rank:
        dims[self.rng.randrange(rank)] = "-1"
        dims.insert(self.rng.randint(0, rank), "1")
    elif how == 2 and rank:
        d = self.rng.randrange(rank)
        factor = self.rng.choice((2, 3))
        if any(size % factor for size in self.sizes_of(d)):
            raise Undrawable
        dims[d : d + 1] = self.rng.choice(((str(factor), "-1"), ("-1", str(factor))))
    else:
        dims = ["-1"]
    return f"({', '.join(dims)},)"


def _perm(self: Draw) -> str:
    rank = self.scope.rank(self.of_subject())
    return str(tuple(self.rng.sample(range(rank), rank)))


def _mask(self: Draw) -> str:
    """A boolean mask of the scores that rows of the subject have with each other."""
    subject, rng = self.of_subject(), self.rng
    size = f"{subject}.shape[-2]"
    ones = f"torch.ones({size}, {size}, dtype=torch.bool)"
    places = f"torch.arange({size})"
    how = rng.randrange(6)
    if how == 0:
        return f"{ones}.{rng.choice(('tril', 'triu'))}({rng.randint(-2, 2)})"
    if how == 1:
        return f"({places}[:, None] {rng.choice(('>=', '<', '>'))} {places})"
    if how == 2:
        return f"(({places}[:, None] - {places}).abs() <= {rng.randint(0, 2)})"
    if how == 3:  # keys that are no longer than they are padded
        return f"({places} < {size} - {rng.randint(0, 2)}).expand({size}, {size})"
    return self.scope.new_tensor(_score_shapes(self), "bool", plain=how == 4)


def _score_shapes(self: Draw) -> list[tuple[int, ...]]:
    """Shapes that broadcast to those of the scores, with all rows or one."""
    shapes = self.scope.shapes(self.subject)
    state = self.rng.getstate()
    found = []
    for shape in shapes:
        self.rng.setstate(state)
        leading = tuple(n if self.rng.random() < 0.5 else 1 for n in shape[:-2])
        rows = shape[-2] if self.rng.random() < 0.7 else 1
        found.append((*(leading if self.rng.random() < 0.6 else ()), rows, shape[-2]))
    return found


def _added_mask(self: Draw) -> str:
    """A mask that is added to the scores, of the subject's dtype."""
    subject, rng = self.of_subject(), self.rng
    size, dtype = f"{subject}.shape[-2]", f"{subject}.dtype"
    low = rng.choice(("-inf", f"torch.finfo({dtype}).min", "-1e4"))
    how = rng.randrange(4)
    if how == 0:
        fill = f"torch.full(({size}, {size}), {low}, dtype={dtype})"
        return f"{fill}.{rng.choice(('triu(1)', 'triu(0)', 'tril(-1)'))}"
    if how == 1:
        return f"torch.where({_mask(self)}, 0.0, {low}).to({dtype})"
    if how == 2:
        hidden = _mask(self)
        return f"torch.zeros({hidden}.shape, dtype={dtype}).masked_fill({hidden}, {low})"
    values = rng.choice(("added_infinity", "added_lowest"))
    held = str(self.scope.dtype(subject))[6:]
    return self.scope.new_tensor(_score_shapes(self), held, values=values)


def _with_unit_dimension(self: Draw) -> str:
    """The subject's shape with one more dimension where `unsqueeze` of dimension `d` put it."""
    subject = self.of_subject()
    rank = self.scope.rank(subject)
    place = int(self.args["d"]) % (rank + 1)
    dims = [f"{subject}.shape[{d}]" for d in range(rank)]
    dims.insert(place, str(self.rng.randint(1, 3)))
    return ", ".join(dims)


def _cast(dtypes: Sequence[str]) -> Callable[[Draw], str]:
    def draw(self: Draw) -> str:
        held = str(self.scope.dtype(self.subject))[6:] if self.subject else ""
        return f"torch.{self.rng.choice([d for d in dtypes if d != held])}"

    return draw


def _accumulate(self: Draw) -> str:
    dtype = self.scope.dtype(self.of_subject())
    if dtype.is_floating_point:
        return self.rng.choice(("torch.float32", "torch.float64"))
    return self.rng.choice(("torch.float32", "torch.float64"))


def _classes(self: Draw) -> str:
    return _index(lambda draw, shape: shape[:1], "classes")(self).replace(".shape[0]", ".shape[1]")


def _permutation_like(self: Draw) -> str:
    """Indices along dimension `d` that meet no place twice."""
    subject, dim = self.of_subject(), int(self.args["d"])
    rank = self.scope.rank(subject)
    if rank == 0:
        return f"torch.zeros({subject}.shape, dtype=torch.int64)"
    shape = ["1"] * rank
    shape[dim] = "-1"
    line = f"torch.arange({subject}.shape[{dim}]).flip(0).view({', '.join(shape)})"
    return f"{line}.expand({subject}.shape)"


def _with_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    if not shape:
        return (size,)
    return tuple(size if d == dim % len(shape) else n for d, n in enumerate(shape))


def _index_rows(self: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (4,)


SLOTS: dict[str, Callable[[Draw], str]] = {
    "x": _typed(FLOATS, FLOATS, INTEGERS, ("bool",)),
    "f": _float,
    "o": _odd,
    "f32": _typed(("float32",)),
    "k": _typed(INTEGERS),
    "b": _typed(("bool",)),
    "y": _beside(),
    "z": _beside(same_shape=True),
    "g": _beside(FLOATS),
    "j": _beside(INTEGERS),
    "m": _beside(("bool",)),
    "w": _beside(("bool",), same_shape=True),
    **{f"r{rank}": _ranked(rank) for rank in range(1, MAX_RANK + 1)},
    "d": _dim,
    "dd": _dims,
    "n": _number(-3, 3),
    "p": _number(1, 3),
    "zero1": _number(0, 1),
    "c": lambda self: self.rng.choice(("True", "False")),
    "s": _chosen(NUMBERS, 0.2),
    "q": _chosen(("0.5", "1.0", "2.0", "0.1", "1.5", "0.01"), 0.1),
    "e": _chosen(EXPONENTS, 0.3),
    "low": _chosen(LOWEST, 0.0),
    "mask": _mask,
    "bias": _added_mask,
    "t": _cast((*FLOATS, *INTEGERS, "bool")),
    "tfloat": _cast(FLOATS),
    "a": _accumulate,
    "lo": _bound,
    "hi": _bound,
    "at": _at,
    "view": _view,
    "perm": _perm,
    "reps": lambda self: str(
        tuple(self.rng.randint(1, 2) for _ in range(self.scope.rank(self.of_subject())))
    ),
    "up": _with_unit_dimension,
    "one": _formed(lambda self, shape: (1,)),
    "last": _formed(lambda self, shape: (shape[-1],)),
    "chan": _formed(lambda self, shape: (shape[1],)),
    "stat": _formed(lambda self, shape: (shape[1],), grad=False),
    "stat32": _formed(lambda self, shape: (shape[1],), "float32", grad=False),
    "count": _formed(lambda self, shape: (), "int64", grad=False),
    "lone64": _formed(lambda self, shape: (), "float64"),
    "lone16": _formed(lambda self, shape: (), "bfloat16"),
    "lonek": _formed(lambda self, shape: (), "int64"),
    "average": _formed(lambda self, shape: shape, grad=False),
    "mat": _formed(lambda self, shape: (shape[-1], 3)),
    "vec": _formed(lambda self, shape: (shape[-1],)),
    "weight": _formed(lambda self, shape: (5, shape[-1])),
    "conv1": _formed(lambda self, shape: (2, shape[1], 2)),
    "conv2": _formed(lambda self, shape: (3, shape[1], 2, 2)),
    "conv3": _formed(lambda self, shape: (2, shape[1], 2, 2, 2)),
    "deep2": _formed(lambda self, shape: (shape[1], 1, 3, 3)),
    "deep1": _formed(lambda self, shape: (shape[1], 1, 3)),
    "point2": _formed(lambda self, shape: (4, shape[1], 1, 1)),
    "unbatched2": _formed(lambda self, shape: (3, shape[0], 2, 2)),
    "i": _index(_index_rows, "i"),
    "il": _index(_index_rows, "last"),
    "h": _index(lambda self, shape: shape, "d"),
    "atall": _index(lambda self, shape: (3,), "all"),
    "permh": _permutation_like,
    "classes": _classes,
    "src": _formed(lambda self, shape: _with_size(shape, int(self.args["d"]), 4)),
    "src0": _formed(lambda self, shape: (4, *shape[1:])),
}
