"""Every scalar operator is spelled in every language, by functions that are defined there."""

from __future__ import annotations

import ctypes
import inspect
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

from dicp.codegen import spelling, types
from dicp.config import Config
from dicp.loop.ir import expr as ir
from dicp.loop.ir.ops import PHILOX_NEIGHBOURS, REDUCTIONS, SCALAR_OPS
from dicp.vendor.cpu.toolchain import find_toolchain

WHOLE = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "lshift", "rshift",
         "philox_uniform", "philox_normal", "philox_bits"}  # fmt: skip
EITHER = {"add", "sub", "mul", "fma", "neg", "abs", "sign", "signbit", "square", "floor_div",
          "trunc_div", "remainder", "fmod", "maximum", "minimum", "fmax", "fmin", "pow", "eq", "ne",
          "lt", "le", "gt", "ge", "where", "logical_not", "logical_and", "logical_or",
          "logical_xor"}  # fmt: skip
FLOATS, INTEGERS = (torch.float32, torch.float64), (torch.int64, torch.int32, torch.uint8)

DEVICE = """#include <cmath>
#include <cstring>
#include <climits>
#define d_inline static inline
#define D_NATIVE(name) name
#define D_DECLARED
#define D_NATIVE_MATH
#define D_FMA
#define D_UNROLL(n)
#define D_COLD static
static bool claim(long* place, long value) {
  return *place == 0 ? (*place = value, true) : false;
}
#define D_CLAIM(place, value) claim(place, value)
"""
"""What a language without the compiler's builtins defines: a device's, here played by the host."""


def dtypes_of(op: str) -> tuple[torch.dtype, ...]:
    if op.startswith("philox"):
        return (torch.int64,)
    return INTEGERS if op in WHOLE else FLOATS + INTEGERS if op in EITHER else FLOATS


def function(op: str, dtype: torch.dtype) -> str:
    row = SCALAR_OPS[op]
    operands = [ir.result(name, dtype) for name in "abc"[: row.arity]]
    drawn = next((kind for name, kind in PHILOX_NEIGHBOURS if name == op), dtype)
    result = ir.apply(op, drawn, *operands)
    ctype = types.VALUE_TYPE[dtype]
    text = spelling.operator(result, [o.name for o in operands], "1")
    args = ", ".join(f"{ctype} {o.name}" for o in operands)
    name = f"f_{op}_{str(dtype).split('.')[1]}"
    out = "double" if op.startswith("philox_") and "bits" not in op else ctype
    return f'extern "C" {out} {name}(int64_t* status, {args}) {{ (void)status; return {text}; }}\n'


def build(folder: Path, name: str, before: str) -> ctypes.CDLL:
    text = before + '#include "scalar.h"\n'
    text += "".join(function(op, dtype) for op in SCALAR_OPS for dtype in dtypes_of(op))
    for op in REDUCTIONS:
        for dtype in FLOATS + INTEGERS:
            ctype = types.VALUE_TYPE[dtype]
            step = f"a = {spelling.combine(op, 'a', 'b')};" if op in spelling.COMBINE else (
                spelling.take(op, "b", "1", "a", "at"))  # fmt: skip
            if op in ("any", "all") and dtype in FLOATS:
                continue
            start = types.start_value(op, dtype)
            text += f"{ctype} r_{op}({ctype} b) {{ {ctype} a = {start}; int64_t at = 0; (void)at; "
            text += f"{step} return a; }}\n"
    return compiled(folder, name, text)


def compiled(folder: Path, name: str, text: str) -> ctypes.CDLL:
    (folder / f"{name}.cpp").write_text(text)
    (folder / "scalar.h").write_text(spelling.header_text())
    command = [find_toolchain(Config()).compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC",
               "-ffp-contract=off", f"{name}.cpp", "-o", f"{name}.so"]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(folder / f"{name}.so"))


