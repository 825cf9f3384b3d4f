"""The table of an operator library's functions, its texts, and the reference library."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dicp.oplib.__main__ import app
from dicp.oplib.binding import ROUNDING, Scalar
from dicp.oplib.reference import DTYPES, TYPES, build
from dicp.oplib.table import ANY, Function, _listed, functions
from dicp.oplib.text import declarations, header
from dicp.toolchain import find_compiler
from dicp.torch_private import dispatches_alone, schema_of

ROOT = Path(__file__).resolve().parents[2]


def test_every_argument_is_passed_told_or_has_its_default() -> None:
    """Each is in one place; one function has one signature; there are 300 functions and more."""
    signatures: dict[str, list[str]] = {}
    for function in functions():
        passed = [p.name for p in function.parameters if p.kind != "out" and p.constant is ANY]
        arguments = [argument.name for argument in schema_of(function.op).arguments]
        assert sorted([*passed, *function.absent]) == sorted(arguments), function.operator
        assert function.results == len(schema_of(function.op).returns), function.operator
        types = [kind for kind, _ in function.c_parameters()]
        assert signatures.setdefault(function.name, types) == types, function.name
    assert len(declarations()) >= 300
    public = {d.name for d in declarations() if d.functions[0].public}
    assert {"diopiAddInpScalar", "diopiPowInpTensor", "diopiConvolution2dBackward"} <= public


def test_composite_operators_have_gradients() -> None:
    """PyTorch differentiates `linear` and `silu_backward` whole; of others it needs the parts."""
    composite = {
        function.operator for function in functions()
        if dispatches_alone(function.op, "CompositeImplicitAutograd")
    }  # fmt: skip
    assert composite == {"linear", "silu_backward"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("relu Relu(self out)", "'self out'"),
        ("relu Relu(out, self, dim)", "dim"),
        ("gelu_backward GeluBackward(out, grad_output)", "self has no default"),
        ("gelu Gelu(out, self); exact=true", "exact"),
        ("gelu Gelu(out, self:float)", "float is no type"),
        ("gelu Gelu[out]", "not an operator, a function and its parameters"),
    ],
)
def test_wrong_rows(line: str, said: str) -> None:
    with pytest.raises((ValueError, KeyError), match=re.escape(said)):
        _listed(line)


def test_conditions() -> None:
    (function,) = (f for f in functions() if f.name == "diopiConvTranspose2d")
    assert function.absent == {"transposed": True} and function.dimensions == {"input": 4}
    (function,) = (f for f in functions() if f.name == "diopiGather")
    assert function.absent == {"sparse_grad": False}


@pytest.mark.parametrize(
    "prototype",
    [
        "Scatter(out, self, dim, src, index, constant5)",
        "ConvTranspose2d(out, input, weight, bias, stride, padding, output_padding, groups, "
        "dilation)",
        "ConvTranspose2dBackward(out0, out1, out2, grad_output, input, weight, bias_sizes, stride, "
        "padding, dilation, output_padding, groups)",
        "NLLLossV2Backward(out, grad_output, self, target, weight, total_weight, reduction, "
        "ignore_index)",
        "LayerNormBackward(out0, out1, out2, grad_out, input, weight, bias, mean, rstd, "
        "normalized_shape)",
        "LinalgQR(A, mode, out0, out1)",
        "IndexPut(out, self, values, indices, indices_count, accumulate)",
        "Sort(out0, out1, self, dim, descending, stable)",
        "BatchNormBackward(out0, out1, out2, grad_out, input, weight, running_mean, running_var, "
        "save_mean, save_invstd, train, eps)",
        "Topk(out0, out1, self, k, dim, largest, sorted)",
        "Cat(out, tensors, tensors_count, dim)",
        "UpsampleLinear(out, self, output_size, align_corners, constant4)",
        "Cdist(out, x1, x2, p, compute_mode)",
        "MaxPool2dBackward(out, grad_output, self, kernel_size, stride, padding, dilation, "
        "ceil_mode, indices)",
    ],
)
def test_orders_of_the_public_interface(prototype: str) -> None:
    """Arguments of one type, or in another order than ATen's: compilers find no swap."""
    name, _, _ = prototype.partition("(")
    (found, *_) = (f for f in functions() if f.name == f"diopi{name}")
    assert f"{name}({', '.join(name for _, name in found.c_parameters())})" == prototype


def test_enumerators_are_the_header_s() -> None:
    declared = dict(re.findall(r"RoundMode(\w+) = (\d)", header()))
    assert {str(mode).title(): str(number) for mode, number in ROUNDING.items()} == declared
    declared = dict(re.findall(r"diopi_dtype_(\w+) = (\d+)", TYPES.read_text()))
    of = {str(dtype).removeprefix("torch."): str(number) for number, dtype in DTYPES.items()}
    assert of == {name: number for name, number in declared.items() if name != "unsupported"}
    assert (str(Scalar.FLOAT64), str(Scalar.INT64)) == (declared["float64"], declared["int64"])


def _in_place(name: str) -> Function:
    return next(f for f in functions() if f.in_place == name)


def test_the_header_is_c_and_the_reference_library_has_all(tmp_path: Path) -> None:
    library = build(tmp_path)
    result = CliRunner().invoke(app, ["missing", str(library)])
    count = sum(not declaration.in_place for declaration in declarations())
    assert f"has {count} of {count} functions" in result.output
    assert CliRunner().invoke(app, ["header"]).output == header()
    tmp_path.joinpath("c.c").write_text('#include "functions.h"\n')
    command, _ = find_compiler("the test", "")
    compiled = [*command, "-x", "c", "-std=c11", "-Wall", "-Werror", "-fsyntax-only", "c.c"]
    subprocess.run(compiled, check=True, cwd=tmp_path)
    assert TYPES.read_text() == tmp_path.joinpath(TYPES.name).read_text()
    declared = re.search(r"diopiError_t diopiAddInpScalar\(.*\)", header())
    assert declared is not None and declared.group() == (
        "diopiError_t diopiAddInpScalar(diopiContextHandle_t context, diopiTensorHandle_t self, "
        "const diopiScalar_t* other, const diopiScalar_t* alpha)"
    )
    assert _in_place("diopiAddInpScalar").operator == "add.Tensor"


def test_a_library_that_lacks_functions(tmp_path: Path) -> None:
    tmp_path.joinpath("one.c").write_text("int diopiRelu(void) { return 0; }\n")
    command, _ = find_compiler("the test", "")
    arguments = [*command, "-x", "c", "-shared", "-fPIC", "one.c", "-o", "one.so"]
    subprocess.run(arguments, check=True, cwd=tmp_path)
    lines = CliRunner().invoke(app, ["missing", str(tmp_path / "one.so")]).output.splitlines()
    assert "diopiAbs: abs" in lines and not any(line.startswith("diopiRelu:") for line in lines)
    assert lines[-1].startswith("one.so has 1 of ")


def test_the_page_lists_them() -> None:
    spec = importlib.util.spec_from_file_location("page", ROOT / "docs/operator_library.py")
    assert spec is not None and spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.page() == page.PAGE.read_text(), "run `make docs`"
