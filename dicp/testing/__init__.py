"""What operator tests are written with: cases, the fp64 rule, the backend under test."""

from dicp.compare import Rule, assert_matches, check_tensor
from dicp.testing.backends import BackendUnderTest
from dicp.testing.cases import ALL_LAYOUTS, FLOATS, INTS, LAYOUTS, Op, created_on, op
from dicp.testing.inputs import T, index

__all__ = [
    "ALL_LAYOUTS",
    "FLOATS",
    "INTS",
    "LAYOUTS",
    "BackendUnderTest",
    "Op",
    "Rule",
    "T",
    "assert_matches",
    "check_tensor",
    "created_on",
    "index",
    "op",
]
