"""Converts device configurations of public DIOPI, in Python, into TOML: parsed, never run."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dicp.conformance.names import DTYPES
from dicp.errors import ConformanceConfigError
from dicp.op_tools.cases import toml

VARIABLES: Final = ("device_configs", "device_config")
"""What a file assigns its table to."""
HALF: Final = ("float16", "bfloat16")


@dataclass(frozen=True)
class Skipped:
    """`Skip(value)`."""

    value: Any
    line: int


def converted(path: Path) -> str:
    """The TOML of a configuration in Python.

    Raises ConformanceConfigError with the line of what is more than data.
    """
    table = parsed_table(path, VARIABLES)
    entries = [text for key, entry in table.items() for text in _entry(path, key, entry)]
    return f"# Converted from {path.name}.\n\n" + "\n".join(entries)


def parsed_table(path: Path, variables: Sequence[str]) -> dict[str, Any]:
    """The dictionary that a file in Python assigns to one of the variables.

    Raises ConformanceConfigError with the line of what is more than data.
    """
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ConformanceConfigError(path, line, f"it cannot be parsed: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id in variables for target in node.targets
        ):
            found: dict[str, Any] = _Parser(path).value(node.value)
            return found
    raise ConformanceConfigError(path, 1, f"it assigns none of {', '.join(variables)}")


@dataclass(frozen=True)
class _Parser:
    """Reads literals, dict(...), Skip(...), dtypes such as np.float32, and Genfunc's functions."""

    path: Path

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(part) for part in node.elts]
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {self.value(k): self.value(v) for k, v in pairs if k is not None}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.Attribute) and node.attr.rstrip("_") in DTYPES:
            return node.attr.rstrip("_")
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Genfunc":
            return node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._call(node, node.func.id)
        raise self._wrong(node)

    def _call(self, node: ast.Call, name: str) -> Any:
        values = [self.value(part) for part in node.args]
        words = {k.arg: self.value(k.value) for k in node.keywords if k.arg is not None}
        if name == "dict" and not values:
            return words
        if name == "Skip" and len(values) == 1 and not words:
            return Skipped(values[0], node.lineno)
        if name == "float" and len(values) == 1:
            return float(values[0])
        raise self._wrong(node)

    def _wrong(self, node: ast.expr) -> ConformanceConfigError:
        problem = f"{ast.unparse(node)!r} is more than data; write its value"
        return ConformanceConfigError(self.path, node.lineno, problem)


def _entry(path: Path, key: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """The tables of one operator's entry."""
    names = entry.get("name") or [key]
    operator = r"(.*\.)?" + f"({'|'.join(map(re.escape, names))})"
    reason = f"converted from {path.name}, {key}"
    if entry.get("skip_all"):
        yield _table("skip", operator=operator, reason=reason)
    for suffix, dtype in (("", ""), ("_half", "|".join(HALF))):
        given = {n: entry[f"{n}{suffix}"] for n in ("atol", "rtol") if f"{n}{suffix}" in entry}
        if given:
            of_dtype = {"dtype": dtype} if dtype else {}
            yield _table("tolerance", operator=operator, **of_dtype, **given)
    for argument, values in entry.get("para", {}).items():
        for skip in _skips(values):
            parameter = {argument: [skip.value]}
            yield _table("skip", operator=operator, parameter=parameter, reason=_at(reason, skip))
    for tensor in entry.get("tensor_para", {}).get("args", []):
        for skip in _skips(tensor.get("dtype", [])):
            yield _table("skip", operator=operator, dtype=skip.value, reason=_at(reason, skip))
        for skip in _skips(tensor.get("shape", [])):
            shape = json.dumps(skip.value)
            yield _table("skip", operator=operator, shape=shape, reason=_at(reason, skip))


def _at(reason: str, skip: Skipped) -> str:
    return f"{reason}, line {skip.line}"


def _skips(values: list[Any]) -> list[Skipped]:
    return [value for value in values if isinstance(value, Skipped)]


def _table(name: str, **fields: Any) -> str:
    lines = (f"{key} = {toml(value)}" for key, value in fields.items())
    return "\n".join([f"[[{name}]]", *lines, ""])
