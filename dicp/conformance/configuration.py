r"""The configuration of a device, a TOML file: what runs, how close, what is left out and why.

`torch-tests --config` and `run_test --impl_folder` read it; file, test and `samples` are about the
former alone, parameter and shape about the latter.

dtypes = ["float32", "int64"]   # of the tests of PyTorch's operator database
samples = 4                     # sample inputs of each; 0: all

[[only]]                        # without any, all tests run
operator = 'linalg\..*'        # regular expressions; also file, test and dtype

[[skip]]
operator = "linalg.svd"
dtype = "float64"
reason = "the chip has no float64"

[[skip]]
operator = "cumsum"
parameter = { dim = [0, -2] }   # the case's argument is one of these
shape = "ndim > 4"              # of some tensor; also numel, dim(0), dim(-1), [2, 3]; < <= == >= >
reason = "the chip has 4 dimensions"

[[skip]]
dtype = "complex.*"             # all cases with a tensor of the dtype
reason = "the chip has no complex numbers"

[[tolerance]]                   # beside the rule against float64
operator = "cumsum"
rtol = 1e-4
atol = 1e-5
"""

from __future__ import annotations

import math
import operator
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dicp.compare import Rule
from dicp.conformance.names import DTYPES, OPERATOR_DATABASE, OperatorNames, TestName
from dicp.conformance.suite.case import Case
from dicp.errors import ConformanceConfigError, OldDeviceConfigError
from dicp.errors.text import nearest, nearest_is

_SELECTORS = ("file", "test", "operator", "dtype", "parameter", "shape")
_TABLES = {
    "only": (), "skip": ("reason",), "tolerance": ("atol", "rtol"),
}  # fmt: skip
_KINDS: Mapping[str, tuple[type, ...]] = {
    "atol": (int, float), "rtol": (int, float), "parameter": (dict,),
}  # fmt: skip
"""Types of values that are no texts."""
_SHAPE = re.compile(r"\[[\d, ]*\]|(ndim|numel|dim\((-?\d+)\))\s*(<=|>=|==|<|>)\s*(\d+)")
_COMPARISONS = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip
FILE = "device_config.toml"
OLD_FILES = ("device_config.py", "device_configs.py")
_DEFAULT_DTYPES = ("float32", "int64")
_DEFAULT_SAMPLES = 4


@dataclass(frozen=True)
class Selection:
    """Tests, by regular expressions that match in full; an empty one matches everything."""

    line: int
    file: str = ""
    test: str = ""
    operator: str = ""
    dtype: str = ""
    parameter: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shape: str = ""

    def matches(self, names: OperatorNames, name: TestName) -> bool:
        if self.parameter or self.shape:
            return False
        found = (name.file, name.test, names.operator(name), names.dtype(name))
        wanted = (self.file, self.test, self.operator, self.dtype)
        pairs = zip(wanted, found, strict=True)
        return all(not pattern or re.fullmatch(pattern, text) for pattern, text in pairs)

    def matches_case(self, case: Case) -> bool:
        if self.file or self.test or (self.operator and not re.fullmatch(self.operator, case.name)):
            return False
        dtypes = {case.dtype, *(operand.dtype for operand in case.operands)}
        return (
            (not self.dtype or any(re.fullmatch(self.dtype, dtype) for dtype in dtypes))
            and self._has_parameters(case)
            and (not self.shape or any(_fits(self.shape, op.shape) for op in case.operands))
        )

    def _has_parameters(self, case: Case) -> bool:
        named = case.named if self.parameter else {}
        return all(named.get(k, self) in given for k, given in self.parameter.items())

    def may_match(self, operator: str) -> bool:
        """Whether some test of an operator of the database may match."""
        pairs = ((self.file, OPERATOR_DATABASE), (self.operator, operator))
        return all(not pattern or re.fullmatch(pattern, text) for pattern, text in pairs)

    def __str__(self) -> str:
        given = (f"{name} = {getattr(self, name)!r}" for name in _SELECTORS if getattr(self, name))
        return f"line {self.line}: {', '.join(given)}"


