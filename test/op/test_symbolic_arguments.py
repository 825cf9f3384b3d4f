"""Operators called with changing numbers: integers that become symbols may be negative or zero."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.discovery import discover
from dicp.target import find_target
from dicp.testing import BackendUnderTest
from dicp.testing.symbolic import TENSORS, Row, accepted, batches, numeric_parameters, problems_of

aten = torch.ops.aten
prims = torch.ops.prims


def _fill() -> None:
    gen = torch.Generator().manual_seed(0)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=gen)

    TENSORS.update(
        x=real(6, 7), y=real(6, 7), z=real(6, 7), a=real(6, 6), b=real(6, 6), v=real(6),
                w=real(6),
        n=whole(7, 6, 7) - 3, q=whole(4, 6, 7), mask=real(6, 7) > 0, at=whole(6, 6, 7),
        bmm=real(6, 6, 6), bmn=real(6, 6, 6), series=real(2, 3, 8), image=real(2, 4, 6, 8),
        volume=real(1, 2, 4, 6, 5), edges=torch.arange(-3.0, 3.0), labels=whole(7, 6),
                line=whole(6, 4), table=real(6, 4),
        channel=real(4), column=real(1, 7), one=real(1), kernel=real(4, 4, 3, 3), p01=real(6,
                7).sigmoid(),
        heads=real(1, 2, 6, 4), ones4=torch.ones(4), gi=real(6, 4),
                counts=torch.arange(6)
    )  # fmt: skip


_fill()
INTS = [(2,), (3,), (-2,), (0,)]
FLOATS = [(2.5,), (-1.5,), (0.0,)]
NUMBERS = [(2,), (-3,), (0,), (2.5,)]
POSITIVE = [(0.5,), (1.25,), (3.0,)]
CHANCES = [(0.25,), (0.5,), (0.0,), (1.0,)]
SIZES = [(4,), (9,), (0,), (1,), (3,)]


def pairs(first: Any, second: Any) -> list[Any]:
    return [(*a, *b) for a, b in zip(first, second, strict=False)]


def scalar(op: Any) -> Row:
    return Row(op, lambda x, c: (x, c), NUMBERS)


def integer(op: Any) -> Row:
    return Row(op, lambda n, i: (n, i), INTS)


SLICES = [(2, 5), (1, 6), (-4, -1), (-20, 3), (5, 2)]

NOT_TRACED = {
    aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default, aten.upsample_trilinear3d_backward.default,
    aten._upsample_bicubic2d_aa_backward.default, aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact3d_backward.default, aten.rand.generator, aten.randn.generator,
    aten.linalg_lstsq.default,
}  # fmt: skip
"""Operators whose shape functions in PyTorch take no symbolic sizes, or whose shapes depend on
data."""


def resampled(op, tensor, rank, more):
    """An operator that changes the size of images, and its gradient."""
    shape = TENSORS[tensor].shape
    halved, doubled, odd = ([max(1, int(s * f)) for s in shape[2:]] for f in (0.5, 2, 0.75))
    numbers = [(*halved, *[0.5] * rank), (*doubled, *[2.0] * rank), (*odd, *[0.75] * rank)]

    def forward(image: Any, *numbers: Any) -> Any:
        return (image, list(numbers[:rank]), *more, *numbers[rank:])

    def backward(*numbers: Any) -> Any:
        size, before, scales = numbers[:rank], numbers[rank : 2 * rank + 2], numbers[2 * rank + 2 :]
        return (torch.ones(*shape[:2], *size), list(size), list(before), *more, *scales)

    gradient = getattr(aten, op.__name__ + "_backward").default
    before = [(*n[:rank], *shape, *n[rank:]) for n in numbers]
    rows = [
        Row(op.default, forward, numbers, tensors=(tensor,)),
        Row(gradient, backward, before, tensors=()),
    ]
    return [row for row in rows if row.op not in NOT_TRACED]


# fmt: off
ROWS = [
    *[scalar(op) for op in (
        aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.eq.Scalar, aten.ne.Scalar,
                aten.lt.Scalar, aten.le.Scalar,
        aten.gt.Scalar, aten.ge.Scalar, aten.clamp_min.default, aten.clamp_max.default,
                aten.fmod.Scalar, aten.remainder.Scalar,
        aten.div.Scalar, aten.true_divide.Scalar, aten.floor_divide.Scalar, aten.copysign.Scalar,
                aten.fill.Scalar, aten.full_like.default,
        aten.leaky_relu.default, aten.rsub.Scalar, aten.pow.Tensor_Scalar,
    )],
    *[integer(op) for op in (
        aten.add.Scalar, aten.mul.Scalar, aten.bitwise_and.Scalar, aten.bitwise_or.Scalar,
        aten.bitwise_xor.Scalar, aten.eq.Scalar, aten.clamp_min.default, aten.div.Scalar)],
    *[Row(op, lambda n, i: (n, i), [(2,), (3,), (-2,), (1,)]) for op in (aten.fmod.Scalar,
            aten.remainder.Scalar, aten.floor_divide.Scalar)],
    *[Row(op, lambda n, i: (n, i), [(2,), (3,), (0,), (1,)]) for op in (aten.__lshift__.Scalar,
            aten.__rshift__.Scalar,
         aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar,
                 aten.pow.Tensor_Scalar)],
    *[Row(op, lambda n, i: (i, n), INTS) for op in (aten.bitwise_and.Scalar_Tensor,
            aten.bitwise_or.Scalar_Tensor, aten.bitwise_xor.Scalar_Tensor)],
    Row(aten.remainder.Scalar_Tensor, lambda x, c: (c, x), NUMBERS),
    Row(aten.fake_quantize_per_tensor_affine_cachemask.default, lambda x, c: (x, c, 1, -8, 7),
            POSITIVE),
    Row(aten._fft_c2c.default, lambda x, d: (torch.complex(x, x), [d], 0, True), [(0,), (1,)]),
    Row(aten._fft_c2r.default, lambda x, size: (torch.complex(x, x), [1], 2, size),
            [(12,), (13,), (7,)]),
    *[Row(op, lambda q, i: (i, q), INTS) for op in (aten.bitwise_left_shift.Scalar_Tensor,
            aten.bitwise_right_shift.Scalar_Tensor)],
    Row(aten.pow.Scalar, lambda x, c: (c, x), [(2,), (3,), (0,), (2.5,), (0.5,)]),
    *[Row(aten.div.Scalar_mode, lambda x, c, m=m: (x, c, {"rounding_mode": m}), [(2,), (3,),
            (-2,), (1.5,), (-0.75,)]) for m in ("floor", "trunc")],
    *[Row(aten.div.Scalar_mode, lambda n, c, m=m: (n, c, {"rounding_mode": m}), [(2,), (3,),
            (-2,), (1,)]) for m in ("floor", "trunc")],
    Row(aten.add.Scalar, lambda x, c, d: (x, c, d), pairs(NUMBERS, NUMBERS[1:])),
    Row(aten.sub.Scalar, lambda x, c, d: (x, c, d), pairs(NUMBERS, NUMBERS[1:])),
    Row(aten.rsub.Scalar, lambda x, c, d: (x, c, d), pairs(NUMBERS, NUMBERS[1:])),
    *[Row(op, lambda x, y, c: (x, y, {"alpha": c}), NUMBERS) for op in (aten.add.Tensor,
            aten.sub.Tensor, aten.rsub.Tensor)],
    *[Row(op, lambda n, q, c: (n, q, {"alpha": c}), INTS) for op in (aten.add.Tensor,
            aten.sub.Tensor, aten.rsub.Tensor)],
    *[Row(op, lambda x, y, z, c: (x, y, z, {"value": c}), NUMBERS)
            for op in (aten.addcmul.default, aten.addcdiv.default)],
    Row(aten.addmm.default, lambda a, b, c, d: (a, a, b, {"beta": c, "alpha": d}), pairs(NUMBERS,
            NUMBERS[1:])),
    Row(aten.addmv.default, lambda v, a, w, c, d: (v, a, w, {"beta": c, "alpha": d}),
            pairs(NUMBERS, NUMBERS[1:])),
    Row(aten.addr.default, lambda a, v, w, c, d: (a, v, w, {"beta": c, "alpha": d}),
            pairs(NUMBERS, NUMBERS[1:])),
    Row(aten.addbmm.default, lambda a, bmm, bmn, c, d: (a, bmm, bmn, {"beta": c, "alpha": d}),
            pairs(NUMBERS, NUMBERS[1:])),
    Row(aten.baddbmm.default, lambda bmm, bmn, c, d: (bmm, bmm, bmn, {"beta": c, "alpha": d}),
            pairs(NUMBERS, NUMBERS[1:])),
    Row(aten.clamp.default, lambda x, c, d: (x, c, d), [(-1, 1), (0, 2), (1, -1), (0.5, 0.75),
            (-0.5, 0.0)]),
    Row(aten.clamp.default, lambda n, c, d: (n, c, d), [(-1, 1), (0, 2), (1, -1), (-2, -1)]),
    Row(aten.hardtanh.default, lambda x, c, d: (x, c, d), [(-1, 1), (0, 2), (0.5, 0.75)]),
    Row(aten.hardtanh_backward.default, lambda x, y, c, d: (x, y, c, d), [(-1, 1), (0, 2), (0.5,
            0.75)]),
    Row(aten.leaky_relu_backward.default, lambda x, y, c: (x, y, c, False), NUMBERS),
    Row(aten.elu.default, lambda x, c, d, e: (x, c, d, e), [(1, 2, 3), (0.5, 1.5, 2.5), (2, 1,
            1)]),
    Row(aten.elu_backward.default, lambda x, y, c, d, e: (x, c, d, e, False, y), [(1, 2, 3),
            (0.5, 1.5, 2.5), (2, 1, 1)]),
    Row(aten.softplus.default, lambda x, c, d: (x, c, d), [(1, 20), (2, 0), (0.5, 1.5), (1.5,
            -1)]),
    Row(aten.softplus_backward.default, lambda x, y, c, d: (x, y, c, d), [(1, 20), (2, 0), (0.5,
            1.5), (1.5, -1)]),
    Row(aten.threshold.default, lambda x, c, d: (x, c, d), pairs(NUMBERS, NUMBERS[1:])),
    Row(aten.threshold_backward.default, lambda x, y, c: (x, y, c), NUMBERS),
    Row(aten.lerp.Scalar, lambda x, y, c: (x, y, c), NUMBERS),
    Row(aten.masked_fill.Scalar, lambda x, mask, c: (x, mask, c), NUMBERS),
    Row(aten.masked_fill.Scalar, lambda n, mask, c: (n, mask, c), INTS),
    Row(aten.index_fill.int_Scalar, lambda x, c: (x, 0, torch.tensor([0]), c), NUMBERS),
    Row(aten.max_unpool2d.default, lambda image, i, j: (image[:, :, :2, :2], torch.arange(
            4).reshape(2, 2).expand(*image.shape[:2], 2, 2), [i, j]), [(2, 2), (3, 4), (4, 1)]),
    Row(aten.max_unpool3d.default, lambda volume, i, j, k: (volume[..., :2, :2, :2], torch.arange(
            8).reshape(2, 2, 2).expand(*volume.shape[:2], 2, 2, 2), [i, j, k], [2, 2, 2], [0, 0,
            0]), [(2, 2, 2), (3, 2, 4), (8, 1, 1)]),
    Row(aten.where.Scalar, lambda mask, c, d: (mask, c, d), pairs(NUMBERS, NUMBERS[1:])),
    Row(aten.where.ScalarOther, lambda mask, x, c: (mask, x, c), NUMBERS),
    Row(aten.where.ScalarSelf, lambda mask, x, c: (mask, c, x), NUMBERS),
    Row(aten.nan_to_num.default, lambda x, c, d, e: (x, c, d, e), [(1.5, 2.5, -1.0), (0.0, 1.0,
            2.0)]),
    Row(aten.histc.default, lambda x, c, d: (x, 5, c, d), [(-1, 1), (0, 2), (-0.5, 0.75)],
            bad=[(2, 1)]),
    Row(aten.index_add.default, lambda a, v, labels, w, c: (v, 0, labels % 6, w, {"alpha": c}),
            NUMBERS),
    Row(aten.scatter.value, lambda x, at, c: (x, 0, at, c), NUMBERS),
    Row(aten.scatter.value_reduce, lambda x, at, c: (x, 0, at, c, {"reduce": "add"}), NUMBERS),
    Row(aten.searchsorted.Scalar, lambda edges, c: (edges, c), NUMBERS),
    Row(aten.bucketize.Scalar, lambda edges, c: (c, edges), NUMBERS),
    Row(aten.scalar_tensor.default, lambda c: (c, {}), NUMBERS),
    Row(aten.scalar_tensor.default, lambda c: (c, {"dtype": torch.float32}), INTS),
    *[Row(op, lambda x, c: (x, [0], {"correction": c}), [(1,), (0,), (2,), (0.5,), (-1,)])
            for op in (aten.std.correction, aten.var.correction, aten.std_mean.correction,
            aten.var_mean.correction)],
    # p-norms
    Row(aten._cdist_forward.default, lambda a, b, c: (a, b, c, 2), [(1.0,), (3.0,), (2.0,),
            (0.5,), (0.0,)], bad=[(-1.0,)]),
    Row(aten._cdist_backward.default, lambda a, b, c: (torch.ones(6, 6), a, b, c, torch.cdist(a,
            b, c)), [(1.0,), (3.0,), (2.0,)]),
    Row(aten._pdist_forward.default, lambda a, c: (a, c), [(1.0,), (3.0,), (2.0,), (0.0,)]),
    Row(aten._pdist_backward.default, lambda a, c: (torch.ones(15), a, c, torch.pdist(a, c)),
            [(1.0,), (3.0,), (2.0,)]),
    Row(aten._fused_rms_norm.default, lambda x, c: (x, [7], None, c), POSITIVE),
    Row(aten.native_layer_norm.default, lambda x, i, c: (x, [i], None, None, c), [(7, 0.5), (7,
            1.25), (7, 0.0)], bad=[(6, 0.5)]),
    Row(aten.native_layer_norm_backward.default, lambda x, y, i: (x, y, [i], y.mean(1, True),
            y.std(1, keepdim=True), None, None, [True, False, False]), [(7,), (7,)]),
    Row(aten.native_group_norm.default, lambda image, i, j, k, c: (image, None, None, i, j, k, 2,
            c), [(2, 4, 48, 0.5), (2, 4, 48, 1.25)]),
    Row(aten._native_batch_norm_legit_no_training.default, lambda image, channel, ones4, c,
            d: (image, None, None, channel, ones4, c, d), [(0.5, 0.25), (0.25, 0.5)]),
    Row(aten._native_batch_norm_legit_functional.default, lambda image, channel, ones4, c,
            d: (image, None, None, channel, ones4, True, c, d), [(0.5, 0.25), (0.25, 0.5), (-0.5,
            1.0)]),
    Row(aten._native_batch_norm_legit.no_stats, lambda image, c, d: (image, None, None, True, c,
            d), [(0.5, 0.25), (0.25, 0.5)]),
    Row(aten.native_batch_norm_backward.default, lambda image, channel, ones4, c: (image, image,
            None, channel, ones4, channel, ones4, True, c, [True, False, False]), [(0.5,),
            (0.25,)]),
    Row(aten._scaled_dot_product_flash_attention_for_cpu.default, lambda heads, d: (heads, heads,
            heads, 0.0, False, {"scale": d}), [(0.5,), (0.25,), (0.125,)]),
    # random
    *[Row(op, lambda x, c, d: (x, c, d), [(0.5, 1.5), (0.25, 1.25), (-1.0, 2.0)], bad=[(2.0,
            -1.0)], random=True) for op in (aten.cauchy.default, aten.log_normal.default,
            aten.normal_functional.default, aten.uniform.default)],
    *[Row(op, lambda x, c: (x, c), [(0.5,), (0.25,), (0.75,)], bad=[(0.0,), (-1.0,)],
            random=True) for op in (aten.exponential.default, aten.geometric.default)],
    Row(aten.bernoulli.p, lambda x, c: (x, c), CHANCES, bad=[(-0.5,), (1.5,)], random=True),
    Row(aten.native_dropout.default, lambda x, c: (x, c, True), CHANCES, bad=[(-0.5,), (1.5,)],
            random=True),
    Row(aten.normal.Tensor_float, lambda x, c: (x, c), POSITIVE, bad=[(-1.0,)], random=True),
    Row(aten.normal.float_Tensor, lambda p01, c: (c, p01), FLOATS, random=True),
    Row(aten.normal.float_float, lambda c, d, i: (c, d, [i]), [(0.5, 1.0, 4), (-1.0, 0.25, 9),
            (0.0, 2.0, 0)], random=True),
    Row(aten.randint.default, lambda i, j: (i, [j], {}), [(5, 4), (9, 8), (2, 0), (1, 3)],
            bad=[(0, 3), (-1, 3), (4, -1)], random=True),
    Row(aten.randint.low, lambda i, j, k: (i, j, [k], {}), [(2, 5, 4), (-3, 9, 8), (-7, -2, 1),
            (0, 1, 0)], bad=[(5, 2, 3)], random=True),
    Row(aten.randint_like.default, lambda x, i: (x, i), [(5,), (9,), (1,)], bad=[(0,)],
            random=True),
    Row(aten.randint_like.low_dtype, lambda x, i, j: (x, i, j), [(2, 5), (-3, 9), (-7, -2)],
            bad=[(5, 2)], random=True),
    Row(aten.randperm.default, lambda i: (i, {}), SIZES, bad=[(-1,)], random=True),
    *[Row(op, lambda i: ([i, 3], {}), SIZES, bad=[(-1,)], random=True)
            for op in (aten.rand.default, aten.randn.default, aten.empty.memory_format)],
    # creation
    *[Row(op, lambda i: ([i, 3], {}), SIZES, bad=[(-1,)]) for op in (aten.zeros.default,
            aten.ones.default)],
    Row(aten.full.default, lambda i, c: ([i, 3], c), pairs(SIZES, NUMBERS), bad=[(-1, 2)]),
    *[Row(op, lambda x, i: (x, [i, 3]), SIZES, bad=[(-1,)]) for op in (aten.new_ones.default,
            aten.new_zeros.default)],
    Row(aten.new_empty.default, lambda x, i: (x, [i, 3]), SIZES, bad=[(-1,)], random=True),
    Row(aten.new_full.default, lambda x, i, c: (x, [i, 3], c), pairs(SIZES, NUMBERS), bad=[(-1,
            2)]),
    Row(aten.empty_strided.default, lambda i, j: ([i, 3], [j, 1]), [(4, 3), (9, 5), (1, 0), (2,
            1), (0, 3)], bad=[(-1, 3), (3, -1)], random=True),
    Row(aten.new_empty_strided.default, lambda x, i, j: (x, [i, 3], [j, 1]), [(4, 3), (9, 5), (1,
            0), (0, 3)], bad=[(-1, 3)], random=True),
    Row(aten.empty_permuted.default, lambda i: ([i, 3], [1, 0]), SIZES, bad=[(-1,)], random=True),
    Row(aten.zeros.default, lambda i, j: ([i, j], {}), pairs(SIZES, SIZES[1:])),
    Row(aten.arange.default, lambda c: (c, {}), [(4,), (9,), (0,), (2.5,), (1,)], bad=[(-1,)]),
    Row(aten.arange.start, lambda c, d: (c, d), [(2, 5), (-3, 9), (-7, -2), (4, 4), (0, 2.5)],
            bad=[(5, 2)]),
    Row(aten.arange.start_step, lambda c, d, e: (c, d, e), [(2, 9, 3), (-3, 9, 2), (5, -2, -3),
            (9, 1, -1), (0, 2.5, 0.5)], bad=[(5, 2, 1), (1, 5, -1), (1, 5, 0)]),
    Row(prims.iota.default, lambda i, j, k: (i, {"start": j, "step": k, "dtype": torch.int64,
            "device": torch.device("cpu"), "requires_grad": False}), [(4, 2, 3), (9, -3, -2), (0,
            1, 1), (1, 0, -5)]),
    # views
    Row(aten.slice.Tensor, lambda x, i, j: (x, 1, i, j), SLICES),
    Row(aten.slice.Tensor, lambda x, i: (x, 0, i), [(2,), (3,), (-2,), (100,), (-100,)]),
    Row(aten.slice.Tensor, lambda x, i, j, k: (x, 1, i, j, k), [(*s, k) for s, k in zip(SLICES,
            [2, 3, 1, 2, 4, 9, 1, 2, 3], strict=False)], bad=[(0, 5, 0), (0, 5, -1)]),
    Row(aten.slice_copy.Tensor, lambda x, i, j, k: (x, 1, i, j, k), [(*s, k) for s,
            k in zip(SLICES, [2, 3, 1, 2, 4, 9, 1, 2, 3], strict=False)]),
    Row(aten.slice_scatter.default, lambda x, y, i, j: (x, y[:, i:j], 1, i, j), SLICES),
    Row(aten.slice_scatter.default, lambda x, y, i, j, k: (x, y[:, i:j:k], 1, i, j, k), [(*s, k)
            for s, k in zip(SLICES, [2, 3, 1, 2, 4, 9, 1, 2, 3], strict=False)]),
    Row(aten.narrow.default, lambda x, i, j: (x, 1, i, j), [(2, 3), (1, 6), (-4, 3), (7, 0), (0,
            7)], bad=[(5, 4), (-8, 1), (2, -1), (-3, 4)]),
    *[Row(op, lambda x, i: (x, 1, i), [(2,), (3,), (-1,), (-7,), (0,)], bad=[(7,), (-8,)])
            for op in (aten.select.int, aten.select_copy.int)],
    Row(aten.select_scatter.default, lambda x, v, i: (x, v, 1, i), [(2,), (3,), (-1,), (-7,),
            (0,)], bad=[(7,), (-8,)]),
    *[Row(op, lambda x, i, j, k: (x, [i, 3], [j, 2], k), [(4, 5, 1), (2, 7, 3), (1, 0, 0), (5, 1,
            30), (0, 3, 2)], bad=[(-1, 5, 1)])
            for op in (aten.as_strided.default, aten.as_strided_copy.default)],
    *[Row(op, lambda x, i, j: (x.reshape(42), [i, j]), [(6, 7), (7, 6), (-1, 2), (1, -1), (42,
            1)], bad=[(5, 8), (0, 42), (-1, -1)])
            for op in (aten.view.default, aten.view_copy.default, aten.reshape.default,
            aten._unsafe_view.default)],
    *[Row(op, lambda column, i, j: (column, [i, j]), [(4, 7), (9, 7), (1, -1), (0, 7), (-1, 7)],
            bad=[(4, 6)]) for op in (aten.expand.default, aten.expand_copy.default,
            aten.broadcast_to.default)],
    Row(aten.repeat.default, lambda x, i, j: (x, [i, j]), [(2, 3), (3, 1), (0, 2), (1, 1), (1,
            4)], bad=[(-1, 2)]),
    *[Row(op, lambda x, i, j, k: (x, [i, j, k], 1), [(2, 3, 2), (3, 4, 0), (0, 0, 7), (1, 1, 5)],
            bad=[(2, 3, 4), (-1, 4, 4)]) for op in (aten.split_with_sizes.default,
            aten.split_with_sizes_copy.default)],
    *[Row(op, lambda x, i: (x, i, 1), [(2,), (3,), (7,), (9,), (1,)], bad=[(-1,), (0,)])
            for op in (aten.split.Tensor, aten.split_copy.Tensor)],
    Row(aten.roll.default, lambda x, i, j: (x, [i, j], [0, 1]), [(2, 3), (3, -2), (0, 100),
            (-100, -1), (1, 0)]),
    Row(aten.roll.default, lambda x, i: (x, [i]), [(2,), (3,), (-2,), (-100,), (100,)]),
    *[Row(op, lambda x, i: (x, i), [(2,), (3,), (-2,), (100,), (-100,)])
            for op in (aten.tril.default, aten.triu.default)],
    *[Row(op, lambda x, i: (x, i), [(2,), (3,), (-2,), (100,), (-100,)])
            for op in (aten.diagonal.default, aten.diagonal_copy.default)],
    Row(aten.diagonal_scatter.default, lambda x, y, i: (x, y.diagonal(i), i), [(2,), (3,), (0,),
            (-2,), (-1,)]),
    *[Row(op, lambda x, i, j: (x, 1, i, j), [(2, 3), (3, 2), (1, 1), (7, 1), (0, 2)], bad=[(8,
            1), (2, 0), (-1, 1)]) for op in (aten.unfold.default, aten.unfold_copy.default)],
    Row(aten.constant_pad_nd.default, lambda x, i, j, k, h, c: (x, [i, j, k, h], c), [(1, 2, 3, 4,
            0),
         (2, 1, 4, 3, 1.5), (-1, 2, 0, -3, -1), (2, -7, -2, -4, 1), (3, -3, -5, -1, 1)], bad=[(-4,
                 -4, 0, 0, 0)]),
    Row(aten.reflection_pad1d.default, lambda series, i, j: (series, [i, j]), [(1, 2), (3, 7), (0,
            0), (-1, 2), (-2, -3)], bad=[(8, 0), (0, 9)]),
    Row(aten.replication_pad1d.default, lambda series, i, j: (series, [i, j]), [(1, 2), (3, 7),
            (9, 0), (-1, 2), (-2, -3)], bad=[(-4, -4)]),
    Row(aten.reflection_pad2d.default, lambda image, i, j, k, h: (image, [i, j, k, h]), [(1, 2,
            3, 4), (2, 1, 4, 3), (0, 0, 0, 1), (-1, 2, 0, -3)], bad=[(8, 0, 0, 0)]),
    Row(aten.replication_pad2d.default, lambda image, i, j, k, h: (image, [i, j, k, h]), [(1, 2,
            3, 4), (2, 1, 4, 3), (0, 0, 0, 1), (-1, 2, 0, -3)]),
    Row(aten.reflection_pad3d.default, lambda volume, i, j, k, h, m, o: (volume, [i, j, k, h, m,
            o]), [(1, 2, 3, 4, 2, 1), (2, 1, 4, 3, 1, 0), (0, 0, 0, 1, 2, 3)], bad=[(5, 0, 0, 0,
            0, 0)]),
    Row(aten.replication_pad3d.default, lambda volume, i, j, k, h, m, o: (volume, [i, j, k, h, m,
            o]), [(1, 2, 3, 4, 2, 1), (2, 1, 4, 3, 1, 0), (0, 0, 0, 1, 2, 3), (-1, 2, 0, -3, 0,
            1)]),
    # search
    Row(aten.topk.default, lambda x, i: (x, i, 1), [(2,), (3,), (0,), (7,), (1,)], bad=[(8,),
            (-1,)]),
    Row(aten.kthvalue.default, lambda x, i: (x, i, 1), [(2,), (3,), (7,), (1,)], bad=[(0,), (8,),
            (-1,)]),
    Row(aten.embedding.default, lambda table, line, i: (table, line, i), [(2,), (3,), (0,),
            (-1,)]),
    Row(aten.embedding_dense_backward.default, lambda gi, line, i, j: (gi[:4], line, i, j,
            False), [(6, 2), (9, 3), (7, 0), (8, -1)]),
    Row(aten.nll_loss_forward.default, lambda x, labels, i: (x, labels, None, 1, i), [(2,), (3,),
            (0,), (-100,), (-1,)]),
    Row(aten.nll_loss_backward.default, lambda one, x, labels, i: (one[0], x, labels, None, 2, i,
            one[0]), [(2,), (3,), (0,), (-100,), (-1,)]),
    Row(aten.masked_scatter_backward.default, lambda x, mask, i, j: (x, mask, [i, j]), [(5, 7),
            (6, 7), (7, 6), (42, 1)]),
    # convolution
    Row(aten.convolution.default, lambda image, kernel, i, j, k: (image, kernel, None, [i, i],
            [j, j], [k, k], False, [0, 0], 1), [(1, 1, 1), (2, 2, 1), (3, 0, 2), (1, 3, 2)],
            bad=[(0, 1, 1), (1, -1, 1)]),
    Row(aten.convolution.default, lambda image, kernel, i, j: (image, kernel, None, [2, 2], [1,
            1], [1, 1], True, [i, j], 1), [(1, 1), (0, 1), (0, 0)]),
    Row(aten.convolution.default, lambda image, kernel, i: (image, kernel[:, : 4 // i], None, [1,
            1], [1, 1], [1, 1], False, [0, 0], i), [(1,), (2,), (4,)]),
    Row(aten.convolution_backward.default, lambda image, kernel, i, j, k, h, m: (
        torch.ones_like(aten.convolution(image, kernel, None, [i, i], [j, j], [k, k], False, [0,
                0], 1)), image, kernel, [h], [i, i], [j, j], [k, k], False, [m, m], 1, [True,
                True, True]),
        [(1, 1, 1, 4, 0), (2, 2, 1, 4, 0), (3, 0, 2, 4, 0)]),
    Row(aten.convolution_backward.default, lambda image, kernel, i: (image, image, kernel[:,
            : 4 // i], [4], [1, 1], [1, 1], [1, 1], False, [0, 0], i, [True, True, True]), [(1,),
            (2,), (4,)]),
    Row(aten._adaptive_avg_pool2d.default, lambda image, i, j: (image, [i, j]), [(3, 4), (2, 8),
            (5, 3), (1, 1)], bad=[(-1, 2)]),
    Row(aten._adaptive_avg_pool3d.default, lambda volume, i, j, k: (volume, [i, j, k]), [(2, 3,
            5), (4, 2, 1), (3, 4, 2), (1, 1, 1)], bad=[(-1, 2, 2)]),
    *[Row(op, lambda series, i, j, op=pad: (torch.ones_like(op(series, [i, j])), series, [i, j]),
            [(1, 2), (3, 4), (0, 0), (2, 0)])
      for op, pad in ((aten.reflection_pad1d_backward.default, aten.reflection_pad1d),
              (aten.replication_pad1d_backward.default, aten.replication_pad1d))],
    *[Row(op, lambda image, i, j, k, h, op=pad: (torch.ones_like(op(image, [i, j, k, h])), image,
            [i, j, k, h]), [(1, 2, 3, 4), (2, 1, 4, 3), (0, 0, 0, 1)])
      for op, pad in ((aten.reflection_pad2d_backward.default, aten.reflection_pad2d),
              (aten.replication_pad2d_backward.default, aten.replication_pad2d))],
    *[Row(op, lambda volume, i, j, k, h, m, o, op=pad: (torch.ones_like(op(volume, [i, j, k, h,
            m, o])), volume, [i, j, k, h, m, o]), [(1, 2, 3, 4, 2, 1), (2, 1, 4, 3, 1, 0), (0, 0,
            0, 1, 2, 3)])
      for op, pad in ((aten.reflection_pad3d_backward.default, aten.reflection_pad3d),
              (aten.replication_pad3d_backward.default, aten.replication_pad3d))],
    Row(aten.native_group_norm_backward.default, lambda image, i, j, k: (image, image, image[:,
            :2, 0, 0].contiguous(), image[:, 2:, 0, 0].contiguous(), None, i, j, k, 2, [True,
                    False, False]), [(2, 4, 48),
            (2, 4, 48)]),
    Row(aten._embedding_bag_dense_backward.default, lambda gi, labels, counts, i: (gi,
            labels % 4, counts, torch.ones_like(counts), counts, i, False, 0, None, -1), [(7,),
            (9,), (4,)]),
    Row(aten._embedding_bag_backward.default, lambda gi, labels, counts, i: (gi, labels % 4,
            counts, counts, torch.ones_like(counts), counts, i, False, 0, False, None, -1),
            [(7,), (9,), (4,)]),
    Row(aten._scaled_dot_product_flash_attention_for_cpu.default, lambda heads, c: (heads, heads,
            heads, c), [(0.0,), (0.0,)]),
    Row(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, lambda heads, c, d: (
            heads, heads, heads, heads,
            *aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads, c, scale=d),
            c, False, {"scale": d}), [(0.0, 0.5), (0.0, 0.25)]),
    Row(aten.as_strided_scatter.default, lambda x, i, j, k: (x, torch.ones(i, 3), [i, 3], [j, 1],
            k), [(4, 5, 1), (2, 7, 3), (1, 4, 0), (0, 3, 2)]),
    *[row for op, tensor, rank, more in (
        (aten.upsample_linear1d, "series", 1, (False,)), (aten.upsample_bilinear2d, "image", 2,
                (True,)), (aten.upsample_bicubic2d, "image", 2, (False,)),
                (aten.upsample_trilinear3d, "volume", 3, (False,)),
        (aten._upsample_bilinear2d_aa, "image", 2, (False,)), (aten._upsample_bicubic2d_aa,
                "image", 2, (False,))) for row in resampled(op, tensor, rank, more)],
    *[row for op, tensor, rank in (
        (aten.upsample_nearest1d, "series", 1), (aten.upsample_nearest2d, "image", 2),
                (aten.upsample_nearest3d, "volume", 3),
        (aten._upsample_nearest_exact1d, "series", 1), (aten._upsample_nearest_exact2d, "image",
                2), (aten._upsample_nearest_exact3d, "volume", 3)) for row in resampled(op,
                tensor, rank, ()) if "backward" in row.name],
]
# fmt: on


def spelled(name: str, fn: Any, arguments: Any, *numbers: Any, bad: Any = ()) -> Row:
    fn.__name__ = name
    return Row(fn, arguments, list(numbers), bad)


# fmt: off
SPELLED = [
    spelled("attention", lambda q, c: F.scaled_dot_product_attention(q, q, q, is_causal=True,
            scale=c), lambda heads, c: (heads, c), (0.5,), (0.25,)),
    spelled("index_slice", lambda x, i, j: x[:, i:j] + 1, lambda x, i, j: (x, i, j), *SLICES),
    spelled("index_from", lambda x, i: x[i:] * 2, lambda x, i: (x, i), (2,), (3,), (-2,), (100,),
            (-100,)),
    spelled("index_to", lambda x, i: x[:, :i] * 2, lambda x, i: (x, i), (2,), (3,), (-2,), (100,),
            (-100,)),
    spelled("index_int", lambda x, i: x[i] * 2, lambda x, i: (x, i), *INTS, bad=[(6,), (-7,)]),
    spelled("index_both", lambda x, i, j: x[i, j] * 2, lambda x, i, j: (x, i, j), (1, 2), (2, 3),
            (0, -1), (-6, 0), bad=[(6, 0)]),
    spelled("set_slice", lambda x, i, j: torch.clone(x).index_fill_(0, torch.tensor([0]), 1.0)[:,
            i:j].mul(2), lambda x, i, j: (x, i, j), *SLICES),
    spelled("pad", lambda x, i, j: F.pad(x, (i, j)), lambda x, i, j: (x, i, j), (1, 2), (2, 1),
            (-1, 2), (2, -7), (3, -3), bad=[(-4, -4)]),
    spelled("pad_circular", lambda x, i, j: F.pad(x[None], (i, j), mode="circular"), lambda x, i,
            j: (x, i, j), (1, 2), (2, 1), (0, 0), (7, 3), (-1, 2)),
    spelled("arange", lambda i, j: torch.arange(i, j) * 2, lambda i, j: (i, j), (2, 5), (-3, 9),
            (-7, -2), (4, 4)),
    spelled("arange_step", lambda i, j, k: torch.arange(i, j, k) * 2, lambda i, j, k: (i, j, k),
            (2, 9, 3), (-3, 9, 2), (5, -2, -3), (9, 1, -1), bad=[(1, 5, -1)]),
    spelled("roll", lambda x, i: torch.roll(x, i, 1) + 1, lambda x, i: (x, i), *INTS, (100,),
            (-100,)),
    spelled("gather", lambda x, i: x.gather(1, torch.arange(i)[None].expand(6, i) * 2 % 7),
            lambda x, i: (x, i), (2,), (3,), (0,), (7,), (1,)),
    spelled("gather_at", lambda x, n, i: x.gather(1, n[0, i:].abs()[:0]),
            lambda x, n, i: (x, n, i), *INTS),
    spelled("scatter_at", lambda x, n, i: x.scatter(1, n[0, i:].abs()[:0], x),
            lambda x, n, i: (x, n, i), *INTS),
    spelled("gather_dim", lambda x, at, i: x.gather(i, at[:, :6]), lambda x, at, i: (x, at, i),
            (0,), (1,), (-1,), (-2,), bad=[(2,)]),
    spelled("cumsum_dim", lambda x, i: x.cumsum(i), lambda x, i: (x, i), (0,), (1,), (-1,),
            (-2,), bad=[(2,), (-3,)]),
    spelled("sum_dim", lambda x, i: x.sum(i), lambda x, i: (x, i), (0,), (1,), (-1,), (-2,),
            bad=[(2,), (-3,)]),
    spelled("full", lambda i, c: torch.full((i, 2), c), lambda i, c: (i, c), *pairs(SIZES, INTS)),
    spelled("mod", lambda n, i: n % i, lambda n, i: (n, i), (2,), (3,), (-2,), (-3,)),
    spelled("size_mod", lambda x, i: x[:, i % 5 :] * (i // 3), lambda x, i: (x, i), (2,), (3,),
            (0,), (-7,), (11,)),
    spelled("size_arith", lambda x, i, j: x + (i * j - j) // 4 + i % 7, lambda x, i, j: (x, i,
            j), (2, 3), (3, -2), (0, 100), (-100, -1), (1, 0)),
    spelled("size_divisor", lambda x, i, j: x + i // j + i % j, lambda x, i, j: (x, i, j), (2,
            3), (3, -2), (0, 100), (-100, -3), (7, 2)),
    spelled("size_true_div", lambda x, i, j: x * (i / j), lambda x, i, j: (x, i, j), (2, 3), (3,
            -2), (0, 100), (-100, -3), (7, 2)),
    spelled("size_power", lambda x, i: x * i**2 + abs(i) + max(i, 2) + min(i, -1), lambda x,
            i: (x, i), (2,), (3,), (0,), (-7,), (11,)),
    spelled("float_math", lambda x, c, d: x * (c - d) + c * d, lambda x, c, d: (x, c, d), (2.5,
            1.5), (-1.5, 0.5), (0.0, -1.0), (0.25, 3.0)),
    spelled("view_slice", lambda x, i: x[i : i + 2].reshape(-1) * i, lambda x, i: (x, i), (2,),
            (3,), (0,), (-3,), (-6,)),
    spelled("slice_cat", lambda x, i: torch.cat([x[:, i:], x[:, :i]], 1), lambda x, i: (x, i),
            (2,), (-2,), (0,), (7,), (-7,)),
    spelled("slice_sum", lambda x, i, j: x[:, i:j].sum(1), lambda x, i, j: (x, i, j), *SLICES),
    spelled("slice_softmax", lambda x, i, j: x[:, i:j].softmax(1), lambda x, i, j: (x, i, j),
            *SLICES),
    spelled("slice_matmul", lambda x, y, i: x[:, i:] @ y[:, i:].t(), lambda x, y, i: (x, y, i),
            *INTS),
    spelled("repeat_interleave", lambda x, i: x.repeat_interleave(i, 1), lambda x, i: (x, i),
            (2,), (3,), (0,), (1,), bad=[(-1,)]),
    spelled("unflatten", lambda x, i, j: x.reshape(42).unflatten(0, (i, j)), lambda x, i, j: (x,
            i, j), (6, 7), (7, 6), (-1, 2), (2, -1)),
    spelled("narrow_narrow", lambda x, i, j: x.narrow(1, i, j).narrow(0, i, 2) + i, lambda x, i,
            j: (x, i, j), (2, 3), (1, 6), (0, 7), (-4, 3)),
    spelled("flip_slice", lambda x, i: x.flip(1)[:, i:] + x[:, i:], lambda x, i: (x, i), *INTS),
    spelled("diag", lambda v, i: torch.diag(v, i), lambda v, i: (v, i), *INTS),
    spelled("tril_ones", lambda i, j: torch.ones(i, i).tril(j), lambda i, j: (i, j), (4, 1), (5,
            -1), (3, 0), (6, -7)),
    spelled("tril_indices", lambda i, j: torch.tril_indices(i, 4, j), lambda i, j: (i, j), (4,
            1), (5, -1), (3, 0)),
    spelled("chunk_slice", lambda x, i: [c + i for c in x.split([2, 4])][1][:, i:], lambda x,
            i: (x, i), *INTS),
    spelled("linspace", lambda c, d: torch.linspace(c, d, 5), lambda c, d: (c, d), (0, 1), (2,
            -3), (0.5, 1.5), (-1.0, 0.0)),
    spelled("linspace_steps", lambda i: torch.linspace(0, 1, i), lambda i: (i,), (5,), (7,),
            (0,), (1,)),
    spelled("eye", lambda i, j: torch.eye(i, j), lambda i, j: (i, j), (4, 5), (6, 3), (0, 2), (1,
            1)),
    spelled("one_hot", lambda q, i: F.one_hot(q, i), lambda q, i: (q, i), (5,), (9,), (4,)),
    spelled("pixel", lambda image, i: F.pixel_unshuffle(image, i), lambda image, i: (image, i),
            (2,), (1,)),
    spelled("interpolate", lambda image, i, j: F.interpolate(image, (i, j)), lambda image, i,
            j: (image, i, j), (3, 4), (12, 16), (7, 5), (1, 1)),
    spelled("interpolate_scale", lambda image, c: F.interpolate(image, scale_factor=c,
            mode="bilinear"), lambda image, c: (image, c), (2.0,), (1.5,), (0.5,)),
    spelled("adaptive", lambda image, i, j: F.adaptive_avg_pool2d(image, (i, j)), lambda image,
            i, j: (image, i, j), (3, 4), (2, 8), (5, 3), (1, 1)),
    spelled("max_pool", lambda image, i, j: F.max_pool2d(image, i, j), lambda image, i,
            j: (image, i, j), (3, 2), (2, 1), (1, 3)),
    spelled("avg_pool", lambda image, i, j: F.avg_pool2d(image, i, j), lambda image, i,
            j: (image, i, j), (3, 2), (2, 1), (1, 3)),
    spelled("dropout", lambda x, c: F.dropout(x, c) * 0, lambda x, c: (x, c), (0.5,), (0.25,),
            (0.0,)),
    spelled("norm", lambda x, c: torch.linalg.vector_norm(x, c), lambda x, c: (x, c), (2,), (3,),
            (0,), (1.5,), (-1,)),
    spelled("logits", lambda x, i: F.cross_entropy(x, torch.arange(6), ignore_index=i), lambda x,
            i: (x, i), (2,), (3,), (0,), (-1,)),
    spelled("smooth", lambda x, c: F.cross_entropy(x, torch.arange(6), label_smoothing=c),
            lambda x, c: (x, c), (0.25,), (0.5,), (0.0,)),
    spelled("huber", lambda x, y, c: F.huber_loss(x, y, delta=c), lambda x, y, c: (x, y, c),
            (0.25,), (0.5,), (2.0,)),
    spelled("item", lambda x, i: x.sum() * i - x.new_tensor(i), lambda x, i: (x, i), *INTS),
    spelled("round", lambda x, i: torch.round(x, decimals=i), lambda x, i: (x, i), (2,), (1,),
            (0,), (-1,)),
    spelled("as_strided", lambda x, i, j: torch.as_strided(x, (3, 2), (i, 1), j) * 2, lambda x,
            i, j: (x, i, j), (2, 3), (3, 1), (0, 0), (7, 5)),
    spelled("unfold_im2col", lambda image, i, j: F.unfold(image, (2, 3), dilation=i, padding=j),
            lambda image, i, j: (image, i, j), (1, 1), (2, 2), (1, 0)),
    spelled("inplace_slice", lambda x, i, j: _inplace(x, i, j), lambda x, i, j: (x, i, j),
            *SLICES),
    spelled("inplace_select", lambda x, i: _inplace_select(x, i), lambda x, i: (x, i), *INTS),
    spelled("shift_mask", lambda x, i: x.masked_fill(torch.arange(7)[None] < torch.arange(6)[:,
            None] + i, 0.0), lambda x, i: (x, i), *INTS),
    spelled("position", lambda x, i: x + torch.arange(i, i + 7), lambda x, i: (x, i), *INTS),
    spelled("cat_full", lambda x, i: torch.cat([x.new_full((6, i), -1.0), x], 1), lambda x,
            i: (x, i), (2,), (3,), (0,), (5,)),
    spelled("stack_slices", lambda x, i, j: torch.stack([x[:, i : i + 3], x[:, j : j + 3]]),
            lambda x, i, j: (x, i, j), (2, 3), (3, 0), (-7, 1), (-4, -5)),
]
# fmt: on


def _inplace(x, i, j):
    y = x * 1
    y[:, i:j] = 3
    y[:, i:j] += x[:, i:j]
    return y


def _inplace_select(x, i):
    y = x * 1
    y[i] = 3
    y[:, i] *= 2
    return y


BATCHES = list(batches([*ROWS, *SPELLED], 45))


@pytest.mark.sweep
@pytest.mark.parametrize("k", range(len(BATCHES)))
def test_changing_numbers_give_what_eager_gives(k: int, backend: BackendUnderTest) -> None:
    with torch._dynamo.config.patch(recompile_limit=32, fail_on_recompile_limit_hit=True):
        problems = problems_of(BATCHES[k], backend)
    assert not problems, "\n".join([f"{len(problems)} problems", *problems[:20]])


def test_numbers_that_eager_refuses_raise(backend: BackendUnderTest) -> None:
    refused = [(row, numbers) for row in [*ROWS, *SPELLED] for numbers in row.bad]
    taken = [f"{row.name}{n}" for row, n in refused if accepted(row, n, backend)]
    assert not taken


def test_numbers_that_are_no_integers(backend_name: str) -> None:
    """Booleans stay booleans, as results and as what decides how eager sorts; fractions are not
    truncated, as arguments of a library's operator."""

    def fn(x: torch.Tensor, k: int) -> tuple[Any, ...]:
        size = x.shape[0]
        numbers = (size > k, not size > k, size > k and k > 1, k / 2, round(k / 2))
        return *numbers, torch.histc(x, 4, -k / 3, k / 1.5), x.sort(0, descending=k % 2 == 0)[0]

    compiled = torch.compile(fn, backend=backend_name, dynamic=True)
    x = torch.linspace(-2.0, 4.0, 12).reshape(4, 3)
    for k in (3, 5, 4):
        for mine, theirs in zip(compiled(x, k), fn(x, k), strict=True):
            same = torch.equal if isinstance(theirs, torch.Tensor) else lambda a, b: a == b
            assert type(mine) is type(theirs) and same(mine, theirs)


