"""GE's operators as dicp uses them: the table that rules and the simulator are checked against."""

from __future__ import annotations

import torch

from dicp.graphop.prototype import Prototype, parse_prototypes
from dicp.vendor.ascend.prototypes import attention, fused, inplace, table

_SINGLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
_REAL = _SINGLE | {torch.float64}
_INTEGER = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})
_BOOL = frozenset({torch.bool})
_WIDE = frozenset({torch.uint16, torch.uint32, torch.uint64})

SHORT_NAMES: dict[str, torch.dtype] = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
}  # fmt: skip

CLASSES: dict[str, frozenset[torch.dtype]] = {
    "single": _SINGLE,
    "real": _REAL,
    "integer": _INTEGER,
    "number": _REAL | _INTEGER,
    "bool": _BOOL,
    "any": _REAL | _INTEGER | _BOOL | _WIDE,
    "index": frozenset({torch.int32, torch.int64}),
    "int32": frozenset({torch.int32}),
    "half": frozenset({torch.float16, torch.bfloat16}),
    "int64": frozenset({torch.int64}),
    "uint8": frozenset({torch.uint8}),
    "uint64": frozenset({torch.uint64}),
    "float": frozenset({torch.float32}),
    "f32f64": frozenset({torch.float32, torch.float64}),
    "number+bool": _REAL | _INTEGER | _BOOL,
    "single+int32": _SINGLE | {torch.int32},
    "single+int16+int32": _SINGLE | {torch.int16, torch.int32},
    "bool+uint8": _BOOL | {torch.uint8},
    **{name: frozenset({dtype}) for name, dtype in SHORT_NAMES.items()},
}
"""Sets of dtypes that rows of the table name."""

PROTOTYPES: dict[str, Prototype] = {
    kind: prototype
    for tables in (table.TABLES, attention.TABLES, fused.TABLES, inplace.TABLES)
    for header, text in tables.items()
    for kind, prototype in parse_prototypes(header, text, CLASSES).items()
}
"""By operator; a prototype's group is its header."""

_POINTWISE_HEADERS = frozenset({
    "elewise_calculation_ops.h", "nonlinear_fuc_ops.h", "math_ops.h", "bitwise_ops.h",
})  # fmt: skip
_NOT_POINTWISE = frozenset({"ArgMaxV2", "ArgMin", "Assign"})

POINTWISE: frozenset[str] = frozenset(
    kind
    for kind, prototype in PROTOTYPES.items()
    if prototype.group in _POINTWISE_HEADERS and kind not in _NOT_POINTWISE
) | {"Identity", "SelectV2"}
"""Operators whose result's elements each depend on the elements at the same place alone."""

ALIASES: frozenset[str] = frozenset({"Reshape"})
"""Operators whose result is the memory of their first input."""

DTYPES: dict[torch.dtype, tuple[str, int]] = {
    torch.float32: ("DT_FLOAT", 0),
    torch.float16: ("DT_FLOAT16", 1),
    torch.int8: ("DT_INT8", 2),
    torch.int32: ("DT_INT32", 3),
    torch.uint8: ("DT_UINT8", 4),
    torch.int16: ("DT_INT16", 6),
    torch.uint16: ("DT_UINT16", 7),
    torch.uint32: ("DT_UINT32", 8),
    torch.int64: ("DT_INT64", 9),
    torch.uint64: ("DT_UINT64", 10),
    torch.float64: ("DT_DOUBLE", 11),
    torch.bool: ("DT_BOOL", 12),
    torch.bfloat16: ("DT_BF16", 27),
}
"""GE's name and number of each dtype."""

BY_NUMBER = {number: dtype for dtype, (_, number) in DTYPES.items()}

FORMATS = {"NCHW": 0, "NHWC": 1, "ND": 2, "NC1HWC0": 3, "FRACTAL_Z": 4, "FRACTAL_NZ": 29,
           "NCDHW": 30}  # fmt: skip
"""GE's number of each memory format."""
