"""The operator and the dtype that a test is about, from its name in PyTorch's form or in ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

EAGER_DEVICE = "dipu"
OPERATOR_DATABASE = "op_db"
"""The "file" of the tests of PyTorch's operator database."""
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32", "int64",
    "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip
_OURS = re.compile(r"\w+\[(?P<operator>.+?)(-(?P<dtype>\w+))?\]")


@dataclass(frozen=True)
class TestName:
    """The place of a test."""

    __test__ = False  # for pytest

    file: str
    cls: str
    test: str


@dataclass(frozen=True)
class OperatorNames:
    """The operators of PyTorch's database: `name`, or `name.variant`."""

    names: Sequence[str]

    @cached_property
    def _theirs(self) -> re.Pattern[str]:
        """test_out_linalg_svd_privateuse1_float32: dots of operators are underscores."""
        known = sorted(self._by_underscores, key=len, reverse=True)
        dtypes = "|".join(DTYPES)
        listed = "|".join(map(re.escape, known))
        return re.compile(rf"test_.*?({listed})_[a-z0-9]+?(_({dtypes}))?")

    @cached_property
    def _by_underscores(self) -> dict[str, str]:
        return {name.replace(".", "_"): name for name in self.names}

    def operator(self, name: TestName) -> str:
        """The operator of a test; empty if it is about none, or several."""
        return self._parts(name)[0]

    def dtype(self, name: TestName) -> str:
        return self._parts(name)[1]

    def _parts(self, name: TestName) -> tuple[str, str]:
        ours = _OURS.fullmatch(name.test)
        if name.file == OPERATOR_DATABASE and ours:
            return ours["operator"], ours["dtype"] or ""
        theirs = self._theirs.fullmatch(name.test)
        if theirs:
            return self._by_underscores[theirs[1]], theirs[3] or ""
        ends = (dtype for dtype in DTYPES if name.test.endswith(f"_{dtype}"))
        return "", next(ends, "")
