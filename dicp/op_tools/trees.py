"""Arguments and results as trees of tuples, lists and mappings with tensors at the leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch

Leaf = Callable[[torch.Tensor], Any]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree, in order, keywords too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for item in value:
            yield from tensors(item)


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The tree with what `leaf` makes of each leaf that is no container."""
    if isinstance(value, dict):
        return _same_mapping(value, {key: mapped(item, leaf) for key, item in value.items()})
    if isinstance(value, torch.Size):
        return leaf(value)
    if isinstance(value, tuple):
        items = [mapped(item, leaf) for item in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        if type(value) is tuple:
            return tuple(items)
        return _same_kind(type(value), items)
    if isinstance(value, list):
        return [mapped(item, leaf) for item in value]
    return leaf(value)


def _same_mapping(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """The items in a mapping of the kind of `value`, such as a result with attributes."""
    if type(value) is dict:
        return items
    found = copy(value)
    for key, item in items.items():
        found[key] = item
    return found


def _same_kind(kind: type, items: Sequence[Any]) -> Any:
    """A tuple of PyTorch's own kind, such as torch.return_types.sort."""
    try:
        return kind(items)
    except TypeError:
        return tuple(items)


def map_tensors(value: Any, leaf: Leaf, other: Callable[[Any], Any] = lambda item: item) -> Any:
    """The tree with its tensors replaced; a tensor that occurs twice is replaced once.

    other: what replaces a leaf that is no tensor.
    """
    done: dict[int, Any] = {}

    def one(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return other(item)
        if id(item) not in done:
            done[id(item)] = leaf(item)
        return done[id(item)]

    return mapped(value, one)
