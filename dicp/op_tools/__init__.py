"""Operator tools: find the operator that is wrong, slow, overflowing or unsupported.

Each tool is started and stopped, a context manager and a decorator; `apply_feature` puts one on
chosen operators. docs/op_tools.md shows each on a real training step.
"""

from dicp.op_tools import compiled as compiled
from dicp.op_tools import one_iter as one_iter
from dicp.op_tools.autocompare import OpAutoCompare
from dicp.op_tools.capture import OpCapture
from dicp.op_tools.cast import OpDtypeCast
from dicp.op_tools.fallback import OpFallback
from dicp.op_tools.features import apply_feature, clear_features
from dicp.op_tools.observe import OpObserve
from dicp.op_tools.overflow import OpOverflowCheck
from dicp.op_tools.timing import OpTimeMeasure

__all__ = [
    "OpAutoCompare",
    "OpCapture",
    "OpDtypeCast",
    "OpFallback",
    "OpObserve",
    "OpOverflowCheck",
    "OpTimeMeasure",
    "apply_feature",
    "clear_features",
    "one_iter",
]
