"""convert_config.yaml: how it is read, what the pass makes of it, and a chip that lives by it."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import Recorder, record
from stand_in import small_chip
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed

from dicp.adaptor import Adaptor, find_adaptor, read_adaptor
from dicp.config import Config
from dicp.dynamo_bridge.compile_fx import compile_fx
from dicp.dynamo_bridge.graph_cache import graph_context_key
from dicp.errors import AdaptorFileError, NarrowingError
from dicp.testing import BackendUnderTest
from dicp.testing.coverage import OPERATORS
from dicp.vendor.cpu import CpuTarget

EXAMPLE = """\
- common_config:
    dtype: (int64)->int32, (float64)->float32, (complex128)->complex64
    layout: NCHW
- diopiAdd:
    dtype: (float64, int64)->float32
    tensor_dtype:
      other: (int64)->int32
    layout: NCHW, input(NHWC)
- diopiMulInpScalar:
    dtype: (float64)->float64
- aten.sub.Tensor:
    contiguous: False
    allow_narrowing: True
"""
I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64
COMMON = "- common_config:\n    dtype: (int64)->int32, (float64)->float32\n"
ND = COMMON + "    layout: ND\n"


def adaptor(text: str = EXAMPLE, **options: Any) -> Adaptor:
    return read_adaptor(Path("chip.yaml"), text, **options)


# ---- the file ------------------------------------------------------------------------------------


def test_the_deeper_level_wins_for_each_dtype() -> None:
    add = adaptor().conversions("add", "Tensor", False)
    assert (add.dtype("self", I64), add.dtype("other", I64)) == (F32, I32)
    assert (add.dtype("other", F64), add.dtype("other", torch.complex128)) == (F32, torch.complex64)
    assert add.dtype("self", torch.int8) == torch.int8
    assert (add.layout("self"), add.layout("other")) == ("NHWC", "NCHW")
    exp = adaptor().conversions("exp", "default", False)
    assert (exp.dtype("self", I64), exp.layout("self"), exp.allow_narrowing) == (I32, "NCHW", False)
    of_number, of_tensors = (adaptor().conversions("mul", "Tensor", x) for x in (True, False))
    assert (of_number.dtype("self", F64), of_tensors.dtype("self", F64)) == (F64, F32)
    sub = adaptor().conversions("sub", "Tensor", False)
    assert (sub.layout("self"), sub.allow_narrowing) == ("ND", True)
    assert adaptor().conversions("sub", "Scalar", True).layout("self") == "NCHW"
    assert adaptor("") == Adaptor() and Adaptor().common == adaptor("- common_config: {}\n").common


def test_the_example_of_the_page_is_read() -> None:
    page = Path(__file__).parents[2] / "docs" / "adding_a_vendor.md"
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert adaptor(text).conversions("add", "Tensor", False).dtype("other", I64) == I32


WRONG = {
    "- common_config:\n    dtype: (int64)->int33\n": (2, "unknown dtype 'int33'"),
    "- common_config:\n    dtype: int64->int32\n": (2, "expected casts such as"),
    "- common_config:\n    layuot: ND\n": (2, "unknown key 'layuot'"),
    "- common_config:\n    layout: NWHC\n": (2, "unknown layout 'NWHC'"),
    "- common_config:\n    contiguous: maybe\n": (2, "expected True or False"),
    "- diopiMaximun:\n    layout: ND\n": (1, "unknown operator 'diopiMaximun'"),
    "- common_config: {}\n- maximun:\n    layout: ND\n": (2, "Did you mean 'maximum'"),
    "- add.Tensor:\n    tensor_dtype:\n      othr: (int64)->int32\n": (
        3,
        "unknown argument 'othr'",
    ),
    "- add:\n    layout: ND, othr(NHWC)\n": (2, "unknown argument 'othr'"),
    "- add:\n    dtype: (float32)->float16\n": (2, "needs precision='half'"),
    "- add:\n    layout: ND\n    layout: NHWC\n": (3, "'layout' is here a second time"),
    "- add:\n    layout: ND\n- diopiAdd:\n    layout: NHWC\n": (
        3,
        "what the file says of add before",
    ),
    "- common_config:\n    layout: ND\n- common_config: {}\n": (
        3,
        "of common_config before",
    ),
    "- add:\n    dtype: (int64)->int32, (int64)->int16\n": (2, "of int64 before"),
    "- add:\n    layout: ND, other(ND), other(NHWC)\n": (2, "of other before"),
    "- add:\n    layout: ND, NHWC\n": (2, "of all arguments before"),
    "common_config: {}\n": (1, "expected a list of entries"),
    "- add\n": (1, "expected `name: value`"),
    "- add: {a: 1\n": (2, "expected ',' or '}'"),
    "- add: !!python/object:os.system {}\n- sub: 3\n": (2, "expected `name: value`"),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_named_with_its_line(text: str) -> None:
    line, message = WRONG[text]
    with pytest.raises(AdaptorFileError) as found:
        adaptor(text)
    assert found.value.line == line and message in str(found.value)
    assert f"chip.yaml:{line}: " in str(found.value)


def test_statements_that_agree_may_be_repeated() -> None:
    """As in DIOPI's own files, where an operator and its in-place form have entries."""
    found = adaptor("- diopiAdd:\n    layout: ND\n- diopiAddInp:\n    layout: ND\n")
    assert found == adaptor("- add:\n    layout: ND\n")


