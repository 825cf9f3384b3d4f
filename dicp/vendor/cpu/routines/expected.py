"""Predicts from Dynamo's graph, before lowering, which routines it will call."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from dicp.target import Facts, options_of_one_row
from dicp.torch_private import ATTENTION_FORWARD, hint_of
from dicp.vendor.cpu.calibration import ShapeClass, shape_class
from dicp.vendor.cpu.routines import choice
from dicp.vendor.cpu.routines.common import TYPES, Group, without_parts
from dicp.vendor.cpu.routines.depthwise import columns_of
from dicp.vendor.cpu.routines.product import is_split, variant

aten = torch.ops.aten
PRODUCTS = (F.linear, torch.matmul, operator.matmul, torch.mm, torch.bmm, torch.addmm)
PRODUCT_METHODS = ("matmul", "mm", "bmm", "addmm")
GROUPS_OF = {
    **dict.fromkeys((*PRODUCTS, *PRODUCT_METHODS), ("product",)),
    F.scaled_dot_product_attention: ("attention",),
}
"""Operator of the user's program -> the groups of routines that compute it."""
ACTIVATIONS = (F.relu, F.gelu, F.silu, torch.relu, torch.tanh, torch.sigmoid, F.tanh, F.sigmoid,
               "relu", "tanh", "sigmoid")  # fmt: skip
"""What our products compute on their results."""
SOFTMAX = (F.softmax, torch.softmax, "softmax")
BETWEEN = (F.dropout, torch.dropout, "to", "type_as", "float", "contiguous")
"""Operators allowed between attention's softmax and its product with values."""
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv_transpose1d, F.conv_transpose2d)
OPERATORS = {**dict.fromkeys((*PRODUCTS, *PRODUCT_METHODS), aten.mm.default),
             **dict.fromkeys(CONVOLUTIONS, aten.convolution.default),
             F.scaled_dot_product_attention: ATTENTION_FORWARD}  # fmt: skip
"""Operator of the user's program -> the ATen operator of its decomposition."""
GRADIENTS = {"attention": "attention_gradients"}
"""Group -> the additional group that its gradients need."""


def expected_groups(
    gm: fx.GraphModule, train: bool, facts: Facts, past_blas: Callable[[ShapeClass], bool]
) -> list[Group]:
    """The groups that Dynamo's graph will call, judging by its operators; no duplicates.

    `facts`: the target's. `past_blas`: whether BLAS is the slower library for a class of products.
    """
    found: dict[Group, None] = {}
    channels_last = any(_wants_channels_last(node, facts) for node in _nodes(gm))
    for node in _nodes(gm):
        value = _computed(node, node, facts)
        if value is None or value.dtype not in TYPES:
            continue
        called: tuple[str, ...] = GROUPS_OF.get(_operator(node), ())
        if _is_attention(node):
            called = ("attention",)
        if "grouped_mm" in str(_operator(node)):
            called = ("product_grouped",)
        elif called == ("product",):
            ours = _has_own_kernel(node, value, past_blas)
            called = _groups_of_product(node, value, train) if ours else ()
        names: Iterable[str] = _with_gradients(called, train)
        if _operator(node) in CONVOLUTIONS:
            names = _groups_of_convolution(node, value, channels_last, train, facts)
        found.update((Group.of(name, value.dtype), None) for name in names)
    return list(dict.fromkeys(without_parts(found).values()))


def _groups_of_product(node: fx.Node, out: torch.Tensor, train: bool) -> tuple[str, ...]:
    """The groups that compute a product and, in training, its gradients."""
    operands = [x for a in node.args if (x := _tensor(a)) is not None]
    at = 2 if _operator(node) in (torch.addmm, "addmm") else 1
    if len(operands) <= at:
        return ("product",)
    right = operands[at]
    if min(out.ndim, right.ndim) < 2:
        return ()  # vectors
    steps = [step if isinstance(step, int) else None for step in right.stride()[-2:]]
    sizes = list(right.shape[-2:])
    if _operator(node) is F.linear:
        steps, sizes = steps[::-1], sizes[::-1]
    rows = math.prod(out.shape[:-1]) if right.ndim == 2 else out.shape[-2]
    depth, columns = sizes
    if right.ndim == 2 and is_split(out.dtype, rows, depth, columns):
        return ("split",)
    kind = variant(out.dtype, rows, columns, steps, _in_first_call)
    if not train:
        return (kind,)
    return kind, "product", variant(out.dtype, rows, depth, steps[::-1], _in_first_call)


def _has_own_kernel(
    node: fx.Node, out: torch.Tensor, past_blas: Callable[[ShapeClass], bool]
) -> bool:
    """Whether our kernel computes a product: in batches, with an activation, or past BLAS."""
    if out.ndim < 2:
        return False
    operands = [x for a in node.args if (x := _tensor(a)) is not None][-3:]
    if out.dtype != torch.float32 or len(operands) < 2 or operands[1].ndim > 2:
        return True
    if any(_operator(user) in ACTIVATIONS for user in node.users):
        return True
    left = operands[1] if _operator(node) in (torch.addmm, "addmm") else operands[0]
    sizes = (*out.shape[:-1], left.shape[-1], out.shape[-1])
    if not all(isinstance(size, int) for size in sizes):
        return False
    rows, depth, columns = math.prod(out.shape[:-1]), left.shape[-1], out.shape[-1]
    return is_split(out.dtype, rows, depth, columns) or past_blas(shape_class(rows, depth, columns))


