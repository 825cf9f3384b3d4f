"""Handwritten kernels for matrix products, convolution and attention, in float32 or bfloat16.

They read operands with the strides they have, and attention never stores its score matrix.
"""

from dicp.vendor.cpu.routines.attention import ATTENTION, are_attended
from dicp.vendor.cpu.routines.common import (
    LIBRARY_CALLS,
    Group,
    are_supported,
    group_of,
    headers,
    without_parts,
)
from dicp.vendor.cpu.routines.convolution import CONVOLUTIONS
from dicp.vendor.cpu.routines.expected import expected_groups
from dicp.vendor.cpu.routines.grouped import GROUPED
from dicp.vendor.cpu.routines.int8 import INT8, has_int8_tiles
from dicp.vendor.cpu.routines.product import Products, has_split_products, is_split, product_sizes

ROUTINES = CONVOLUTIONS.merged(ATTENTION, GROUPED, INT8)
"""Rules of all routines but products, whose rules depend on what was measured."""

__all__ = [
    "LIBRARY_CALLS",
    "ROUTINES",
    "Group",
    "Products",
    "are_attended",
    "expected_groups",
    "group_of",
    "has_int8_tiles",
    "has_split_products",
    "headers",
    "are_supported",
    "is_split",
    "product_sizes",
    "without_parts",
]
