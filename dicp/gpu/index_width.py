"""Bounds of indices: they have 32 bits unless a launch's sizes need 64.

Partial sums of an address may wrap around in 32 bits, since the complete sum wraps back. An index
that is divided or used as a value must not wrap around.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from dicp.loop.ir.index import Atom, FloorDiv, Index, Mod, Size, normal
from dicp.serialize import encode_size, evaluate_size

NARROW_LIMIT = 2**31 - 2**20
"""Indices below this fit in 32 bits even where the last block reaches past the end."""


def reach(index: Index) -> Size:
    """An upper bound of the magnitude of `index` and of each of its partial sums."""
    total = _magnitude(index.const)
    for atom, c in index.terms:
        total = total + _magnitude(c) * _largest(atom)
    return normal(total)


class Reaches(dict[int | str, None]):
    """Bounds of indices that must not wrap around, if they may need more than 32 bits."""

    def note(self, index: Index) -> None:
        furthest = reach(index)
        if not isinstance(furthest, int) or furthest >= NARROW_LIMIT:
            self[encode_size(furthest)] = None


def _magnitude(size: Size) -> Size:
    return abs(size) if isinstance(size, int) else sympy.Abs(size)


def _largest(atom: Atom) -> Size:
    if isinstance(atom, Mod):
        return atom.divisor
    if isinstance(atom, FloorDiv):
        top = reach(atom.value)
        exact = isinstance(top, int) and isinstance(atom.divisor, int)
        return top // atom.divisor if exact else top
    return atom.size


def needs_wide(
    step: Mapping[str, Any], symbols: Mapping[str, int], extents: Iterable[int] = ()
) -> bool:
    """Whether a launch over tensors of these extents needs 64-bit indices.

    Raises NameError where `symbols` lacks a size.
    """
    launch = step["launch"]
    axes = [evaluate_size(axis["size"], symbols) for axis in launch["axes"].values()]
    given = [evaluate_size(s, symbols) for s in (*step["symbols"], *launch["reaches"])]
    return max([*map(abs, given), math.prod(axes), *extents], default=0) >= NARROW_LIMIT
