"""The positions of padding in flattened dimensions.

Padded to 4, the rows of (2, 3) flattened have padding at positions 3 and 7, not at the end. The
form of a dimension is None if padding is at its end, the sizes that were flattened if padding is
inside, ANYWHERE if all elements along it are equal. Operators that do not combine elements
propagate forms (`Flow`); a view with the old sizes removes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dicp.graphop.program import Node
from dicp.torch_private import linear_factor

Part = tuple[int, str]
"""A size c * symbol; the symbol is empty for a number."""
Form = tuple[Part, ...] | None
ANYWHERE: tuple[Part, ...] = ()
Forms = Sequence[Form]
"""The forms of one value, by dimension."""
Flow = Callable[[Node, Sequence[Forms]], Forms]
"""The forms of an operator's results from those of its operands. Raises Mixed."""


class Mixed(Exception):
    """Padded and other positions would be combined; the text says why."""


def common(forms: Sequence[Form]) -> Form:
    """The form of a dimension that several operands share."""
    told = {form for form in forms if form != ANYWHERE}
    if len(told) > 1:
        raise Mixed("has operands that are padded at different places")
    return told.pop() if told else ANYWHERE


def in_order(form: Form) -> Form:
    """The form of a dimension that an operator works along."""
    if form:
        raise Mixed("works along a flattened padded dimension")
    return None


def elementwise(node: Node, given: Sequence[Forms]) -> Forms:
    ranked = [forms for forms in given if forms]
    return [common(column) for column in zip(*ranked, strict=True)]


def along(axes: Callable[[Node], Sequence[int]], keeps: Callable[[Node], bool]) -> Flow:
    """The flow of an operator along `axes` of its first operand, which its result has if
    `keeps`."""

    def flow(node: Node, given: Sequence[Forms]) -> Forms:
        over = {axis % len(given[0]) for axis in axes(node)}
        forms = [in_order(form) if d in over else form for d, form in enumerate(given[0])]
        return [form for d, form in enumerate(forms) if d not in over or keeps(node)]

    return flow


def sliced(node: Node, given: Sequence[Forms]) -> Forms:
    sizes = zip(node.operands()[0].shape, node.outputs[0].shape, strict=True)
    whole = [linear_factor(old) == linear_factor(new) for old, new in sizes]
    return [form if w else in_order(form) for form, w in zip(given[0], whole, strict=True)]


def unknown(node: Node, given: Sequence[Forms]) -> Forms:
    """The flow of an operator on operands without flattened dimensions."""
    for forms in given:
        for form in forms:
            in_order(form)
    return [None] * node.outputs[0].ndim


# ---- dimension numbers as XLA has them -----------------------------------------------------------


def iota(node: Node, given: Sequence[Forms]) -> Forms:
    places = range(node.outputs[0].ndim)
    return [None if d == node.attrs["dimension"] else ANYWHERE for d in places]


def broadcast(node: Node, given: Sequence[Forms]) -> Forms:
    old, new = node.operands()[0].shape, node.outputs[0].shape
    forms: list[Form] = [ANYWHERE] * len(new)
    for source, dim in enumerate(node.attrs["dims"]):
        if linear_factor(old[source]) == linear_factor(new[dim]):
            forms[dim] = given[0][source]
    return forms


def dot_general(node: Node, given: Sequence[Forms]) -> Forms:
    (left, right), (batch, other, *summed) = given, node.attrs["dims"]
    for forms, axes in zip(given, summed, strict=True):
        for axis in axes:
            in_order(forms[axis])
    rows = [form for d, form in enumerate(left) if d not in (*batch, *summed[0])]
    columns = [form for d, form in enumerate(right) if d not in (*other, *summed[1])]
    both = [common([left[a], right[b]]) for a, b in zip(batch, other, strict=True)]
    return [*both, *rows, *columns]


def gather(node: Node, given: Sequence[Forms]) -> Forms:
    (x, places), (offset, collapsed, looked_into, vector) = given, node.attrs["dims"]
    for axis in looked_into:
        in_order(x[axis])
    windows = iter([form for d, form in enumerate(x) if d not in collapsed])
    others = iter([form for d, form in enumerate(places) if d != vector])
    return [next(windows if d in offset else others) for d in range(node.outputs[0].ndim)]


# ---- reshape -------------------------------------------------------------------------------------


def reshaped(node: Node, given: Sequence[Forms]) -> Forms:
    """Each dimension takes factors of the old ones, in order."""
    parts = [
        part
        for form, size in zip(given[0], node.operands()[0].shape, strict=True)
        for part in (form or (_part(size),))
        if part != (1, "")
    ]
    forms = [_form(_taken(parts, _part(size))) for size in node.outputs[0].shape]
    if parts:
        raise Mixed("takes a padded dimension apart")
    return forms


def _part(size: Any) -> Part:
    factor = linear_factor(size)
    if factor is None:  # a whole of its own
        return 1, str(size)
    return factor


def _taken(parts: list[Part], wanted: Part) -> Iterator[Part]:
    """Takes factors off the front until their product is a size."""
    left, symbol = wanted
    while left > 1 or symbol:
        count, own = parts.pop(0) if parts else (0, "")
        if count and own and own == symbol and left % count == 0:
            taken, symbol, rest = count, "", 1
        elif count and own and own == symbol and count % left == 0:
            taken, symbol, rest = left, "", count // left
        elif count and not own and left % count == 0:
            taken, rest = count, 1
        elif count and not own and not symbol and count % left == 0:
            taken, rest = left, count // left
        else:
            raise Mixed("takes a padded dimension apart")
        left //= taken
        if rest > 1:
            parts.insert(0, (rest, ""))
        yield taken, own


def _form(taken: Iterator[Part]) -> Form:
    parts = tuple(taken)
    places = [k for k, (_, symbol) in enumerate(parts) if symbol]
    return parts if any(places) else None
