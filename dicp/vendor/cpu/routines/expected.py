"""Which routines a graph will call, told from Dynamo's graph before anything is lowered."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from dicp.vendor.cpu.routines.common import TYPES, Group

PRODUCTS = (F.linear, torch.matmul, operator.matmul, torch.mm, torch.bmm, torch.addmm)
PRODUCT_METHODS = ("matmul", "mm", "bmm", "addmm")
GROUPS_OF = {
    **dict.fromkeys((*PRODUCTS, *PRODUCT_METHODS), ("product",)),
    **dict.fromkeys((F.conv1d, F.conv2d), ("convolution",)),
    F.scaled_dot_product_attention: ("attention",),
}
"""Operator of the user's program -> the groups of routines that compute it."""
GRADIENTS = {"convolution": "convolution_filters", "attention": "attention_gradients"}
"""Group -> the one that its gradients need besides."""


def expected_groups(gm: fx.GraphModule, train: bool) -> list[Group]:
    """The groups that Dynamo's graph will call, as far as its operators tell; each once."""
    found: dict[Group, None] = {}
    for node in _nodes(gm):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dtype in TYPES:
            for name in _with_gradients(GROUPS_OF.get(_operator(node), ()), train):
                found[Group.of(name, value.dtype)] = None
    return list(found)


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