def _fits(predicate: str, shape: Sequence[int]) -> bool:
    """Whether a shape fulfils a predicate."""
    found = _SHAPE.fullmatch(predicate)
    assert found is not None
    what, place, comparison, number = found.groups()
    if what is None:
        return [int(size) for size in re.findall(r"\d+", predicate)] == list(shape)
    if place is not None:
        if not -len(shape) <= int(place) < len(shape):
            return False
        value = shape[int(place)]
    else:
        value = len(shape) if what == "ndim" else math.prod(shape)
    return bool(_COMPARISONS[comparison](value, int(number)))


@dataclass(frozen=True)
class Skip(Selection):
    """Tests that are left out."""

    reason: str = ""


@dataclass(frozen=True)
class Tolerance(Selection):
    """What a result may differ from eager's, whatever the rule against float64 says."""

    atol: float = 0.0
    rtol: float = 0.0


@dataclass(frozen=True)
class Configuration:
    """See the module."""

    path: Path | None = None
    dtypes: tuple[str, ...] = _DEFAULT_DTYPES
    samples: int = _DEFAULT_SAMPLES
    only: tuple[Selection, ...] = ()
    skips: tuple[Skip, ...] = ()
    tolerances: tuple[Tolerance, ...] = ()

    @classmethod
    def read(cls, path: Path | None) -> Configuration:
        """The configuration of a file. Raises ConformanceConfigError."""
        return _Reader(path).configuration() if path is not None else cls()

    def check_operators(self, names: OperatorNames) -> None:
        """Raises ConformanceConfigError for an expression that matches no operator."""
        for one in (*self.only, *self.skips, *self.tolerances):
            pattern = one.operator
            if pattern and not any(re.fullmatch(pattern, name) for name in names.names):
                assert self.path is not None
                hint = nearest_is(pattern, names.names)
                text = f"operator {pattern!r} matches no operator{hint}"
                raise ConformanceConfigError(self.path, one.line, text)

    def runs(self, names: OperatorNames, name: TestName) -> bool:
        return not self.only or any(one.matches(names, name) for one in self.only)

    def may_run(self, operator: str) -> bool:
        """Whether some test of an operator of the database may run."""
        return not self.only or any(one.may_match(operator) for one in self.only)

    def skip_reason(self, names: OperatorNames, name: TestName) -> str:
        """Why a test is left out; empty if it runs."""
        return next((s.reason for s in self.skips if s.matches(names, name)), "")

    def of_cases(self) -> list[Skip]:
        """The skips that are about the case suite."""
        return [skip for skip in self.skips if not (skip.file or skip.test)]

    def skip_of(self, case: Case) -> Skip | None:
        """The first skip that leaves out a case of the case suite."""
        return next((s for s in self.skips if s.matches_case(case)), None)

    def case_tolerance(self, case: Case) -> tuple[float, float] | None:
        """atol and rtol of a case of the case suite; None: its own."""
        found = next((t for t in self.tolerances if t.matches_case(case)), None)
        return (found.atol, found.rtol) if found else None

    def tolerance(self, names: OperatorNames, name: TestName) -> Tolerance | None:
        return next((t for t in self.tolerances if t.matches(names, name)), None)

    def rule(self, names: OperatorNames, name: TestName) -> Rule:
        found = self.tolerance(names, name)
        return Rule(atol=found.atol, rtol=found.rtol) if found else Rule()

    def unused(self, names: OperatorNames, ran: Collection[TestName]) -> list[Skip]:
        """The skips that match none of the tests."""
        return [
            s for s in self.skips
            if not (s.parameter or s.shape) and not any(s.matches(names, name) for name in ran)
        ]  # fmt: skip


def found_in(folder: Path) -> Path | None:
    """The configuration in a vendor's folder, if there is one.

    Raises OldDeviceConfigError for one in Python, which has to be converted.
    """
    path = folder / FILE
    if path.is_file():
        return path
    for name in OLD_FILES:
        if (folder / name).is_file():
            raise OldDeviceConfigError(folder / name, path)
    return None


