"""The operators that programs are made of, in the order in which they are counted."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.fuzz.class_rows import BUFFERS, IMAGES, MASKS, POWERS, SHARED, SIZES
from dicp.fuzz.composite_rows import COMPOSITES
from dicp.fuzz.library_rows import IN_PLACE, LIBRARY, PATTERNS, POOLING
from dicp.fuzz.mixed_rows import MIXED, SEVERAL
from dicp.fuzz.pointwise_rows import ACTIVATION, ARITHMETIC, BITS, JUMPS, UNARY
from dicp.fuzz.row import Row
from dicp.fuzz.shape_rows import CREATION, INDEXING, REDUCTION, REDUCTION_PAIRS, SHAPE, VIEWS

UNDRAWN = {
    "_ctc_loss": "PyTorch's front end refuses it in one graph: its shape depends on data",
    "_ctc_loss_backward": "as for its forward",
    "_efficientzerotensor": "PyTorch writes it for gradients that are zero, which it mostly omits",
    "copy_strided": "PyTorch writes it for sizes that depend on data",
    "_int_mm": "eager is wrong where the depth is 1: it has tests of its own",
    "_grouped_mm": "it takes offsets that depend on data, whole batches in bfloat16",
    "linear": "frozen graphs have it, of constant weights",
    **dict.fromkeys(
        (
            *(
                f"_scaled_dot_product_{kind}_attention{way}"
                for kind in ("flash", "efficient", "cudnn")
                for way in ("", "_backward")
            ),
            *(
                f"_{kind}_attention_{way}"
                for kind in ("flash", "efficient", "cudnn")
                for way in ("forward", "backward")
            ),
        ),
        "a GPU's tensors alone reach it; on the CPU attention is drawn as another operator",
    ),
    **dict.fromkeys(
        (
            "_fft_c2c", "_fft_c2r", "_fft_r2c",
            "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd",
            "cholesky_inverse", "cholesky_solve", "geqrf", "linalg_cholesky_ex", "linalg_eig",
            "linalg_householder_product", "linalg_inv_ex", "linalg_ldl_factor_ex",
            "linalg_ldl_solve", "linalg_lstsq", "linalg_lu", "linalg_lu_factor_ex",
            "linalg_lu_solve", "linalg_matrix_exp", "linalg_qr", "linalg_solve_triangular",
            "ormqr", "triangular_solve", "special_spherical_bessel_j0",
            "fake_quantize_per_tensor_affine_cachemask", "_assert_async",
            "view_as_complex", "view_as_real",
        ),
        "PyTorch's own kernels compute it for every target, as for eager",
    ),
}  # fmt: skip
"""Operators with a lowering rule that no row reaches, with the reason."""

GROUPS: dict[str, Sequence[Row]] = {
    "arithmetic": ARITHMETIC,
    "unary": UNARY,
    "activation": ACTIVATION,
    "jumps": JUMPS,
    "bits": BITS,
    "reduction": REDUCTION,
    "reduction_pairs": REDUCTION_PAIRS,
    "views": VIEWS,
    "shape": SHAPE,
    "indexing": INDEXING,
    "creation": CREATION,
    "library": LIBRARY,
    "pooling": POOLING,
    "patterns": PATTERNS,
    "in_place": IN_PLACE,
    "images": IMAGES,
    "masks": MASKS,
    "sizes": SIZES,
    "buffers": BUFFERS,
    "shared": SHARED,
    "powers": POWERS,
    "composites": COMPOSITES,
    "mixed": MIXED,
    "several": SEVERAL,
}
"""A batch draws half of its statements from one of these."""

ROWS: tuple[Row, ...] = tuple(row for group in GROUPS.values() for row in group)