@pytest.mark.parametrize(
    "cast",
    ["(float64)->int16", "(float64)->complex64", "(complex128)->complex64", "(int64)->int64"],
)
def test_a_cast_to_a_type_that_the_target_lacks_is_named(cast: str, tmp_path: Path) -> None:
    """Its call would run eagerly, as without the cast. Complex values are computed as pairs; a type
    cast to itself is one that the common entry does not cast."""
    file = tmp_path / "chip.yaml"
    file.write_text(f"- common_config: {{}}\n- add:\n    dtype: {cast}\n")
    target, config = Small(), Config(convert_config=file)
    target.facts = replace(Small.facts, dtypes=Small.facts.dtypes - {torch.int16})
    if cast.startswith("(float64)"):
        problem = f"yaml:3: the target does not compute float64 in {cast.partition('>')[2]}"
        with pytest.raises(AdaptorFileError, match=problem):
            find_adaptor(target, config, target.facts.dtypes)
    else:
        assert find_adaptor(target, config, target.facts.dtypes) is not None


def test_float32_is_halved_only_where_the_user_allows_it() -> None:
    halved = adaptor("- add:\n    dtype: (float32)->float16\n", half=True)
    assert halved.conversions("add", "Tensor", False).dtype("self", F32) == torch.float16


# ---- the pass ------------------------------------------------------------------------------------


class Small(Recorder):
    """The host without the types that the chip lacks."""

    facts = replace(CpuTarget.facts, dtypes=CpuTarget.facts.dtypes - {I64, F64})


