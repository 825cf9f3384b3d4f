"""The index operands of operators, and the sizes that they index. Eager checks all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dicp.torch_private import OpOverload, schema_of

aten = torch.ops.aten
Given = Mapping[str, Any]
"""An operator's arguments by name, tensors as fake tensors."""

UNSAFE_INDEXING = frozenset({aten._unsafe_index.Tensor, aten._unsafe_index_put.default})
"""They promise indices in bounds, but some decompositions pass them the user's indices."""


@dataclass(frozen=True)
class Indexing:
    """The argument of an operator that holds indices, the size that they index, and whether
    negative ones count from the end. `slices`: how many elements each index selects."""

    index: str
    size: Callable[[Given], Any]
    wraps: bool = False
    slices: Callable[[Given], Any] = lambda given: 1
    first: bool = False
    """Whether the first element alone is an index."""


@dataclass(frozen=True)
class Site:
    """Indices of one call, the size that they index, and whether negative ones count from the
    end."""

    node: fx.Node
    size: Any
    wraps: bool
    count: Any
    """The number of elements eager reads or writes by them: with none it checks no index."""
    first: bool = False
    """Whether the first element alone is an index."""

    @property
    def least(self) -> Any:
        return -self.size if self.wraps else 0

    @property
    def greatest(self) -> Any:
        return self.size - 1


def _along(given: Given) -> Any:
    x = given["self"]
    return x.shape[given["dim"]] if x.dim() else 1


def _others(given: Given) -> Any:
    """The elements of a slice."""
    x = given["self"]
    return math.prod(size for d, size in enumerate(x.shape) if d != given["dim"] % x.dim())


def _written(given: Given) -> Any:
    return _others(given) if given["self"].dim() else 1


def _elements(name: str, last: int = 0) -> Callable[[Given], Any]:
    """The number of elements, in the last dimensions or all."""
    return lambda given: math.prod(given[name].shape[-last:])


def _rows(given: Given) -> Any:
    return given["weight"].shape[0]


def _planes(given: Given) -> Any:
    return math.prod(given["output_size"])


_EACH = Indexing("index", _along)
_SLICES = Indexing("index", _along, slices=_written)
_FLAT = Indexing("index", _elements("self"), wraps=True)
_TABLE = Indexing("indices", _rows)
_GRADIENT = Indexing("indices", lambda given: given["num_weights"])
_OFFSETS = (
    Indexing("offsets", lambda given: given["indices"].shape[0] + 1),
    Indexing("offsets", lambda given: 1, first=True),
)
"""Bags begin within the indices, the first at 0."""
INDEXING: dict[OpOverload, Indexing] = {
    **dict.fromkeys((
        aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter.reduce,
        aten.scatter.value_reduce, aten.scatter_add.default, aten.scatter_reduce.two,
        aten.index_select.default), _EACH),
    **dict.fromkeys((
        aten.index_add.default, aten.index_copy.default, aten.index_reduce.default), _SLICES),
    **dict.fromkeys((aten.index_fill.int_Scalar, aten.index_fill.int_Tensor),
                    Indexing("index", _along, wraps=True, slices=_written)),
    **dict.fromkeys((aten.take.default, aten.put.default), _FLAT),
    **dict.fromkeys((
        aten.embedding.default, aten._embedding_bag.default,
        aten._embedding_bag_forward_only.default,
        aten._embedding_bag_per_sample_weights_backward.default), _TABLE),
    **dict.fromkeys((
        aten.embedding_dense_backward.default, aten._embedding_bag_backward.default,
        aten._embedding_bag_dense_backward.default), _GRADIENT),
    **dict.fromkeys((aten.max_unpool2d.default, aten.max_unpool3d.default),
                    Indexing("indices", _planes)),
    **dict.fromkeys((
        aten.max_pool2d_with_indices_backward.default, aten.adaptive_max_pool2d_backward.default,
        aten.fractional_max_pool2d_backward.default), Indexing("indices", _elements("self", 2))),
    **dict.fromkeys((
        aten.max_pool3d_with_indices_backward.default, aten.adaptive_max_pool3d_backward.default,
        aten.fractional_max_pool3d_backward.default), Indexing("indices", _elements("self", 3))),
}  # fmt: skip
"""Operators with one tensor of indices."""
BAGS = frozenset({
    aten._embedding_bag.default, aten._embedding_bag_forward_only.default,
    aten._embedding_bag_backward.default, aten._embedding_bag_per_sample_weights_backward.default,
})  # fmt: skip
"""Operators with offsets into the indices, too."""
BY_DIMENSION = frozenset({aten.index.Tensor, aten.index_put.default, *UNSAFE_INDEXING})
"""Operators with a list of indices, one for each dimension."""


def index_sites(node: fx.Node) -> list[Site]:
    """The indices that a call reads from tensors and eager checks; masks are not indices."""
    if node.target in BY_DIMENSION:
        found = _by_dimension(node)
    elif isinstance(node.target, OpOverload) and node.target in INDEXING:
        rows = (INDEXING[node.target], *(_OFFSETS if node.target in BAGS else ()))
        found = [_single(node, row) for row in rows]
    else:
        return []
    if node.target in UNSAFE_INDEXING:
        found = [site for site in found if not depends_on_sizes_alone(site.node)]
    return [site for site in found if not _is_mask(site.node)]


def arguments(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by name, with the schema's defaults for omitted ones."""
    schema = schema_of(node.target).arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    names = (each.name for each in schema)
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _single(node: fx.Node, row: Indexing) -> Site:
    values = arguments(node)
    given = {name: _fake(value) for name, value in values.items()}
    count = given[row.index].numel() * row.slices(given)
    return Site(values[row.index], row.size(given), row.wraps, count, row.first)


def _by_dimension(node: fx.Node) -> list[Site]:
    x, indices = _fake(node.args[0]), node.args[1]
    assert isinstance(indices, Sequence)
    present = [k for k, index in enumerate(indices) if isinstance(index, fx.Node)]
    rest = math.prod(size for d, size in enumerate(x.shape) if d not in present)
    return [
        Site(indices[k], x.shape[k], True, _fake(indices[k]).numel() * rest)
        for k in present
        if k < x.dim()
    ]


def _fake(value: Any) -> Any:
    return fx.node.map_arg(value, lambda node: node.meta["val"])


def _is_mask(node: fx.Node) -> bool:
    return node.meta["val"].dtype in (torch.bool, torch.uint8)


def depends_on_sizes_alone(node: Any) -> bool:
    """Whether a value depends at most on sizes, and on no tensor's elements."""
    pending, seen = [node] if isinstance(node, fx.Node) else [], set()
    while pending:
        here = pending.pop()
        if here in seen:
            continue
        seen.add(here)
        is_tensor = isinstance(here.meta.get("val"), torch.Tensor)
        if here.op != "call_function" and is_tensor:
            return False
        pending += here.all_input_nodes
    return True
