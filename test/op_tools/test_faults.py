"""Every kind of planted fault is found by every tool that can see it, on four targets.

Kinds: a wrong rule, a lost dtype, an operator that ignores strides, an overflow in half, a write to
an input. Tools: autocompare in eager code and in compiled graphs, overflow check, bisection of a
loss, and module recordings. test_compiled.py plants 23 more rules at once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import KINDS, as_if, aten, lines_of, overwriting, planted

from dicp import op_tools
from dicp.op_tools import bisect, one_iter
from dicp.op_tools.run_op_from_data import main
from dicp.op_tools.script_run import ScriptRun

pytestmark = pytest.mark.sweep

TARGETS = ["cpu", "ascend", "triton", "maca"]
WRITE = "write to an input"
WRITER = aten.neg.default
OPERATORS = {**{kind: next(iter(faults)) for kind, faults in KINDS.items()}, WRITE: WRITER}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 2.0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.neg(x)  # neg
        b = torch.sin(a * self.scale)  # sin
        c = torch.atan(b)  # atan
        d = torch.cumsum(c, 1)  # cumsum
        return torch.exp((d + 6.0).half())  # exp


MARKS = lines_of(Model.forward)


def example() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(8, 8)


def mark(kind: str) -> int:
    return MARKS[str(OPERATORS[kind]).split(".")[1]]


@contextlib.contextmanager
def fault(kind: str, target: str) -> Iterator[None]:
    context = overwriting(target, WRITER) if kind == WRITE else planted(KINDS[kind])
    with context:
        yield


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_autocompare_in_a_compiled_graph(kind: str, target: str) -> None:
    model = Model()
    with fault(kind, target), op_tools.OpAutoCompare(quiet=True) as tool, torch.no_grad():
        torch.compile(model, backend=f"{target}graph", dynamic=False)(example())
    wrong = {(r.operator, r.call_site.line) for r in tool.failures if r.kind == "operator"}
    assert wrong == {(str(OPERATORS[kind]), mark(kind))}
    assert all(r.call_site.file == __file__ for r in tool.failures if r.kind == "operator")


def hot(x: torch.Tensor) -> torch.Tensor:
    a = torch.exp(x * 0.5)  # exp
    b = torch.relu(x)  # relu
    c = torch.sigmoid(x)  # sigmoid
    d = torch.sqrt(x)  # sqrt
    e = torch.tanh(x)  # tanh
    return torch.stack((a, b, c, d, e))


BECOMES_EXP = [aten.relu.default, aten.sigmoid.default, aten.sqrt.default, aten.tanh.default]
OVERFLOWS = {**KINDS["overflow"], **{op: as_if(aten.exp.default) for op in BECOMES_EXP}}
"""Each of these makes an infinity of 20 in half."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OVERFLOWS, ids=str)
def test_overflow_check_in_a_compiled_graph(op: Any, target: str) -> None:
    x = torch.full((4, 8), 20.0).half()
    with planted({op: OVERFLOWS[op]}), op_tools.OpOverflowCheck(quiet=True) as tool:
        torch.compile(hot, backend=f"{target}graph", dynamic=False)(x)
    first = tool.first
    assert first is not None and first.operator == str(op) and not first.in_inputs
    line = lines_of(hot)[str(op).split(".")[1]]
    assert (first.call_site.file, first.call_site.line) == (__file__, line)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_overflows_without_a_fault(target: str) -> None:
    with op_tools.OpOverflowCheck(quiet=True) as tool:
        torch.compile(hot, backend=f"{target}graph", dynamic=False)(torch.full((4, 8), 20.0).half())
    assert tool.findings == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_autocompare_of_replayed_operators(
    kind: str, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operator of the eager model alone, through the target."""
    monkeypatch.setenv("AUTOCOMPARE_ERROR_TOLERANCE_FLOAT16", "1e-3,1e-3")  # one rounding
    names = {f"torch.{mark}" for mark in MARKS}
    with op_tools.OpCapture(sorted(names), quiet=True), torch.no_grad():
        Model()(example())
    capsys.readouterr()
    options = ["--acc_check", "--run_times", "1", "--backend", f"{target}graph"]
    with fault(kind, target):
        assert main(["op_tools_results", *options]) == 1
    failed = re.findall(r"^first failure: (\S+)", capsys.readouterr().out, re.M)
    wrong = str(OPERATORS[kind]).split(".")[1]
    assert {name for name in failed if name in names} == {f"torch.{wrong}"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_one_iter(kind: str, target: str) -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), Model(), torch.nn.Flatten(0))
    with one_iter.record(model, None, "recording"):
        model(example())
    with fault(kind, target):
        report = one_iter.compare("recording", model, backend=f"{target}graph")
    (record,) = report.innermost
    assert record.path == "1"
    names = {c.name for c in record.comparisons if not c.fp64}
    assert names == ({"input[0]"} if kind == WRITE else {"output[0]"})
    found = {(r.operator, r.call_site.line) for r in report.inside["1"]}
    assert found == {(str(OPERATORS[kind]), mark(kind))}


SCRIPT = """\
import torch
from test_faults import Model, example

model, x = Model(), example()
for step in range(2):
    value = model(x)
    loss = value.float().log().mean() + x.sum()
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_bisection_of_a_loss(kind: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT)

    def run(spec: Any) -> Any:
        torch._dynamo.reset()
        return ScriptRun(spec).run()

    with fault(kind, target):
        assert bisect.main(["train.py", "--backend", f"{target}graph", "--steps", "2"], run) == 1
    text = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip()
            for line in text.splitlines() if line.startswith("|")}  # fmt: skip
    assert rows["operator"] == str(OPERATORS[kind])
    assert rows["line"] == f"{__file__}:{mark(kind)}"
    runs, operators = (int(word) for word in rows["runs"].split() if word.isdigit())
    assert 2 ** (runs - 3) <= operators