Run = Callable[..., tuple[Any, Counter[str]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The result of a function under an adaptor file, and its graph's calls."""

    def run(text: str, fn: Callable[..., Any], *inputs: Any) -> tuple[Any, Counter[str]]:
        file = tmp_path / "chip.yaml"
        file.write_text(text)
        target, config = Small(), Config(cache=False, convert_config=file)

        def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            return compile_fx(gm, examples, target, config, target.reports.append)

        torch._dynamo.reset()
        result = torch.compile(fn, backend=backend, dynamic=False)(*inputs)
        calls = [n for n in target._graphs[-1].graph.nodes if n.op == "call_function"]
        return result, Counter(str(node.target).removesuffix(".default") for node in calls)

    return run


def chain(x: Tensor, y: Tensor) -> Tensor:
    z = torch.where(torch.maximum(x, y) > 2, x, y)
    return torch.minimum(z.view(2, 3).t(), x.view(2, 3).t()).double().exp().to(F32)


def test_casts_between_neighbours_merge_and_cancel(run: Run) -> None:
    """Integers are cast once each on the way in, none on the way out; float64 nowhere."""
    x, y = torch.arange(6), torch.tensor([3, 1, 9, 0, 2, 2])
    result, calls = run(ND, chain, x, y)
    torch.testing.assert_close(result, chain(x, y))
    assert calls["dicp.narrow"] == 2
    own = ("aten.maximum", "aten.gt.Scalar", "aten.where.self", "aten.minimum", "aten.exp")
    assert all(calls[name] == 1 for name in own), calls
    assert calls["prims.convert_element_type"] <= 2, calls


def test_results_are_as_eager_gives_them(run: Run) -> None:
    x = torch.arange(6).view(2, 3).t()
    for text in (ND, COMMON, COMMON + "    layout: NHWC\n"):
        result, _ = run(text, lambda x: (torch.maximum(x, x * 2), x.double() / 3), x)
        assert [(t.dtype, t.stride()) for t in result] == [(I64, (1, 3)), (F64, (1, 3))]
        torch.testing.assert_close(result[1].float(), (x.double() / 3).float())


@pytest.mark.parametrize(("layout", "strides"), [
    ("NCHW", (60, 20, 5, 1)), ("NHWC", (60, 1, 15, 3)), ("ND", (60, 1, 15, 3)),
])  # fmt: skip
def test_operands_are_laid_out(layout: str, strides: tuple[int, ...], tmp_path: Path) -> None:
    file = tmp_path / "chip.yaml"
    file.write_text(f"- relu:\n    layout: {layout}\n- exp:\n    contiguous: False\n")
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    given = x.contiguous() if layout == "NHWC" else x
    target = record(torch.relu, given, target=Small(), convert_config=file)
    (relu,) = target._graphs[-1].graph.find_nodes(
        op="call_function", target=torch.ops.aten.relu.default
    )
    assert relu.args[0].meta["val"].stride() == strides


BIG = 2**31


def test_integers_that_do_not_fit_are_refused(run: Run) -> None:
    fits, big = torch.arange(4), torch.arange(4) + BIG
    with pytest.raises(NarrowingError, match="maximum.default: 2147483648 does not fit torch.int"):
        run(ND, torch.maximum, fits, big)  # an input
    with pytest.raises(BackendCompilerFailed, match="gt.Scalar: 2147483648 does not fit"):
        run(ND, lambda x: x > BIG, fits)  # an argument
    with pytest.raises(BackendCompilerFailed, match=r"\w+: 2147483648 does not fit"):
        run(ND, lambda x: x.clamp(max=1) + torch.tensor([BIG, 1, 2, 3]).flip(0), fits)  # a constant
    result, calls = run(ND, lambda x: x * 3, fits + BIG // 2)  # what is computed keeps its type
    assert torch.equal(result, (fits + BIG // 2) * 3) and not calls["dicp.narrow"]
    wrapped, calls = run(ND + "    allow_narrowing: True\n", lambda x: x * 3, big)
    assert torch.equal(wrapped, (big * 3).int().long()) and not calls["dicp.narrow"]


def test_the_file_is_part_of_the_key(tmp_path: Path) -> None:
    file, target = tmp_path / "chip.yaml", CpuTarget()
    config, keys = Config(convert_config=file), [graph_context_key(target, Config())]
    for text in (COMMON, ND):
        file.write_text(text)
        keys.append(graph_context_key(target, config))
    assert len(set(keys)) == 3
    with pytest.raises(AdaptorFileError, match=r"[^0]: there is no such file"):
        find_adaptor(target, Config(convert_config=tmp_path / "none.yaml"))
    assert find_adaptor(target, Config()) is None


# ---- a chip without int64 and float64 ------------------------------------------------------------

SAMPLE = {
    "pointwise": ("where", "exp"), "reduction": ("sum_dims",), "matmul": ("addmm",),
    "indexing": ("gather", "index_select"), "normalization": ("layer_norm",),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::dicp.errors.SimulatorWarning")
@pytest.mark.parametrize("target", ["cpu", "tops"])
@pytest.mark.parametrize("file", SAMPLE)
def test_a_chip_without_wide_types(file: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes operator cases; `stand_in/small_chip.py` runs whole files."""
    small_chip.use(monkeypatch, target)
    cases = {case.name: case for case in importlib.import_module(f"{OPERATORS}.test_{file}").CASES}
    for name in SAMPLE[file][: None if target == "cpu" else 1]:
        cases[name].check(BackendUnderTest(f"{target}graph"), dynamic=False)
