r"""Case files: TOML or JSON, data alone. An entry is an operator; its lists zip, one case for each.

[[case]]
name = "nll_loss2d"
call = "torch.nn.functional.nll_loss"        # a dotted name in torch, torchvision or dicp
dtypes = ["float32", "bfloat16"]
tags = ["segmentation"]                      # domains and models; may be left out
tolerance = { bfloat16 = [1e-2, 1e-2] }      # atol, rtol; may be left out

[case.tensors.input]                         # named: by keyword; 0, 1, ...: by position
shape = [[2, 3, 4, 4], [1, 5, 3, 2]]         # two cases
strides = [[60, 16, 4, 1], [30, 6, 2, 1]]    # may be 0 and leave gaps; default: contiguous
grad = true
[case.tensors.target]
shape = [[2, 4, 4], [1, 3, 2]]
dtype = "int64"                              # default: the case's
gen = "randint(0, 3)"                        # or a list; default: randn; see case.py

[case.parameters]
reduction = ["mean", "sum"]                  # one value stands for all cases

`value` in place of `gen` gives the values; `stack = true` makes shapes a list for each case, whose
tensors are one argument. `{ none = true }`, `{ dtype = "float32" }` and `{ slice = [0, 2, 1] }` are
values that TOML has no form for. Parameters, too, may be named 0, 1, ... Of the entry: `inplace`
(it writes an operand), `random` (results are compared by distribution), `no_reference` (results
have no values), and `saved = { call = "...", given = ["self"], results = { indices = 1 } }`:
arguments that are results of a call which takes the arguments `given`. An operator may have several
entries. JSON has the same form under "case", and beside it "model" and "about", which say what it
was recorded from.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from dicp.conformance.names import DTYPES
from dicp.conformance.suite.case import Case, Operand, Saved, check_generator, given_operand
from dicp.conformance.suite.codec import Decoder
from dicp.errors import CaseError, CaseFileError
from dicp.errors.text import did_you_mean, nearest

CASE_FILES: Final = Path(__file__).parent / "cases"
READERS: Final = {".toml": tomllib.loads, ".json": json.loads}
Kinds = Mapping[str, type | tuple[type, ...]]
_ENTRY: Final[Kinds] = {
    "name": str, "call": str, "dtypes": list, "tags": list, "tolerance": dict, "tensors": dict,
    "parameters": dict, "inplace": bool, "random": bool, "no_reference": bool, "saved": dict,
}  # fmt: skip
_TENSOR: Final[Kinds] = {
    "shape": list, "strides": list, "dtype": str, "gen": (str, list), "value": list, "grad": bool,
    "stack": bool,
}  # fmt: skip
_FILE: Final[Kinds] = {"case": list, "model": str, "about": dict}
"""Fields, and the types of their values."""


@dataclass(frozen=True)
class Entry:
    """One operator of a case file, and its cases."""

    path: Path
    name: str
    call: str
    cases: tuple[Case, ...]


def case_entries(folder: Path = CASE_FILES) -> list[Entry]:
    """All entries of a folder's files. Raises CaseFileError."""
    files = sorted(path for suffix in READERS for path in folder.glob(f"*{suffix}"))
    return [entry for path in files for entry in read_case_file(path)]


