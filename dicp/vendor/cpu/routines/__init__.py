"""Matrix products, convolution and attention by kernels of our own, in float32 or bfloat16.

They take operands as they lie in memory, and attention never writes its scores down. Used where
BLAS is measured to leave half of the machine unused (`library.fastest_linear`).
"""

from dicp.vendor.cpu.routines.attention import ATTENTION
from dicp.vendor.cpu.routines.common import LIBRARY_CALLS, Group, group_of, headers
from dicp.vendor.cpu.routines.convolution import CONVOLUTIONS
from dicp.vendor.cpu.routines.expected import expected_groups
from dicp.vendor.cpu.routines.grouped import GROUPED
from dicp.vendor.cpu.routines.product import PRODUCTS

ROUTINES = PRODUCTS.merged(CONVOLUTIONS, ATTENTION, GROUPED)

__all__ = ["LIBRARY_CALLS", "ROUTINES", "Group", "expected_groups", "group_of", "headers"]
