"""Running sums and products along one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dicp.dtypes import REDUCED_FLOATS
from dicp.loop.ir.expr import cast
from dicp.loop.ir.graph import Compute
from dicp.loop.ir.index import domain
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import as_size
from dicp.loop.lowering.value import single
from dicp.loop.lowering.views import wrap
from dicp.rules import RuleTable

aten = torch.ops.aten
SCAN = RuleTable()


def _running_dtype(dtype: torch.dtype) -> torch.dtype:
    """The accumulator dtype of a scan: wider than the result's, as in ATen on the CPU."""
    if dtype in REDUCED_FLOATS:
        return torch.float32
    return torch.float64 if dtype == torch.float32 else dtype


def scan(lw: Lowering, x: Value, dim: int, op: str, dtype: torch.dtype) -> Value:
    """The inclusive scan of `x` along `dim` with `op` ("sum" or "prod"), as `dtype`."""
    axis = wrap(dim, x.ndim)
    if not x.ndim:
        return lw.map(lambda e: cast(e, dtype), x, dtype=dtype)
    if as_size(x.shape[axis]) == 1:
        return lw.map(lambda e: single(op, cast(e, dtype), dtype), x, dtype=dtype)
    out = lw.temp(x.shape, dtype)
    body = cast(cast(x.at(domain(x.shape)), dtype), _running_dtype(dtype))
    lw.add(Compute(out, x.shape, body, "scan", (axis,), op))
    return lw.copy(lw.value_of(out))  # the scan may lie as `x` does, the result as in eager


def _rule(op: str) -> Callable[..., Value]:
    def lowered(lw: Lowering, x: Value, dim: int, *, dtype: Any = None) -> Value:
        return scan(lw, x, dim, op, lw.meta().dtype)

    return lowered


SCAN.add(aten.cumsum.default, _rule("sum"))
SCAN.add(aten.cumprod.default, _rule("prod"))