@lru_cache(maxsize=64)
def read_case_file(path: Path) -> tuple[Entry, ...]:
    """The entries of one file. Raises CaseFileError."""
    try:
        given = READERS.get(path.suffix, tomllib.loads)(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CaseFileError(path, "", f"it cannot be read: {error}") from None
    _check_fields(path, "", given, _FILE)
    return tuple(_EntryReader(path, entry).entry() for entry in given.get("case", []))


@dataclass(frozen=True)
class _EntryReader:
    path: Path
    given: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.given.get("name", "?")) if isinstance(self.given, dict) else "?"

    def entry(self) -> Entry:
        _check_fields(self.path, self.name, self.given, _ENTRY)
        for key in ("name", "call", "dtypes"):
            if not self.given.get(key):
                raise self.wrong(f"{key} is missing")
        for dtype in (*self.given["dtypes"], *self.given.get("tolerance", {})):
            self.check_dtype(dtype)
        try:
            cases = tuple(self.cases())
        except CaseFileError:
            raise
        except CaseError as error:
            raise self.wrong(str(error)) from None
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            raise self.wrong(f"{type(error).__name__}: {error}") from None
        return Entry(self.path, self.name, self.given["call"], cases)

    def cases(self) -> Iterator[Case]:
        tensors = self.given.get("tensors", {})
        for name, tensor in tensors.items():
            _check_fields(self.path, f"{self.name}.{name}", tensor, _TENSOR)
            self.check_dtype(tensor.get("dtype", self.given["dtypes"][0]))
            for generator in _as_list(tensor.get("gen", "randn")):
                check_generator(generator)
        count = self.count()
        for dtype in self.given["dtypes"]:
            tolerance = self.tolerance(dtype)
            for number in range(count):
                arguments = {n: self.argument(t, number, dtype) for n, t in tensors.items()}
                parameters = {
                    name: Decoder({}).decode(self.one(value, number))
                    for name, value in self.given.get("parameters", {}).items()
                }
                arguments |= parameters
                places = sorted((n for n in arguments if n.isdecimal()), key=int)
                if places != [str(place) for place in range(len(places))]:
                    raise self.wrong(f"positions {', '.join(places)} do not count from 0")
                args = tuple(arguments[n] for n in places)
                kwargs = {n: v for n, v in arguments.items() if not n.isdecimal()}
                yield Case(
                    self.name, f"{dtype}-{number}", self.given["call"], dtype, args,
                    kwargs, self.given.get("inplace", False),
                    self.given.get("random", False), not self.given.get("no_reference", False),
                    self.saved(), tolerance, tuple(self.given.get("tags", ())),
                )  # fmt: skip

    def tolerance(self, dtype: str) -> tuple[float, float] | None:
        """atol and rtol of a dtype, if the entry has them."""
        given = self.given.get("tolerance", {}).get(dtype)
        if given is None:
            return None
        numbers = given if isinstance(given, list) else []
        if len(numbers) != 2 or not all(type(n) in (int, float) and n >= 0 for n in numbers):
            raise self.wrong(f"tolerance {given!r} is no pair of numbers from 0 on")
        return float(numbers[0]), float(numbers[1])

    def saved(self) -> Saved | None:
        given = self.given.get("saved")
        return Saved(given["call"], tuple(given["given"]), given["results"]) if given else None

    def count(self) -> int:
        """How many cases the lists give; a list with one entry goes with any number."""
        lengths = {
            f"{name}.{key}": len(tensor[key])
            for name, tensor in self.given.get("tensors", {}).items()
            for key in ("shape", "strides", "value", "gen")
            if isinstance(tensor.get(key), list)
        }
        for name, value in self.given.get("parameters", {}).items():
            if not isinstance(value, list) or not value:
                raise self.wrong(f"{name} = {value!r} is no list of values, one for each case")
            lengths[name] = len(value)
        longest = max(lengths, key=lengths.__getitem__, default="")
        for name, length in lengths.items():
            if not length:
                raise self.wrong(f"{name} has no values, one for each case")
            if length not in (1, lengths[longest]):
                raise self.wrong(f"{name} has {length} values, {longest} has {lengths[longest]}")
        return lengths.get(longest, 1)

    def argument(self, tensor: Mapping[str, Any], number: int, dtype: str) -> Any:
        def at(key: str) -> Any:
            return self.one(tensor[key], number) if key in tensor else None

        dtype = tensor.get("dtype", dtype)
        if "value" in tensor:
            value = torch.tensor(at("value"), dtype=getattr(torch, dtype))
            return given_operand(value, tensor.get("grad", False))
        if "shape" not in tensor:
            raise self.wrong("a tensor has neither shape nor value")
        shape, strides = at("shape"), at("strides")
        gen = self.one(_as_list(tensor.get("gen", "randn")), number)
        grad = tensor.get("grad", False)
        if not tensor.get("stack", False):
            return self.operand(shape, strides, dtype, gen, grad)
        each = strides or [None] * len(shape)
        return [
            None if one[0] is None else self.operand(*one, dtype, gen, grad)
            for one in zip(shape, each, strict=True)
        ]

    def operand(
        self, shape: Any, strides: Any, dtype: str, gen: str, grad: bool
    ) -> Operand:  # fmt: skip
        for what in (shape, strides or []):
            if not isinstance(what, list) or not all(type(n) is int and n >= 0 for n in what):
                raise self.wrong(f"{what!r} is no list of sizes")
        if strides is not None and len(strides) != len(shape):
            raise self.wrong(f"strides {strides} do not fit shape {shape}")
        return Operand(tuple(shape), dtype, tuple(strides) if strides else None, gen, grad)

    @staticmethod
    def one(values: Sequence[Any], number: int) -> Any:
        return values[number if len(values) > 1 else 0]

    def check_dtype(self, dtype: str) -> None:
        if dtype not in DTYPES:
            raise self.wrong(f"unknown dtype {dtype!r}.{did_you_mean(nearest(dtype, DTYPES))}")

    def wrong(self, problem: str) -> CaseFileError:
        return CaseFileError(self.path, self.name, problem)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_fields(path: Path, name: str, given: Any, known: Kinds) -> None:
    if not isinstance(given, dict):
        raise CaseFileError(path, name, f"{given!r} is no table of fields")
    for key, value in given.items():
        if key not in known:
            hint = did_you_mean(nearest(key, list(known)))
            raise CaseFileError(path, name, f"unknown field {key!r}.{hint}")
        if not isinstance(value, known[key]):
            raise CaseFileError(path, name, f"{key} = {value!r} has another type")