@dataclass
class _Reader:
    path: Path
    text: str = field(init=False, default="")

    def configuration(self) -> Configuration:
        try:
            self.text = self.path.read_text("utf-8")
            given = tomllib.loads(self.text)
        except (OSError, UnicodeDecodeError) as error:
            raise self.wrong(1, f"it cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            line = re.search(r"line (\d+)", str(error))
            raise self.wrong(int(line[1]) if line else 1, str(error)) from None
        known = ("dtypes", "samples", *_TABLES)
        for key in given:
            if key not in known:
                raise self.wrong(self._line(rf"\[*{key}\b"), _unknown("entry", key, known))
        return Configuration(
            self.path,
            self._dtypes(given.get("dtypes", _DEFAULT_DTYPES)),
            self._count(given.get("samples", _DEFAULT_SAMPLES)),
            tuple(Selection(**one) for one in self._tables(given, "only")),
            tuple(Skip(**one) for one in self._tables(given, "skip")),
            tuple(Tolerance(**one) for one in self._tables(given, "tolerance")),
        )

    def _dtypes(self, given: Any) -> tuple[str, ...]:
        for dtype in given if isinstance(given, list | tuple) else [given]:
            if dtype not in DTYPES:
                raise self.wrong(self._line("dtypes"), _unknown("dtype", str(dtype), DTYPES))
        return tuple(given)

    def _count(self, given: Any) -> int:
        if type(given) is not int or given < 0:
            raise self.wrong(self._line("samples"), f"samples = {given!r} is not a count")
        return given

    def _tables(self, given: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
        tables = given.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
            raise self.wrong(self._line(rf"\[*{name}\b"), f"write [[{name}]] above its entries")
        return [self._table(name, number, one) for number, one in enumerate(tables)]

    def _table(self, name: str, number: int, table: Mapping[str, Any]) -> dict[str, Any]:
        line = self._line(rf"\[\[\s*{name}\s*\]\]", number)
        known = (*_SELECTORS, *_TABLES[name])
        for key, value in table.items():
            place = self._line(rf"{key}\b", 0, line)
            if key not in known:
                raise self.wrong(place, _unknown("entry", key, known))
            kinds = _KINDS.get(key, (str,))
            if not isinstance(value, kinds):
                raise self.wrong(place, f"{key} = {value!r} is no {kinds[-1].__name__}")
            if isinstance(value, int | float) and not value >= 0:
                raise self.wrong(place, f"{key} = {value!r} is no number from 0 on")
            if key == "shape":
                if not _SHAPE.fullmatch(str(value)):
                    raise self.wrong(place, f"shape {value!r} is no predicate such as 'ndim > 4'")
            elif isinstance(value, str) and key in _SELECTORS:
                self._check_pattern(place, key, value)
        for argument, values in table.get("parameter", {}).items():
            if not isinstance(values, list):
                raise self.wrong(line, f"parameter {argument} = {values!r} is no list of values")
        if name == "skip" and not table.get("reason", "").strip():
            raise self.wrong(line, "a skip without a reason")
        if not any(key in table for key in _SELECTORS):
            raise self.wrong(line, f"it selects no tests; give one of {', '.join(_SELECTORS)}")
        return {"line": line, **table}

    def _check_pattern(self, line: int, key: str, pattern: str) -> None:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise self.wrong(line, f"{key} {pattern!r} is no expression: {error}") from None
        if key == "dtype" and not any(map(compiled.fullmatch, DTYPES)):
            raise self.wrong(line, _unknown("dtype", pattern, DTYPES))

    def _line(self, start: str, number: int = 0, after: int = 0) -> int:
        """The line where the `number`-th entry begins that starts so, from line `after` on."""
        lines = self.text.splitlines()
        found = [k for k, line in enumerate(lines, 1)
                 if k >= after and re.match(rf"\s*{start}", line)]  # fmt: skip
        return found[number] if number < len(found) else max(after, 1)

    def wrong(self, line: int, problem: str) -> ConformanceConfigError:
        return ConformanceConfigError(self.path, line, problem)


def _unknown(what: str, given: str, known: Sequence[str]) -> str:
    near = nearest(given, known)
    hint = f"; did you mean {near!r}?" if near else "."
    return f"unknown {what} {given!r}{hint} There are: {', '.join(known)}"
