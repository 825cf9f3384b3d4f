"""Which routines a graph will call, told from Dynamo's graph before anything is lowered."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from dicp.vendor.cpu.routines.common import DEPTHWISE_TAPS, TYPES, Group
from dicp.vendor.cpu.routines.convolution import LEAST_ROWS, SMALL

PRODUCTS = (F.linear, torch.matmul, operator.matmul, torch.mm, torch.bmm, torch.addmm)
PRODUCT_METHODS = ("matmul", "mm", "bmm", "addmm")
GROUPS_OF = {
    **dict.fromkeys((*PRODUCTS, *PRODUCT_METHODS), ("product",)),
    **dict.fromkeys((F.conv1d, F.conv2d), ("convolution",)),
    F.scaled_dot_product_attention: ("attention",),
}
"""Operator of the user's program -> the groups of routines that compute it."""
CONVOLUTIONS = (F.conv1d, F.conv2d)
GRADIENTS = {"convolution": "convolution_filters", "attention": "attention_gradients"}
"""Group -> the one that its gradients need besides."""


def expected_groups(gm: fx.GraphModule, train: bool) -> list[Group]:
    """The groups that Dynamo's graph will call, as far as its operators tell; each once."""
    found: dict[Group, None] = {}
    in_rows = not any(map(_is_depthwise, _nodes(gm)))
    for node in _nodes(gm):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dtype in TYPES:
            for name in _with_gradients(GROUPS_OF.get(_operator(node), ()), train):
                found[Group.of(name, value.dtype)] = None
            for name in _depthwise_groups(node, train):
                found[Group.of(name, value.dtype)] = None
            if in_rows and _operator(node) in CONVOLUTIONS and _reads_patches(node, value, train):
                found[Group.of("patches", value.dtype)] = None
    return list(found)


def _is_depthwise(node: fx.Node) -> bool:
    """A convolution whose filters see one channel: with it images lie channels last."""
    filters = _filters(node)
    return filters is not None and filters.shape[1] == 1 != _argument(node, 6, "groups")


def _filters(node: fx.Node) -> torch.Tensor | None:
    if _operator(node) not in CONVOLUTIONS:
        return None
    filters = _argument(node, 1, "weight")
    value = filters.meta.get("example_value") if isinstance(filters, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _depthwise_groups(node: fx.Node, train: bool) -> list[str]:
    filters = _filters(node)
    if filters is None or not _is_depthwise(node) or filters.shape[-1] not in DEPTHWISE_TAPS:
        return []
    names = ["depthwise", *(["depthwise_gradients"] if train else [])]
    return [f"{name}_{filters.shape[-1]}" for name in names]


def _reads_patches(node: fx.Node, value: torch.Tensor, train: bool) -> bool:
    """Whether images are small, or their gradient is one at a step."""
    if value.dtype != torch.float32 or value.shape[1] < LEAST_ROWS:
        return False
    stride, width = _argument(node, 3, "stride"), value.shape[-1]
    strided = any(s != 1 for s in (stride if isinstance(stride, (tuple, list)) else [stride]))
    small = value.ndim == 4 and isinstance(width, int) and width <= SMALL
    return small or (train and strided)


def _argument(node: fx.Node, position: int, name: str) -> Any:
    """An argument by its position or its name; 1 without it."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, 1)


def _nodes(gm: fx.GraphModule) -> Iterable[fx.Node]:
    """All nodes, those of nested graphs (checkpointed regions) too."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _operator(node: fx.Node) -> Any:
    return node.target if node.op in ("call_function", "call_method") else None


def _with_gradients(names: Iterable[str], train: bool) -> Iterable[str]:
    for name in names:
        yield name
        if train and name in GRADIENTS:
            yield GRADIENTS[name]
