"""Index expressions: affine in loop variables, with floor division, modulo and indirect atoms.

An `Index` is `const + sum(coefficient * atom)`. Coefficients and sizes are Python integers, or
sympy expressions over ShapeEnv's symbols when a dimension is dynamic. Keeping the affine form
explicit makes substitution and stride extraction dictionary lookups rather than symbolic algebra.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import sympy

Size: TypeAlias = int | sympy.Expr


@lru_cache(maxsize=65536)
def _expand(value: sympy.Expr) -> Size:
    value = sympy.expand(value)
    return int(value) if value.is_Integer else value


def normal(value: Any) -> Size:
    """`value` as a Python int where it is one, else as an expanded sympy expression."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, int)):
        return int(value)
    return _expand(sympy.sympify(value))


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return normal(result)


def is_positive(value: Size) -> bool:
    """Whether `value` is provably greater than zero for every value its symbols may take."""
    if isinstance(value, int):
        return value > 0
    return bool(value.is_positive) or bool(_minimum(value) > 0)


def is_nonnegative(value: Size) -> bool:
    """Whether `value` is provably zero or more for every value its symbols may take."""
    if isinstance(value, int):
        return value >= 0
    return bool(_minimum(value) >= 0) or bool(value.is_nonnegative)


@lru_cache(maxsize=65536)
def _minimum(value: sympy.Expr) -> Any:
    """A lower bound of `value`, from the signs of its symbols."""
    distances = {s: _distance(s) for s in value.free_symbols}
    if any(d is None for d in distances.values()):
        return -sympy.oo
    moved = sympy.expand(value.subs(distances))
    if not moved.is_polynomial(*moved.free_symbols):
        return -sympy.oo
    constant, rest = moved.as_coeff_Add()
    nonnegative = all(term.as_coeff_Mul()[0] >= 0 for term in sympy.Add.make_args(rest))
    return constant if nonnegative else -sympy.oo


def _distance(symbol: sympy.Symbol) -> sympy.Expr | None:
    """`symbol` as its bound plus or minus a nonnegative distance; None if it has no bound."""
    distance = sympy.Symbol(f"_{symbol}", integer=True, nonnegative=True)
    if symbol.is_positive:
        return distance + 1
    if symbol.is_nonnegative:
        return distance
    if symbol.is_negative:
        return -distance - 1
    return -distance if symbol.is_nonpositive else None


def quotient(value: Size, divisor: Size) -> Size | None:
    """`value / divisor` where the division is provably exact, else None."""
    if isinstance(value, int) and isinstance(divisor, int):
        return value // divisor if divisor and value % divisor == 0 else None
    return _symbolic_quotient(sympy.sympify(value), sympy.sympify(divisor))


@lru_cache(maxsize=65536)
def _symbolic_quotient(value: sympy.Expr, divisor: sympy.Expr) -> Size | None:
    if value == 0:
        return 0
    # An integer function of symbols, such as a floor division, is a symbol to the polynomials.
    functions = value.atoms(sympy.Function) | divisor.atoms(sympy.Function)
    symbols = {f: sympy.Dummy(integer=True) for f in functions if f.is_integer}
    ratio = sympy.cancel(value.xreplace(symbols) / divisor.xreplace(symbols))
    free = ratio.free_symbols
    if sympy.fraction(ratio)[1] != 1 or not ratio.is_polynomial(*free):
        return None
    coefficients = sympy.Poly(ratio, *free).coeffs() if free else [ratio]
    if not all(c.is_Integer for c in coefficients):
        return None
    return normal(ratio.xreplace({symbol: f for f, symbol in symbols.items()}))


@dataclass(frozen=True, slots=True)
class Var:
    """A loop variable: `position` in its domain, running over 0 .. size-1."""

    position: int
    size: Size

    @property
    def key(self) -> str:
        return f"v{self.position}"


class _Computed:
    """An atom that is computed from other indices or expressions."""

    __slots__ = ()

    @property
    def key(self: Any) -> str:
        return _atom_text(self, _key_of)


@dataclass(frozen=True, slots=True)
class FloorDiv(_Computed):
    value: Index
    divisor: Size


@dataclass(frozen=True, slots=True)
class Mod(_Computed):
    value: Index
    divisor: Size


@dataclass(frozen=True, slots=True)
class Indirect(_Computed):
    """A coordinate read from memory or computed: `expr` is an integer expression."""

    expr: Any
    size: Size


Atom: TypeAlias = Var | FloorDiv | Mod | Indirect