def _tensor(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_attention(node: fx.Node) -> bool:
    """Whether a product multiplies the probabilities of unfused attention."""
    if _operator(node) not in (*PRODUCTS, *PRODUCT_METHODS):
        return False
    weights = _argument(node, 0, "input", None)
    while isinstance(weights, fx.Node) and _operator(weights) in BETWEEN:
        weights = _argument(weights, 0, "input", None)
    return isinstance(weights, fx.Node) and _operator(weights) in SOFTMAX


def _computed(node: fx.Node, value: Any, facts: Facts) -> torch.Tensor | None:
    """The tensor of `value`, a node, in the dtype that the operator of `node` is computed in."""
    tensor = _tensor(value)
    dtypes = facts.in_float32.get(OPERATORS.get(_operator(node)), ())
    return tensor.detach().float() if tensor is not None and tensor.dtype in dtypes else tensor


def _wants_channels_last(node: fx.Node, facts: Facts) -> bool:
    """Whether `node` is a 2-d convolution that makes those of its graph channels-last."""
    filters = _computed(node, _argument(node, 1, "weight", None), facts)
    if _operator(node) not in CONVOLUTIONS or filters is None or filters.ndim != 4:
        return False
    return facts.wants_channels_last(filters, _argument(node, 6, "groups", 1))


def _groups_of_convolution(
    node: fx.Node, out: torch.Tensor, channels_last: bool, train: bool, facts: Facts
) -> Iterable[str]:
    """The groups that compute the result and, in training, both gradients.

    `channels_last`: whether 2-d images are. The gradients of a transposed convolution are library
    calls.
    """
    given = (_argument(node, 0, "input", None), _argument(node, 1, "weight", None))
    x, w = (_computed(node, each, facts) for each in given)
    if x is None or w is None or x.ndim != out.ndim:
        return
    if x.ndim == w.ndim - 1:  # an image without a batch
        x, out = x[None], out[None]
    how = _options(node, x, w)
    if x.ndim == 3:
        channels_last = facts.is_conv2d(w, how.groups)
        if channels_last:
            x, w, out = (tensor.unsqueeze(2) for tensor in (x, w, out))
            how = choice.Options(*options_of_one_row(**vars(how)))
    fixed = (*w.shape, *how.stride, *how.padding, *how.dilation, how.groups)
    if not all(isinstance(size, int) for size in fixed):
        return
    images, sizes = choice.Planned(_in_first_call(x.shape), x.dtype), _in_first_call(out.shape)
    kinds = [choice.result(how, images, w, sizes, choice.Layout(not channels_last, channels_last))]
    train = train and not how.transposed
    if train and not channels_last:
        kinds.append(choice.images_gradient(how, images, w, sizes))
        filters = choice.filters_gradient(how, images, w, sizes)
        kinds.append(filters and f"{filters}_filters")
    elif train and how.fit(x, w) and not how.in_patches(images, how.axes(images, w, sizes)):
        kinds += [
            "nhwc" if choice.is_images_gradient_by_nhwc(how, images, w, sizes) else None,
            "nhwc_filters" if choice.is_filters_gradient_by_nhwc(how, images, w, sizes) else None,
            "im2col_filters" if choice.has_few_pixels(how, images, w, sizes) else None,
        ]
    for kind in filter(None, kinds):
        if kind == "depthwise":
            taps = columns_of(how.axes(images, w, sizes))
            yield from (f"depthwise_{taps}", *([f"depthwise_gradients_{taps}"] if train else []))
        else:
            yield _group_of_patches(out, w) if kind == "patchify" else kind


def _group_of_patches(out: torch.Tensor, w: torch.Tensor) -> str:
    """The group that multiplies patches with filters."""
    filters, depth = w.shape[0], math.prod(w.shape[1:])
    pixels = math.prod((out.shape[0], *out.shape[2:]))
    return variant(out.dtype, pixels, filters, (1, depth), _in_first_call)


def _in_first_call(sizes: Iterable[Any]) -> list[int]:
    """Sizes in the first call; comparing symbolic ones would specialize them."""
    return [hint_of(size) for size in sizes]


def _options(node: fx.Node, x: torch.Tensor, w: torch.Tensor) -> choice.Options:
    """The convolution's arguments besides its tensors; its padding may be a string."""
    count, transposed = x.ndim - 2, _operator(node) in (F.conv_transpose1d, F.conv_transpose2d)
    stride, padding, dilation, output_padding = (
        list(value) if isinstance(value, (tuple, list)) else [value] * count
        for value in (
            _argument(node, 3, "stride", 1),
            _argument(node, 4, "padding", 0),
            _argument(node, 7 if transposed else 5, "dilation", 1),
            _argument(node, 5, "output_padding", 0) if transposed else 0,
        )
    )
    if padding[0] == "same":
        padding = [d * (taps - 1) // 2 for d, taps in zip(dilation, w.shape[2:], strict=True)]
    elif padding[0] == "valid":
        padding = [0] * count
    groups = _argument(node, 6, "groups", 1)
    return choice.Options(stride, padding, dilation, transposed, output_padding, groups)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    """An argument by its position or its name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


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