# ---- eager: kernels of the CPU that are wrong in float32 and right in float64 ---------------


def half(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).to(x.dtype)


def spoil(x: torch.Tensor) -> torch.Tensor:
    result = x * -1
    x[0] += 1
    return result


EAGER: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "wrong rule": ("sin", lambda x: torch.cos(x), lambda x: torch.cos(x - torch.pi / 2)),
    "lost dtype": ("atan", lambda x: torch.atan2(x, torch.ones_like(x)).bfloat16(),
                   lambda x: torch.atan2(x, torch.ones_like(x))),
    "strides": ("erf", lambda x: torch.special.erfinv(x.t().contiguous().view(x.shape)),
                lambda x: torch.special.erfinv(x)),
    "overflow": ("sqrt", lambda x: half(x.pow(0.5) * 1e6), lambda x: x.pow(0.5) * 1e6),
    WRITE: ("neg", spoil, lambda x: x * -1),
}  # fmt: skip


@pytest.fixture
def wrong_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    name, wrong, right = EAGER[request.param]
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        name, lambda x: right(x) if x.dtype == torch.float64 else wrong(x), "CPU",
        allow_override=True,
    )  # fmt: skip
    yield request.param
    library._destroy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong_kernel", EAGER, indirect=True)
def test_autocompare_in_eager_code(wrong_kernel: str) -> None:
    x = example().t()
    name = EAGER[wrong_kernel][0]
    with op_tools.OpAutoCompare(quiet=True) as tool:
        y = x * 0.5
        getattr(torch, name)(y)  # called
        torch.relu(y)
    (record,) = tool.failures
    lines = Path(__file__).read_text().splitlines()
    assert record.operator == f"torch.{name}" and "# called" in lines[record.call_site.line - 1]
    wrong = [c.name for c in record.comparisons if not c.allclose]
    assert wrong == [f"torch.{name} {'input' if wrong_kernel == WRITE else 'output'}"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong_kernel", ["overflow"], indirect=True)
def test_overflow_check_in_eager_code(wrong_kernel: str) -> None:
    x = example()
    with op_tools.OpOverflowCheck(quiet=True) as tool:
        torch.relu(torch.sqrt(x + 1))
    assert tool.first is not None and tool.first.operator == "torch.sqrt"
