"""A CANN installation for tests: our headers, a double of its libraries, headers of operators.

Graphs are compiled, linked, loaded and run as with CANN, through every call of ACL and GE that the
driver makes; the double (`cann.cpp`) fails as ACL does. What the models compute is computed by the
simulator's operators. It refuses operators, ports, attributes and dtypes that the header set does
not declare.

A whole test run goes through it with `pytest -p stand_in.cann test/op --backend ascendgraph`, with
STAND_IN_CANN=2023, 2025 or 2026 for the header set (2025).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp import graphop
from dicp.vendor.ascend.simulator.compiler import Compiler, Model, Refused
from dicp.vendor.ascend.simulator.device import Simulator
from dicp.vendor.ascend.toolchain import FLAGS, INCLUDES

HERE = Path(__file__).parent
SETS = {"2023": "7.0.0", "2025": "8.2.RC1", "2026": "8.5.0"}
"""Header sets and the versions of CANN that they are of."""
OLDER = {"2026": "2025"}
"""Sets that add to an older one."""
LIBRARIES = ("ascendcl", "ge_compiler", "ge_runner", "graph")
DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "bool": torch.bool,
}  # fmt: skip
GE_DTYPES = {"f32": "FLOAT", "f64": "DOUBLE", "bool": "BOOL", "bf16": "BF16", "f16": "FLOAT16",
             "str": "STRING", "c64": "COMPLEX64", "c128": "COMPLEX128"}  # fmt: skip
MARKS = {"?": "OPTIONAL_", "*": "DYNAMIC_"}


@dataclass(frozen=True)
class Operator:
    """A row: ports with their dtypes, attributes with their types."""

    header: str
    kind: str
    inputs: dict[str, tuple[str, ...]]
    outputs: dict[str, tuple[str, ...]]
    attrs: dict[str, tuple[str, str | None]]

    def registration(self) -> str:
        """The operator as a header of CANN declares it."""
        lines = [f"REG_OP({self.kind})"]
        for what, ports in (("INPUT", self.inputs), ("OUTPUT", self.outputs)):
            for port, dtypes in ports.items():
                listed = ", ".join(f"DT_{GE_DTYPES.get(d) or _integer(d)}" for d in dtypes)
                type_ = f"TensorType({{{listed}}})" if dtypes else "TensorType::ALL()"
                mark = MARKS.get(port[-1], "")
                lines.append(f"    .{mark}{what}({port.rstrip('?*')}, {type_})")
        for attr, (type_, default) in self.attrs.items():
            if default is None:
                lines.append(f"    .REQUIRED_ATTR({attr}, {type_})")
            else:
                lines.append(f"    .ATTR({attr}, {type_}, {default})")
        return "\n".join([*lines, f"    .OP_END_FACTORY_REG({self.kind})"])


def _integer(dtype: str) -> str:
    return f"{'U' if dtype[0] == 'u' else ''}INT{dtype[1:]}"


@lru_cache
def operators(header_set: str) -> dict[str, Operator]:
    """The operators of one header set."""
    found = dict(operators(OLDER[header_set])) if header_set in OLDER else {}
    for line in (HERE / "cann_operators.txt").read_text().splitlines():
        date, _, row = line.partition(" ")
        if date in ("both", header_set):
            header, kind, rest = row.split(" ", 2)
            ports, _, attrs = rest.partition(" | ")
            inputs, _, outputs = ports.partition("->")
            kind = kind.rstrip(":")
            found[kind] = Operator(header, kind, _ports(inputs), _ports(outputs), _attrs(attrs))
    return found


def _ports(text: str) -> dict[str, tuple[str, ...]]:
    rows = [word.partition(":") for word in text.split()]
    return {name: tuple(d for d in dtypes.split(",") if d) for name, _, dtypes in rows}


def _attrs(text: str) -> dict[str, tuple[str, str | None]]:
    found: dict[str, tuple[str, str | None]] = {}
    for word in text.split():
        name, _, rest = word.partition(":")
        type_, equal, default = rest.partition("=")
        found[name] = (type_, default if equal else None)
    return found


class HeaderCompiler(Compiler):
    """Refuses what a header set does not declare, too: operators, names, dtypes."""

    declared: Mapping[str, Operator] = {}

    def _add_operator(self, op: Mapping[str, Any], attrs: dict[str, Any]) -> None:
        declared = self.declared.get(op["type"])
        if declared is None:
            raise Refused(f"{op['name']}: there is no operator {op['type']!r}")
        strange = {port for port, *_ in op["inputs"]} - {p.rstrip("?*") for p in declared.inputs}
        strange |= attrs.keys() - declared.attrs.keys()
        if strange:
            raise Refused(f"{op['name']} ({op['type']}): nothing is called {sorted(strange)}")
        super()._add_operator(op, attrs)

    def _ports(self, op: Mapping[str, Any], prototype: Any) -> dict[str, Any]:
        found = super()._ports(op, prototype)
        for port, listed in self.declared[op["type"]].inputs.items():
            given = found.get(port.rstrip("?*"))
            for source in [] if given is None else given if isinstance(given, list) else [given]:
                dtype = self._result(*source).dtype
                if listed and dtype not in {DTYPES.get(name) for name in listed}:
                    raise Refused(f"{op['name']} ({op['type']}): {port!r} does not take {dtype}")
        return found


class Device(Simulator):
    """What computes: the simulator, which refuses what the header set does not declare."""

    def __init__(self, library: ctypes.CDLL, header_set: str) -> None:
        super().__init__(library)
        self.operators = operators(header_set)

    def compile(self, text: str, options: Mapping[str, str] | None) -> Model:
        compiler = HeaderCompiler(text, options)
        compiler.declared = self.operators
        return compiler.compile()


def install(
    root: Path, header_set: str = "2025", like: Path | None = None, *, merged: bool = False
) -> Path:
    """Writes an installation to `root`, with the libraries of the installation `like`; `merged`:
    the operators are declared in few headers, as CANN 8.5 has them."""
    shutil.copytree(INCLUDES, root / "include")
    headers: dict[str, list[str]] = {}
    for operator in operators(header_set).values():
        name = operator.header
        if merged:
            name = "ops_proto_nn.h" if name.startswith("nn_") else "ops_proto_math.h"
        headers.setdefault(name, []).append(operator.registration())
    folder = root / "opp" / "built-in" / ("op_graph" if merged else "op_proto") / "inc"
    folder.mkdir(parents=True)
    for name, rows in headers.items():
        (folder / name).write_text("\n\n".join(rows))
    version = SETS[header_set]
    (root / "version.cfg").write_text(
        f"# version: 1.0\nruntime_running_version=[7.6.0.1.220:{version}]\n"
        f"runtime_installed_version=[7.6.0.1.220:{version}]\n"
    )
    if like is not None:
        (root / "lib64").symlink_to(like / "lib64")
        return root
    (root / "lib64").mkdir()
    built = root / "lib64" / "libascendcl.so"
    sources = [str(INCLUDES.parent / "ge.cpp"), str(HERE / "cann.cpp")]
    includes = [f"-I{INCLUDES}", f"-I{Path(graphop.__file__).parent}"]
    command = ["g++", *FLAGS, *includes, *sources, "-Wl,-Bsymbolic",
               "-Wl,-soname,libascendcl.so", "-o", str(built)]  # fmt: skip
    subprocess.run(command, check=True)
    for name in LIBRARIES[1:]:
        (root / "lib64" / f"lib{name}.so").symlink_to(built)
    return root


def connect(root: Path, header_set: str = "2025") -> tuple[ctypes.CDLL, Device]:
    """The library of an installation, and what computes for it."""
    library = ctypes.CDLL(str(root / "lib64" / "libascendcl.so"), mode=ctypes.RTLD_GLOBAL)
    library.double_used.restype = ctypes.c_uint64
    library.double_reset.argtypes = [ctypes.c_uint32] + [ctypes.c_uint64] * 3
    return library, Device(library, header_set)


# ---- as a plugin ---------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Have the whole run go through an installation of its own."""
    header_set = os.environ.get("STAND_IN_CANN", "2025")
    folder = tempfile.mkdtemp(prefix="dicp-cann-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    root = install(Path(folder, "cann"), header_set)
    os.environ["ASCEND_HOME_PATH"] = str(root)
    os.environ["DICP_RUNS_ON"] = "device"
    config.stash[CONNECTED] = connect(root, header_set)


CONNECTED = pytest.StashKey[tuple[ctypes.CDLL, Device]]()
"""Keeps the callbacks alive."""
