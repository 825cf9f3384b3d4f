"""The operators that programs are made of, in the order in which they are counted."""

from __future__ import annotations

from dicp.fuzz.library_rows import (
    IN_PLACE,
    LIBRARY,
    PATTERNS,
    POOLING,
)
from dicp.fuzz.pointwise_rows import (
    ACTIVATION,
    ARITHMETIC,
    BITS,
    JUMPS,
    UNARY,
)
from dicp.fuzz.row import Row
from dicp.fuzz.shape_rows import (
    CREATION,
    INDEXING,
    REDUCTION,
    REDUCTION_PAIRS,
    SHAPE,
    VIEWS,
)

UNDRAWN = {
    "fma": "PyTorch's decompositions alone write it, in the gradient of softmax",
    "_ctc_loss": "PyTorch's front end refuses it in one graph: its shape depends on data",
    "_ctc_loss_backward": "as for its forward",
    "_efficientzerotensor": "PyTorch writes it for gradients that are zero, which it mostly omits",
    "copy_strided": "PyTorch writes it for sizes that depend on data",
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
}
"""Operators with a lowering rule that no row reaches, with the reason."""

ROWS: tuple[Row, ...] = (
    *ARITHMETIC,
    *UNARY,
    *ACTIVATION,
    *JUMPS,
    *BITS,
    *REDUCTION,
    *REDUCTION_PAIRS,
    *VIEWS,
    *SHAPE,
    *INDEXING,
    *CREATION,
    *LIBRARY,
    *POOLING,
    *PATTERNS,
    *IN_PLACE,
)
