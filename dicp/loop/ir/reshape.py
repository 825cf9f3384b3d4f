"""Two shapes of as many elements in row-major order: their common factors, and coordinates."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.loop.ir.index import (
    Index,
    Size,
    contiguous_strides,
    flatten,
    floordiv,
    mod,
    normal,
    quotient,
)


def refine(a: Sequence[Size], b: Sequence[Size]) -> list[tuple[Size, int, int]] | None:
    """The coarsest row-major split of both shapes: (size, axis of a, axis of b) per factor.

    None where the shapes do not split into common factors.
    """
    blocks: list[tuple[Size, int, int]] = []
    i = j = 0
    left: Size = 1
    right: Size = 1
    while True:
        while left == 1 and i < len(a):
            left, i = a[i], i + 1
        while right == 1 and j < len(b):
            right, j = b[j], j + 1
        if left == 1 and right == 1:
            return blocks
        # Row-major, outermost first: the smaller size is the outer factor of the larger.
        if left == right:
            blocks.append((left, i - 1, j - 1))
            left = right = 1
        elif left != 1 and right != 1 and (q := quotient(left, right)) is not None:
            blocks.append((right, i - 1, j - 1))
            left, right = q, 1
        elif left != 1 and right != 1 and (q := quotient(right, left)) is not None:
            blocks.append((left, i - 1, j - 1))
            left, right = 1, q
        else:
            return None


def reshape_coords(
    coords: Sequence[Index], old: Sequence[Size], new: Sequence[Size]
) -> list[Index]:
    """Coordinates in `old` of the element whose coordinates in `new` are `coords`.

    Both shapes hold the same number of elements in row-major order.
    """
    result: list[Index] = []
    for old_axes, new_axes in _matching_blocks(old, new):
        if len(old_axes) == 1 and len(new_axes) == 1:
            result.append(coords[new_axes[0]])
            continue
        sizes = [new[k] for k in new_axes]
        flat = flatten([coords[k] for k in new_axes], contiguous_strides(sizes))
        olds = [old[k] for k in old_axes]
        for n, (size, stride) in enumerate(zip(olds, contiguous_strides(olds), strict=True)):
            part = floordiv(flat, stride)
            result.append(part if n == 0 else mod(part, size))
    return result


def _matching_blocks(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Runs of axes of both shapes with equal products, in order; every axis of `old` occurs."""
    blocks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        p: Size = 1
        q: Size = 1
        if i < len(old):
            left, p, i = [i], old[i], i + 1
        if j < len(new):
            right, q, j = [j], new[j], j + 1
        while p != q and (i < len(old) or j < len(new)):
            grow_left = j >= len(new) or (i < len(old) and not _at_least(p, q))
            if grow_left and i < len(old):
                left.append(i)
                p, i = normal(p * old[i]), i + 1
            else:
                right.append(j)
                q, j = normal(q * new[j]), j + 1
        if left:
            blocks.append((left, right))
        elif blocks:  # axes of size 1 of `new` after the last block
            blocks[-1][1].extend(right)
    return blocks


def _at_least(p: Size, q: Size) -> bool:
    if isinstance(p, int) and isinstance(q, int):
        return p >= q
    return quotient(q, p) is None