@pytest.mark.parametrize("target", sorted(discover()))
def test_every_number_that_may_be_symbolic_has_a_row(target: str) -> None:
    covered: dict[Any, set[str]] = {}
    for row in ROWS:
        covered.setdefault(row.op, set()).update(row.changing())
    missing = {
        str(op): sorted(numeric_parameters(op) - covered.get(op, set()))
        for op in find_target(target).facts.keep
        if _has_tensors(op) and op not in NOT_TRACED and not _is_of_another_device(op)
    }
    assert not {op: names for op, names in missing.items() if names}


def _has_tensors(op: Any) -> bool:
    schema = op._schema
    return any("Tensor" in str(v.type) for v in (*schema.arguments, *schema.returns))


def _is_of_another_device(op: Any) -> bool:
    """Attention kernels of GPUs, results written into given tensors, operators of our own."""
    name = str(op)
    return (
        ("attention" in name and "for_cpu" not in name)
        or name.endswith(".grad_input")
        or not name.startswith("aten.")
        or name == "aten._efficientzerotensor.default"
    )


SIZES: dict[str, Any] = {
    "sqrt": math.sqrt, "square_root_below_zero": lambda n: -math.sqrt(n / 3),
    "round": lambda n: round(n / 3, 2) * 10, "round_to_tens": lambda n: round(n / 1.0, -1),
    "log2": math.log2, "sin": lambda n: 9 * math.sin(n), "cos": lambda n: 9 * math.cos(n),
    "tan": lambda n: math.tan(n / 200), "asin": lambda n: 9 * math.asin(n / 200),
    "acos": lambda n: 3 * math.acos(n / 200), "atan": lambda n: 9 * math.atan(n),
    "sinh": lambda n: math.sinh(n / 50), "cosh": lambda n: math.cosh(n / 50),
    "tanh": lambda n: 9 * math.tanh(n / 50), "exp": lambda n: math.exp(n / 50), "log": math.log,
}  # fmt: skip
"""Functions of Python that a size may be computed by."""


