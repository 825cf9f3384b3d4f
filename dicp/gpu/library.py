"""Operators left to PyTorch's libraries on the device, and the lowering of colliding stores."""

from __future__ import annotations

import math

import torch

from dicp.fused_attention import FusedAttention
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr
from dicp.loop.ir.graph import Compute
from dicp.loop.lowering import RULES, Lowering, NoRule, RuleTable
from dicp.loop.lowering.library import library_call

aten = torch.ops.aten
ATTENTION = RuleTable()
EFFICIENT = aten._scaled_dot_product_efficient_attention.default


FUSED_ATTENTION = tuple(
    name
    for kind in ("flash", "efficient", "cudnn")
    for name in (
        f"_scaled_dot_product_{kind}_attention", f"_scaled_dot_product_{kind}_attention_backward",
        f"_{kind}_attention_forward", f"_{kind}_attention_backward",
    )
)  # fmt: skip
"""PyTorch's fused attention: what SDPA dispatches to, and the kernels' own operators."""

for _name in FUSED_ATTENTION:
    if hasattr(aten, _name):
        ATTENTION.add(getattr(aten, _name), library_call, "library")

DEVICE_LIBRARY = RuleTable()
"""Operators that PyTorch's libraries and kernels for the device compute, complex numbers too, and
views of complex numbers: nothing is generated in their place."""

for _name in (
    "_fft_c2c", "_fft_c2r", "_fft_r2c",
    "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd",
    "linalg_cholesky_ex", "linalg_eig", "linalg_householder_product", "linalg_inv_ex",
    "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lu", "linalg_lu_factor_ex",
    "linalg_lu_solve", "linalg_lstsq", "linalg_matrix_exp", "linalg_qr",
    "linalg_solve_triangular", "triangular_solve", "cholesky_inverse", "cholesky_solve",
    "geqrf", "ormqr", "_trilinear", "as_strided_scatter",
    "fake_quantize_per_tensor_affine_cachemask",
    "i0", "igamma", "igammac", "polygamma", "special_bessel_j0", "special_bessel_j1",
    "special_i0e", "special_i1", "special_i1e", "special_ndtri", "special_spherical_bessel_j0",
):  # fmt: skip
    DEVICE_LIBRARY.add(getattr(aten, _name), library_call, "library")
for _op in (aten.view_as_real.default, aten.view_as_complex.default, aten.view.dtype):
    DEVICE_LIBRARY.add(_op, library_call, "view")

OWN_RULES = RULES.merged(ATTENTION, DEVICE_LIBRARY)

GPU_ATTENTION = FusedAttention(
    operators=(aten._scaled_dot_product_flash_attention.default, EFFICIENT,
               aten._scaled_dot_product_cudnn_attention.default),
    dropout=True,
    adds_masks=True,
    widest_trained_head=192,
    mask_gradient=EFFICIENT,
    largest_batch=2**16 - 1,
)  # fmt: skip
"""Heads wider than 192 have no fused backward on some chips (PyTorch, sdp_utils.cpp, sm86 and
sm89). PyTorch splits batches larger than a grid dimension and adds the parts of the gradient of the
mask instead of concatenating them (attention_backward.cu)."""


class GpuLowering(Lowering):
    """Lowering that combines colliding stores in types that have hardware atomics."""

    gathers_windows = True

    def combinable(self, op: str, value: Expr) -> Expr:
        """`value` with its NaNs signed such that an atomic maximum or minimum propagates them.

        Atomics compare floats by their bits: as signed integers for a maximum, as unsigned ones
        below zero for a minimum. With this sign a NaN's bits are above every number's.
        """
        if op not in ("max", "min") or not value.dtype.is_floating_point:
            return value
        sign = ir.const(1.0 if op == "max" else -1.0, value.dtype)
        nan = ir.apply("copysign", value.dtype, ir.const(math.nan, value.dtype), sign)
        return ir.apply("where", value.dtype, ir.apply("isnan", torch.bool, value), nan, value)

    def add(self, compute: Compute) -> Compute:
        if compute.kind == "scatter" and torch.are_deterministic_algorithms_enabled():
            raise NoRule("colliding stores come in any order, and deterministic ones are asked for")
        return super().add(compute)
