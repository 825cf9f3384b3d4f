"""The cost of a step's products, convolutions and attention in the fastest library, shape by shape.

A machine reaches its best rate on large products only. A step with small library calls is compared
here with the same calls made one by one, each at its own shape by the fastest library, with nothing
between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import alternate
from dicp.vendor.cpu.calibration import has_onednn_linear

aten = torch.ops.aten

PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
OTHERS = (
    aten._grouped_mm,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward,
)
MEASURED = frozenset((*PRODUCTS, *CONVOLUTIONS, *OTHERS))

SECONDS = 0.05
"""How long each implementation of a call is sampled."""

Implementation = Callable[[], Any]
"""An implementation of a call."""


class LibraryCalls(TorchDispatchMode):
    """Counts the library calls made under it; integer tensors are saved, of others the layout.

    A library's time does not depend on values, except those of group boundaries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._calls: dict[str, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in MEASURED:
            named = kwargs or {}
            key = f"{func} {pytree.tree_map_only(Tensor, _layout, (args, named))}"
            self.counts[key] += 1
            self._calls.setdefault(key, (func, pytree.tree_map_only(Tensor, _kept, (args, named))))
        return func(*args, **(kwargs or {}))

    def seconds(self, device: str) -> dict[str, float]:
        """Each distinct call's time by its fastest implementation, times its number of calls."""
        found = {}
        for key, (func, kept) in self._calls.items():
            args, kwargs = pytree.tree_map(_filled, kept)
            found_by = {str(k): f for k, f in enumerate(implementations(func, args, kwargs))}
            with torch.no_grad():
                taken = alternate(found_by, SECONDS, device)
            found[key] = self.counts[key] * min(sample.median for sample in taken.values())
        return found


class _Layout:
    """A tensor without its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device

    def filled(self) -> Tensor:
        extent = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        memory = torch.empty(max(extent, 0), dtype=self.dtype, device=self.device)
        return memory.uniform_(-1, 1).as_strided(self.shape, self.strides)


def _layout(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}{list(tensor.stride())}"


def _kept(tensor: Tensor) -> Any:
    return _Layout(tensor) if tensor.is_floating_point() else tensor.clone()


def _filled(kept: Any) -> Any:
    return kept.filled() if isinstance(kept, _Layout) else kept


# ---- implementations -----------------------------------------------------------------------------


def implementations(func: Any, args: Any, kwargs: Any) -> Iterator[Implementation]:
    """The recorded call, and other implementations of it."""
    yield lambda: func(*args, **kwargs)
    packet = func.overloadpacket
    if packet in CONVOLUTIONS and all(a.dim() in (1, 4) for a in args if isinstance(a, Tensor)):
        last = [_channels_last(a) for a in args]
        yield lambda: func(*last, **kwargs)
    if args[0].device.type == "cpu" and has_onednn_linear(args[0].dtype):
        yield from _one_dnn_implementations(packet, args)


def _one_dnn_implementations(packet: Any, args: Any) -> Iterator[Implementation]:
    """Products by oneDNN's linear layer, which eager does not take."""
    if packet is aten.mm:
        yield lambda: _linear(args[0], args[1].t())
    elif packet is aten.addmm and args[0].dim() == 1:
        yield lambda: _linear(args[1], args[2].t(), args[0])
    elif packet is aten.bmm:
        pairs = [(a, b.t()) for a, b in zip(*args, strict=True)]
        yield lambda: [_linear(*pair) for pair in pairs]
    elif packet is aten._grouped_mm:
        groups = [(a, b.t()) for a, b in _groups(*args[:3])]
        yield lambda: [_linear(*group) for group in groups]
    elif packet is aten.convolution and _is_of_one_pixel(args[1], *args[3:9]):
        rows, filters, size = _pixels(args[0]), args[1].flatten(1), args[0][:, 0].shape
        yield lambda: _as_image(_linear(rows, filters, args[2]), size)
    elif packet is aten.convolution_backward and _is_of_one_pixel(args[2], *args[4:10]):
        (over, image), filters = map(_pixels, args[:2]), args[2].flatten(1)
        of_image, of_filters, of_bias = args[10]
        yield lambda: (
            _as_image(_linear(over, filters.t()), args[1][:, 0].shape) if of_image else None,
            _linear(over.t(), image.t())[..., None, None] if of_filters else None,
            over.sum(0) if of_bias else None,
        )


def _groups(a: Tensor, b: Tensor, ends: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The factors of each product of a grouped product; none is empty."""
    for number, (low, high) in enumerate(pairwise([0, *ends.tolist()])):
        if low == high:
            continue
        if a.dim() == b.dim() == 2:
            yield a[:, low:high], b[low:high]
        else:
            yield (
                a[low:high] if a.dim() == 2 else a[number],
                b[:, low:high] if b.dim() == 2 else b[number],
            )


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return made


def _is_of_one_pixel(
    filters: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool, output: Any,
    groups: int,
) -> bool:  # fmt: skip
    """Whether a convolution is a product of its pixels' channels and its filters."""
    steps = {*stride} == {1} and {*padding} == {0}
    return filters.dim() == 4 and filters.shape[2:] == (1, 1) and steps and groups == 1 and (
        not transposed
    )  # fmt: skip


def _channels_last(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def _pixels(image: Tensor) -> Tensor:
    """Every pixel of every image, a row of channels each."""
    rows: Tensor = _channels_last(image).permute(0, 2, 3, 1).flatten(0, 2)
    return rows


def _as_image(rows: Tensor, size: torch.Size) -> Tensor:
    """Rows of pixels as images of `size`: number, height, width."""
    return rows.unflatten(0, size).permute(0, 3, 1, 2)