@pytest.mark.parametrize("function", SIZES)
def test_sizes_by_functions_of_sizes(function: str, backend_name: str) -> None:
    def zeros(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(int(10 + SIZES[function](x.shape[0]))) + x.sum()

    compiled = torch.compile(zeros, backend=backend_name, dynamic=True)
    for length in (4, 9, 7, 100):
        x = torch.arange(1.0, length + 1)
        torch.testing.assert_close(compiled(x), zeros(x))


BEYOND: dict[str, tuple[Any, list[int]]] = {
    "quotient": (lambda x, n: x * (7 // (n - 3)), [5, 6, 3, -7]),
    "remainder": (lambda x, n: x * (7 % (n - 3)), [5, 6, 3, -7]),
    "fraction": (lambda x, n: x * (7 / (n - 3)), [5, 6, 3, -7]),
    "nested quotients": (lambda x, n: x * (9 // (60 // (n - 4))), [5, 6, 4, 500]),
    "quotient by a size": (lambda x, n: x * (n // (x.shape[0] - 3)), [5, 6, 7]),
    "product": (lambda x, n: x * (n * n * 1.0), [5, 6, 2**40, 2**31, -(2**40)]),
    "quotient of powers": (lambda x, n: x * (n**3 // n**2), [5, 6, 2**40, 2**31]),
    "hash": (lambda x, n: x + (n * 2654435761) % 2**16, [5, 6, 2**40, -(2**62), 2**31]),
    "negative": (lambda x, n: x * -n, [5, 6, -(2**63), 2**63 - 1]),
    "factor": (lambda x, n: x * (n * 10**18), [5, 6, 9, 70]),
    "several": (lambda x, n: (x + n % 5, x * (n + 1), x / (n * n)), [5, 6, 2**62, 2**33]),
}


@pytest.mark.parametrize("name", BEYOND)
def test_numbers_that_compiled_code_cannot_compute(name: str, backend_name: str) -> None:
    """Integers of more than 64 bits, and divisions by zero, are as in Python."""
    fn, numbers = BEYOND[name]
    compiled = torch.compile(fn, backend=backend_name, dynamic=True)
    for length, n in itertools.product((4, 3), numbers):
        x = torch.linspace(1.0, 2.0, length, dtype=torch.float64)
        try:
            expected: Any = fn(x, n)
        except ArithmeticError as error:
            with pytest.raises(type(error)):
                compiled(x, n)
        else:
            torch.testing.assert_close(compiled(x, n), expected, rtol=1e-12, atol=0)


BESIDE_COMPLEX: dict[str, Any] = {
    "scalar_tensor": lambda x, n: torch.scalar_tensor(n, dtype=x.dtype),
    "full": lambda x, n: torch.full((3,), n, dtype=x.dtype),
    "where": lambda x, n: torch.where(x.imag > 0, x, n),
    "masked_fill": lambda x, n: x.masked_fill(x.imag > 0, n),
    "sum": lambda x, n: x + n,
    "difference": lambda x, n: (n - x) * n,
    "product": lambda x, n: (x * n).conj() + n,
    "quotient": lambda x, n: x / n - n,
}


@pytest.mark.parametrize("name", BESIDE_COMPLEX)
def test_numbers_beside_complex_tensors(name: str, backend_name: str) -> None:
    fn = BESIDE_COMPLEX[name]
    compiled = torch.compile(fn, backend=backend_name)
    for dtype, n in itertools.product((torch.complex64, torch.complex128), (1, 3, -2, 7)):
        x = torch.randn(4, 4, dtype=dtype)
        torch.testing.assert_close(compiled(x, n), fn(x, n))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_integers_are_not_rounded_beside_16_bit_floats(
    dtype: torch.dtype, backend_name: str
) -> None:
    compiled = torch.compile(lambda x, n: (x / n, x * n), backend=backend_name, dynamic=True)
    x = torch.tensor([6e4, 1.5, -3e-4], dtype=dtype)
    for n in (3, 10**10, 70001, -257):
        assert torch.equal(torch.stack(compiled(x, n)), torch.stack((x / n, x * n)))