@dataclass(frozen=True, slots=True)
class Index:
    """`const + sum(coefficient * atom)`, terms sorted by atom."""

    const: Size
    terms: tuple[tuple[Atom, Size], ...] = ()

    def __add__(self, other: Index | Size) -> Index:
        if isinstance(other, Index):
            return combine([(self, 1), (other, 1)])
        return Index(normal(self.const + other), self.terms)

    def __mul__(self, factor: Size) -> Index:
        if isinstance(factor, int):
            if factor == 1:
                return self
            if factor == 0:
                return ZERO
        return Index(
            normal(self.const * factor), tuple((a, normal(c * factor)) for a, c in self.terms)
        )

    def __str__(self) -> str:
        return index_text(self, _key_of)

    def coefficient(self, atom: Atom) -> Size:
        return next((c for a, c in self.terms if a == atom), 0)

    def without(self, *atoms: Atom) -> Index:
        """This index without the terms of `atoms`."""
        return Index(self.const, tuple(t for t in self.terms if t[0] not in atoms))

    @property
    def is_affine(self) -> bool:
        """Whether every atom is a plain loop variable."""
        return all(isinstance(a, Var) for a, _ in self.terms)

    def substitute(self, mapping: Mapping[Var, Index], indirect: Any = None) -> Index:
        """This index with each loop variable replaced; `indirect` rewrites indirect expressions."""
        if not self.terms:
            return self
        if len(self.terms) == 1:  # most coordinates
            ((atom, c),) = self.terms
            found = _substitute_atom(atom, mapping, indirect) * c
            return found if self.const == 0 else found + self.const
        return combine(
            [(Index(self.const), 1)]
            + [(_substitute_atom(a, mapping, indirect), c) for a, c in self.terms]
        )

    def variables(self) -> set[Var]:
        """The loop variables that occur, those inside indirect expressions left out."""
        found: set[Var] = set()
        for atom, _ in self.terms:
            if isinstance(atom, Var):
                found.add(atom)
            elif isinstance(atom, (FloorDiv, Mod)):
                found |= atom.value.variables()
        return found

    def maximum(self) -> Size | None:
        """The largest value taken, where every coefficient is provably non-negative."""
        total = self.const
        for atom, c in self.terms:
            if not is_nonnegative(c):
                return None
            bound = _atom_maximum(atom)
            if bound is None:
                return None
            total = total + c * bound
        return normal(total)


ZERO = Index(0)


def index_text(index: Index, name: Callable[[Any], str]) -> str:
    """`index` as readable text; `name` gives that of an indirect atom's expression."""
    parts = []
    for atom, c in index.terms:
        text = _atom_text(atom, name)
        parts.append(text if c == 1 else f"{_factor(c)}*{text}")
    if index.const != 0 or not parts:
        parts.append(str(index.const))
    return " + ".join(parts)


def _atom_text(atom: Atom, name: Callable[[Any], str]) -> str:
    if isinstance(atom, Var):
        return atom.key
    if isinstance(atom, Indirect):
        return f"[{name(atom.expr)}]"
    sign = "//" if isinstance(atom, FloorDiv) else "%"
    return f"({index_text(atom.value, name)}{sign}{_size_text(atom.divisor)})"


@lru_cache(maxsize=1 << 14)
def _size_text(size: Size) -> str:
    """The text of a divisor; SymPy takes milliseconds for one nested in rounded-up sizes."""
    return str(size)


def _key_of(expr: Any) -> str:
    return str(expr.key)


def indirect_exprs(index: Index) -> Iterator[Any]:
    """The expressions of the indirect atoms, those in quotients and remainders included."""
    for atom, _ in index.terms:
        if isinstance(atom, Indirect):
            yield atom.expr
        elif isinstance(atom, (FloorDiv, Mod)):
            yield from indirect_exprs(atom.value)


def _factor(value: Size) -> str:
    return str(value) if isinstance(value, int) or value.is_Symbol else f"({value})"


def _atom_maximum(atom: Atom) -> Size | None:
    if isinstance(atom, Mod):
        return normal(atom.divisor - 1)
    if isinstance(atom, FloorDiv):
        top = atom.value.maximum()
        if top is None:
            return None
        if isinstance(top, int) and isinstance(atom.divisor, int):
            return top // atom.divisor
        exact = quotient(normal(top + 1), atom.divisor)
        return None if exact is None else normal(exact - 1)
    return normal(atom.size - 1)


def _substitute_atom(atom: Atom, mapping: Mapping[Var, Index], indirect: Any) -> Index:
    if isinstance(atom, Var):
        return mapping.get(atom) or Index(0, ((atom, 1),))
    if isinstance(atom, FloorDiv):
        return floordiv(atom.value.substitute(mapping, indirect), atom.divisor)
    if isinstance(atom, Mod):
        return mod(atom.value.substitute(mapping, indirect), atom.divisor)
    if indirect is None:
        return Index(0, ((atom, 1),))
    return Index(0, ((Indirect(indirect(atom.expr), atom.size), 1),))


def combine(parts: Iterable[tuple[Index, Size]]) -> Index:
    """The linear combination of `parts`."""
    const: Size = 0
    terms: dict[Atom, Size] = {}
    for index, factor in parts:
        const = const + index.const * factor
        for atom, c in index.terms:
            terms[atom] = terms.get(atom, 0) + c * factor
    kept = [(a, normal(c)) for a, c in terms.items()]
    kept = [(a, c) for a, c in kept if c != 0]
    joined = _rejoin(normal(const), kept)
    if joined is not None:
        return joined
    if len(kept) > 1:
        kept.sort(key=lambda t: t[0].key)
    return Index(normal(const), tuple(kept))