def test_c_family(tmp_path: Path) -> None:
    """All operators compile for a host and with what a device defines, and agree on numbers."""
    assert spelling.OPERATORS.keys() | spelling.DRAWN.keys() - {"philox_word"} == SCALAR_OPS.keys()
    host, device = build(tmp_path, "host", ""), build(tmp_path, "device", DEVICE)
    for op in SCALAR_OPS:
        for dtype in set(dtypes_of(op)) & {torch.float32, torch.int64}:
            kind = ctypes.c_float if dtype == torch.float32 else ctypes.c_int64
            for values in ((0.3, 0.75, 0.5), (-0.6, 0.25, 2.5), (0.0, -0.0, 1.0)):
                given = [kind(v if kind is ctypes.c_float else int(v * 20)) for v in values]
                found = [_call(lib, op, dtype, kind, given) for lib in (host, device)]
                near = math.isclose(*found, rel_tol=2e-6, abs_tol=1e-7)
                assert near or all(math.isnan(f) for f in found), (op, values, found)


def _call(lib: ctypes.CDLL, op: str, dtype: torch.dtype, kind: type, given: list) -> float:
    call = getattr(lib, f"f_{op}_{str(dtype).split('.')[1]}")
    call.restype = ctypes.c_double if op in ("philox_uniform", "philox_normal") else kind
    return call((ctypes.c_int64 * 4)(), *given[: SCALAR_OPS[op].arity])


@pytest.mark.parametrize("inner", ["erf", "tanh"])
def test_small_results_of_the_normal_cdf_have_small_errors(inner: str, tmp_path: Path) -> None:
    """They are not 1 + erf(..), a difference of large numbers."""
    name = "d_normal_cdf" if inner == "erf" else "d_normal_cdf_tanh"
    text = '#include "scalar.h"\n'
    text += 'extern "C" void run(float* x, long n) '
    text += f"{{ for (long i = 0; i < n; ++i) x[i] = {name}(x[i]); }}"
    x = torch.linspace(-6, 6, 100_001, dtype=torch.float32)
    got, wide = x.clone(), x.double()
    compiled(tmp_path, inner, text).run(ctypes.c_void_p(got.data_ptr()), ctypes.c_long(len(x)))
    if inner == "erf":
        want = torch.special.ndtr(wide)
    else:
        want = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    error = (got.double() - want).abs()
    assert error.max() < 1.1e-7
    assert error[wide < -2.5].max() < 4e-8
    assert (error / want)[wide > -4].max() < 4e-4


def test_triton() -> None:
    device = pytest.importorskip("dicp.vendor.triton.device")
    from dicp.vendor.triton.render import spelling as triton

    args = ["a", "b", "c", "d"]
    for op, row in SCALAR_OPS.items():
        for dtype in dtypes_of(op):
            random = op.startswith("philox") and "bits" not in op
            text = triton.operator(op, dtype, dtype, args[: row.arity + random])
            called = re.findall(r"\bd\.(\w+)\(", text)
            assert all(hasattr(device, name) for name in called), (op, dtype, text)
    for text in (*triton.COMBINE.values(), *triton.VARIANTS.values(), *triton.SHARED.values()):
        assert all(hasattr(device, name) for name in re.findall(r"\bd\.(\w+)\(", text))


def test_cheaper_forms() -> None:
    """Every form that a schedule chooses has a row in each language, of functions it has."""
    from dicp.gpu import precision
    from dicp.vendor.maca.units import header_texts

    named = set(re.findall(r'"(\w+)"', inspect.getdoc(precision.variants) or ""))
    assert len(named) == 6
    triton = pytest.importorskip("dicp.vendor.triton.render.spelling")
    assert triton.VARIANTS.keys() == named
    of_host = {"exp_weight", "neg_by_bits", "sub_by_bits"}
    assert spelling.VARIANTS.keys() == named | of_host
    defined = set(re.findall(r"\b(d_\w+)\(", "".join(header_texts().values())))
    for row in spelling.VARIANTS.values():
        assert set(re.findall(r"\b(d_\w+)\(", row)) <= defined, row
