"""The fastest library for matrix products, measured once per machine and kept in the cache."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dicp import operators
from dicp.cache import Cache, key_of
from dicp.loop.ir.index import Size
from dicp.loop.lowering import Lowering, RuleTable, Value
from dicp.torch_private import disable_current_modes
from dicp.vendor.cpu.toolchain import cpu_model

aten = torch.ops.aten
CALIBRATION_SHAPE = (384, 512, 512)
ROUNDS = 9


def has_onednn_linear() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear_libraries() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Name of a library in PyTorch's wheel -> x @ w.T by that library."""
    table: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "blas": lambda x, w: torch.mm(x, w.t())
    }
    if has_onednn_linear():
        table["onednn"] = lambda x, w: torch.ops.mkldnn._linear_pointwise(
            x, w, None, "none", [], ""
        )
    return table


def measure_linear(dtype: torch.dtype) -> dict[str, float]:
    """GFLOP/s of each library on one matrix product, the median of alternating rounds."""
    m, k, n = CALIBRATION_SHAPE
    spent: dict[str, list[float]] = {name: [] for name in linear_libraries()}
    # Lowering runs while PyTorch traces with fake tensors, which compute nothing.
    with disable_current_modes(), torch.no_grad():
        x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        for _ in range(ROUNDS):
            for name, run in linear_libraries().items():
                start = time.perf_counter()
                run(x, w)
                spent[name].append(time.perf_counter() - start)
    return {name: 2 * m * k * n / statistics.median(s) / 1e9 for name, s in spent.items()}


def linear_rates(cache: Cache) -> dict[str, float]:
    """GFLOP/s of each library on this machine, from the cache after the first measurement."""
    key = key_of("linear rates", cpu_model(), torch.__version__, str(torch.get_num_threads()))
    entry = cache.get_or_build(
        "calibration",
        key,
        lambda: {"rates.json": json.dumps(measure_linear(torch.float32)).encode()},
    )
    rates: dict[str, float] = json.loads(entry.read("rates.json"))
    return rates


def fastest_linear(cache: Cache) -> str:
    rates = linear_rates(cache)
    return max(rates, key=lambda name: rates[name])


# ---- rules ----------------------------------------------------------------------------------

ONEDNN = RuleTable()


def _call(lw: Lowering, x: Value, w: Value, bias: Value | None, activation: str = "none") -> Value:
    algorithm = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation, "")
    return lw.call(
        torch.ops.mkldnn._linear_pointwise.default,
        (x, w, bias, activation.removesuffix("_tanh"), [], algorithm),
    )[0]


def _taken(lw: Lowering, x: Value, w: Value, *bias: Value) -> bool:
    """Whether oneDNN is faster than BLAS for these operands with their strides.

    Measured in bfloat16: it saves copying the bias, and loses where it copies a transposed operand.
    """
    operands = (x, w, *bias)
    if any(v.dtype != x.dtype or not _nonempty(v.shape) for v in operands):
        return False
    if x.dtype == torch.bfloat16:
        return bool(bias) and all(lw.realize(v).strides[-1] == 1 for v in (x, w))
    return x.dtype == torch.float32


def _nonempty(shape: tuple[Size, ...]) -> bool:
    return all(s != 0 for s in shape)


@ONEDNN.register(aten.mm.default, kind="library")
def mm(lw: Lowering, a: Value, b: Value) -> Value:
    turned = lw.permute(b, [1, 0])
    if not _taken(lw, a, turned):
        return lw.call(aten.mm.default, (a, b), out_variant=aten.mm.out)[0]
    return _call(lw, a, turned, None)


@ONEDNN.register(aten.addmm.default, kind="library")
def addmm(lw: Lowering, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    row = bias.ndim == 1 and bias.shape[0] == b.shape[1]
    turned = lw.permute(b, [1, 0])
    if beta != 1 or alpha != 1 or not row or not _taken(lw, a, turned, bias):
        scale = {"beta": beta, "alpha": alpha}
        return lw.call(aten.addmm.default, (bias, a, b), scale, out_variant=aten.addmm.out)[0]
    return _call(lw, a, turned, bias)


EPILOGUES = {"none": "none", "relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_tanh",
             "silu": "swish", "tanh": "tanh", "sigmoid": "sigmoid"}  # fmt: skip
"""Activation -> oneDNN's name of it."""


@ONEDNN.register(operators.linear, kind="library")
def linear(lw: Lowering, x: Value, w: Value, bias: Value | None, activation: str) -> Value:
    if activation not in EPILOGUES or not _taken(lw, x, w, *([] if bias is None else [bias])):
        return lw.call(operators.linear, (x, w, bias, activation))[0]
    return _call(lw, x, w, bias, EPILOGUES[activation])


PLAIN = RuleTable()


@PLAIN.register(operators.linear, kind="library")
def plain_linear(lw: Lowering, x: Value, w: Value, bias: Value | None, activation: str) -> Value:
    return lw.call(operators.linear, (x, w, bias, activation))[0]