def _rejoin(const: Size, terms: Sequence[tuple[Atom, Size]]) -> Index | None:
    """c*d*(x//d) + c*(x%d) = c*x; None where no two terms are of this form."""
    for atom, c in terms:
        if not isinstance(atom, Mod):
            continue
        whole = _floor_atom(*_reduce(atom.value, atom.divisor))  # as `floordiv` writes it
        for other, k in terms:
            if other == whole and normal(c * atom.divisor) == k:
                rest = Index(const, tuple(t for t in terms if t[0] not in (atom, whole)))
                return combine([(rest, 1), (atom.value, c)])
    return None


def variable(var: Var) -> Index:
    """A loop variable as an index; 0 for a loop of one iteration."""
    return ZERO if var.size == 1 else Index(0, ((var, 1),))


def floordiv(value: Index, divisor: Size) -> Index:
    """`value // divisor` of a non-negative value; terms that divide exactly leave the division."""
    if divisor == 1:
        return value
    exact, rest = _split(value, divisor)
    if is_below(rest, divisor):
        return exact
    atom = _floor_atom(*_reduce(rest, divisor))
    return combine([(exact, 1), (Index(0, ((atom, 1),)), 1)])


def _floor_atom(value: Index, divisor: Size) -> FloorDiv:
    """`value // divisor`; (x // a) // b is x // (a * b)."""
    if len(value.terms) == 1 and value.const == 0:
        ((atom, c),) = value.terms
        if isinstance(atom, FloorDiv) and c == 1:
            return FloorDiv(atom.value, normal(atom.divisor * divisor))
    return FloorDiv(value, divisor)


def mod(value: Index, divisor: Size) -> Index:
    """`value % divisor` of a non-negative value, with the terms that divide exactly dropped."""
    if divisor == 1:
        return ZERO
    _, rest = _split(value, divisor)
    if is_below(rest, divisor):
        return rest
    return Index(0, ((Mod(rest, divisor), 1),))


def is_below(rest: Index, divisor: Size) -> bool:
    """Whether `0 <= rest < divisor` at every point."""
    top = rest.maximum()
    return top is not None and is_positive(normal(divisor - top)) and _nonnegative(rest)


def _nonnegative(index: Index) -> bool:
    """Whether the smallest value taken is provably zero or more."""
    least = index.const
    for atom, c in index.terms:
        if is_nonnegative(c):
            continue
        bound = _atom_maximum(atom)
        if bound is None:
            return False
        least = least + c * bound
    return is_nonnegative(normal(least))


def _split(value: Index, divisor: Size) -> tuple[Index, Index]:
    """`value = exact * divisor + rest` with as much as possible in `exact`, and `rest >= 0`.

    Division of a negative rest would round towards zero in generated code.
    """
    exact, rest = [], []
    for atom, c in value.terms:
        q = quotient(c, divisor)
        if q is None:
            rest.append((atom, c))
        else:
            exact.append((atom, q))
    q = quotient(value.const, divisor)
    whole, part = Index(0, tuple(exact)), Index(value.const, tuple(rest))
    if q is not None and _nonnegative(Index(0, part.terms)):
        return Index(q, whole.terms), Index(0, part.terms)
    return (whole, part) if _nonnegative(part) else (ZERO, value)


def _reduce(value: Index, divisor: Size) -> tuple[Index, Size]:
    """(g*x + c) // (g*d) = (x + c//g) // d."""
    numbers = [c for _, c in value.terms] + [divisor]
    if not all(isinstance(n, int) for n in numbers) or not isinstance(value.const, int):
        return value, divisor
    g = math.gcd(*(n for n in numbers if isinstance(n, int)))
    if g <= 1:
        return value, divisor
    terms = tuple((a, c // g) for a, c in value.terms if isinstance(c, int))
    assert isinstance(divisor, int)
    return Index(value.const // g, terms), divisor // g


def domain(shape: Sequence[Size]) -> tuple[Index, ...]:
    """The coordinates of a loop nest over `shape`."""
    return tuple(variable(Var(i, s)) for i, s in enumerate(shape))


def contiguous_strides(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The strides of a row-major tensor, in elements."""
    return dense_strides(shape, range(len(shape)))


def dense_strides(shape: Sequence[Size], order: Sequence[int]) -> tuple[Size, ...]:
    """The strides of a dense tensor, in elements; `order`: its axes, the contiguous one last."""
    strides: list[Size] = [1] * len(shape)
    step: Size = 1
    for axis in reversed(order):
        strides[axis] = step
        step = normal(step * shape[axis])
    return tuple(strides)


def flatten(coords: Sequence[Index], strides: Sequence[Size], offset: Size = 0) -> Index:
    """The memory offset (in elements) of `coords` under `strides`."""
    return combine([(Index(offset), 1), *zip(coords, strides, strict=True)])
