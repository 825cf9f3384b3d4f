"""Handwritten kernels for matrix products, convolution and attention, in float32 or bfloat16.

They read operands with the strides they have, and attention never stores its score matrix. Used
where BLAS was measured to leave half of the machine idle (`library.fastest_linear`).
"""

from dicp.vendor.cpu.routines.attention import ATTENTION
from dicp.vendor.cpu.routines.common import LIBRARY_CALLS, Group, group_of, headers
from dicp.vendor.cpu.routines.convolution import CONVOLUTIONS
from dicp.vendor.cpu.routines.expected import expected_groups
from dicp.vendor.cpu.routines.grouped import GROUPED
from dicp.vendor.cpu.routines.product import PRODUCTS

ROUTINES = PRODUCTS.merged(CONVOLUTIONS, ATTENTION, GROUPED)

__all__ = ["LIBRARY_CALLS", "ROUTINES", "Group", "expected_groups", "group_of", "headers"]
