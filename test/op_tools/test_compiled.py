"""The tools inside compiled graphs: planted faults are named, with kernel, operator and line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from faults import as_if, aten, last_of_equal, lines_of, planted, with_args
from support.forked import COMPILER, server

from dicp import op_tools
from dicp.op_tools.run_op_from_data import find_captures


def many(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    a = torch.sin(x)  # sin
    b = torch.exp(a)  # exp
    c = torch.tanh(b)  # tanh
    d = torch.relu(c - 0.7)  # relu
    e = torch.sigmoid(d)  # sigmoid
    f = torch.sqrt(e)  # sqrt
    g = torch.log(f)  # log
    h = torch.floor(g * 3)  # floor
    i = torch.cos(h)  # cos
    j = torch.erf(i)  # erf
    k = torch.neg(j)  # neg
    m = torch.maximum(k, y)  # maximum
    o = torch.atan(m)  # atan
    p = torch.where(x > 0, o, y)  # where
    q = torch.clamp(p, -0.5, 0.5)  # clamp
    r = q.amax(0)  # amax
    s = torch.softmax(q + x, 1)  # softmax
    t = torch.rsqrt(s + r * r + 1)  # rsqrt
    u = torch.cumsum(t, 1)  # cumsum
    v = torch.atan2(u, y)  # atan2
    w = v.permute(1, 0) * y  # permute
    z = torch.gather(w, 1, n)  # gather
    return z.sum(1)  # sum


MANY = {
    aten.sin.default: as_if(aten.cos.default),
    aten.exp.default: as_if(aten.tanh.default),
    aten.tanh.default: as_if(aten.sigmoid.default),
    aten.relu.default: as_if(aten.abs.default),
    aten.sigmoid.default: as_if(aten.tanh.default),
    aten.sqrt.default: as_if(aten.neg.default),
    aten.log.default: as_if(aten.exp.default),
    aten.floor.default: as_if(aten.ceil.default),
    aten.cos.default: as_if(aten.sin.default),
    aten.erf.default: as_if(aten.tanh.default),
    aten.neg.default: as_if(aten.abs.default),
    aten.maximum.default: as_if(aten.minimum.default),
    aten.atan.default: as_if(aten.sin.default),
    aten.where.self: with_args(lambda c, a, b: (c, b, a)),
    aten.clamp.default: with_args(lambda x, low=None, high=None: (x, low, None)),
    aten.amax.default: as_if(aten.amin.default),
    aten._softmax.default: with_args(lambda x, dim, half: (x, 0, half)),
    aten.rsqrt.default: as_if(aten.sqrt.default),
    aten.cumsum.default: with_args(lambda x, dim: (x, 0)),
    aten.atan2.default: with_args(lambda a, b: (b, a)),
    aten.permute.default: with_args(lambda x, dims: (x, [0, 1])),  # as if strides did not matter
    aten.gather.default: with_args(lambda x, dim, n, *rest: (x, 0, n, *rest)),
    aten.sum.dim_IntList: as_if(aten.amax.default),
}


def inputs(size: int = 8) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    return torch.randn(size, size), torch.randn(size, size), torch.randint(0, size, (size, size))


def named(tool: op_tools.OpAutoCompare) -> set[tuple[str, int]]:
    found = [r for r in tool.results if r.kind == "operator" and not r.ok]
    return {(record.operator, record.call_site.line) for record in found}


def marked(op: object) -> str:
    return str(op).split(".")[1].strip("_")


def test_every_planted_fault_is_named_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    args = inputs()
    with planted(MANY), op_tools.OpAutoCompare() as tool:
        torch.compile(many, backend="cpugraph", dynamic=False)(*args)
    lines = lines_of(many)
    assert len(MANY) >= 20
    assert named(tool) == {(str(op), lines[marked(op)]) for op in MANY}
    assert all(r.call_site.file == __file__ for r in tool.failures)
    text = capsys.readouterr().out
    first = next(x for x in text.splitlines() if x.startswith("diverging kernel: "))
    assert f"operator: aten.sin.default (sin) at {__file__}:{lines['sin']}" in first


def test_without_faults_every_kernel_agrees() -> None:
    args = inputs()
    for dynamic in (False, True):
        torch._dynamo.reset()
        with op_tools.OpAutoCompare(quiet=True) as tool:
            torch.compile(many, backend="cpugraph", dynamic=dynamic)(*args)
        assert tool.failures == [] and {r.kind for r in tool.results} == {"kernel", "graph"}
        assert sum(len(r.nodes.split(",")) for r in tool.results) > 20
        assert all(not r.note for r in tool.results)


def test_a_sum_whose_terms_cancel_is_no_fault() -> None:
    """Eager happens to be exact; in another order the sum is not."""
    x = torch.linspace(-2, 2, 36).reshape(6, 6)
    for fault, wrong in (({}, set()), ({aten.sum.default: as_if(aten.amax.default)}, {"sum"})):
        with planted(fault), op_tools.OpAutoCompare(quiet=True) as tool, torch.no_grad():
            torch.compile(lambda x: x.sum().sin(), backend="cpugraph", dynamic=True)(x)
        assert {name.split(".")[1] for name, _ in named(tool)} == wrong
        assert bool(tool.failures) == bool(wrong)


def test_operators_that_read_what_is_not_rounded_yet_are_not_named() -> None:
    def narrow(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x).float().sum()

    x = torch.linspace(-2, 2, 64).bfloat16()
    fault = {aten.sin.default: as_if(aten.cos.default)}
    with planted(fault), op_tools.OpAutoCompare(quiet=True) as tool, torch.no_grad():
        torch.compile(narrow, backend="cpugraph", dynamic=False)(x)
    assert {name for name, _ in named(tool)} == {"aten.sin.default"}


def small(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.gelu(x @ w)
    return torch.tanh(h).sum()  # tanh


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shift", [0, 1])
def test_any_position_of_equal_elements_is_right_in_graphs(shift: int) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = torch.kthvalue(x, 4)
        return values * 2, places, x.gather(1, places[:, None]).sin()

    x = torch.tensor([[1.0, 2, 0, 2, 3, 2], [4, 0, 5, 1, 5, 5]])
    with last_of_equal(shift), op_tools.OpAutoCompare(quiet=True) as tool:
        places = torch.compile(program, backend="cpugraph", dynamic=False)(x)[1]
    assert places.tolist() == [5 - shift, 5 - shift]
    assert bool(tool.failures) == bool(shift)


def test_faults_of_backward_and_dynamic_graphs(dynamic: bool) -> None:
    x, w = torch.randn(6, 5), torch.randn(5, 7, requires_grad=True)
    fault = {aten.tanh_backward.default: with_args(lambda g, y: (g, g))}
    with planted(fault), op_tools.OpAutoCompare(quiet=True) as tool:
        torch.compile(small, backend="cpugraph", dynamic=dynamic)(x, w).backward()
    assert named(tool) == {("aten.tanh_backward.default", lines_of(small)["tanh"])}


def norm_of_slices(x: torch.Tensor, qkv: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Backward gets views with gaps, and a norm reads what tanh's gives."""
    q, k, v = (x @ qkv).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v)
    return torch.tanh(F.layer_norm(y, (8,), w, w)).square().sum()  # tanh_backward


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", ["cpu", "ascend"])
def test_faults_of_backward_between_slices_and_an_operator_of_several_results(target: str) -> None:
    op = aten.tanh_backward.default
    args = [torch.randn(size, requires_grad=True) for size in ((2, 8, 16), (16, 48), (8,))]
    with planted({op: with_args(lambda g, y: (g, g))}), op_tools.OpAutoCompare(quiet=True) as tool:
        torch.compile(norm_of_slices, backend=f"{target}graph", dynamic=False)(*args).backward()
    assert named(tool) == {(str(op), lines_of(norm_of_slices)["tanh_backward"])}
    assert [r for r in tool.failures if r.kind == "kernel"]
    assert {r.nodes for r in tool.results if r.kind == "graph"} == {"forward graph"}


def test_the_program_gets_what_the_graph_computes() -> None:
    args = inputs()
    plain = torch.compile(many, backend="cpugraph", dynamic=False)
    want = plain(*args)
    with op_tools.OpAutoCompare(quiet=True), op_tools.OpTimeMeasure(quiet=True):
        assert torch.equal(plain(*args), want)
    assert torch.equal(plain(*args), want)

    def draws(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return F.dropout(x, 0.5) + torch.rand_like(x)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.ones(64)
        return [compiled(x), x, torch.rand(2)]

    compiled = torch.compile(draws, backend="cpugraph", options={"fallback_random": True})
    before = run()
    with op_tools.OpAutoCompare(quiet=True) as tool:
        looked_at = run()
    assert all(map(torch.equal, before, looked_at)), "inputs and random state included"
    assert tool.failures == []


def test_a_fault_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from dicp.dynamo_bridge import compile_fx
    from dicp.dynamo_bridge.passes.base import Pass

    def break_it(gm: torch.fx.GraphModule, context: object) -> bool:
        for node in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default
        return True

    passes = compile_fx.graph_passes
    wrong = Pass("wrong", break_it)
    monkeypatch.setattr(compile_fx, "graph_passes", lambda c, kind: (*passes(c, kind), wrong))
    with op_tools.OpAutoCompare(quiet=True) as tool:
        torch.compile(lambda x: torch.sin(x) * 2, backend="cpugraph", dynamic=False)(torch.ones(5))
    (record,) = tool.failures
    assert record.kind == "graph" and record.comparisons[-1].name == "captured output[0]"


def test_captures_of_kernels_run_on_their_own() -> None:
    with op_tools.OpCapture(quiet=True):
        torch.compile(small, backend="cpugraph")(torch.randn(6, 5), torch.randn(5, 7))
    root = Path("op_tools_results/op_capture_results")
    folders = [f for f in find_captures(root) if "tanh" in f.relative_to(root).parts[0]]
    assert folders
    done = server(*COMPILER).run([folders[0] / "reproduce.py"], check=True)
    assert done.stdout.splitlines() == ["0 True"]


def test_time_per_kernel_with_an_estimate_per_operator(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpTimeMeasure() as tool:
        torch.compile(small, backend="cpugraph")(torch.randn(60, 50), torch.randn(50, 70))
    kernels = [r for r in tool.results if not r.estimated]
    assert kernels and all((r.forward or 0) > 0 for r in kernels)
    shares = [r for r in tool.results if r.estimated]
    assert {r.name for r in shares} >= {"aten.tanh.default"}
    assert "aten.tanh.default (estimate)" in capsys.readouterr().out


def test_time_of_products_and_of_calls_between_kernels() -> None:
    """Products have other names in a profile; library and eager calls have no kernel."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).sin() @ x + torch.sort(x)[0].cos()

    compiled = torch.compile(program, backend="cpugraph", options={"eager_ops": "sort"})
    with op_tools.OpTimeMeasure(quiet=True) as tool:
        compiled(torch.randn(60, 60))
    times = [(r.name, r.call_site.line > 0) for r in tool.results if not r.estimated]
    products = [known for name, known in times if "product" in name or "mm" in name]
    assert products == [True, True] and ("aten.sort.default", True) in times, times
    assert not any("empty" in name or "view" in name for name, _ in times)


def test_graphs_compiled_without_a_tool_have_no_trace_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dicp.dynamo_bridge import compile_fx

    def never(*parts: object) -> None:
        raise AssertionError("an inspected graph")

    monkeypatch.setattr(compile_fx, "InspectedGraph", never)
    x = torch.ones(3)
    torch.compile(lambda x: x.cos() + 3, backend="cpugraph")(x)
    with op_tools.OpAutoCompare(quiet=True), pytest.raises(Exception, match="an inspected graph"):
        torch.compile(lambda x: x.cos() + 4, backend="cpugraph")(x)


GRAPH_FAULTS = {
    aten.sin.default: as_if(aten.cos.default),
    aten.exp.default: as_if(aten.tanh.default),
    aten.relu.default: as_if(aten.abs.default),
    aten.floor.default: as_if(aten.ceil.default),
    aten.maximum.default: as_if(aten.minimum.default),
    aten.amax.default: as_if(aten.amin.default),
}


def few(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a = torch.sin(x)  # sin
    b = torch.exp(a)  # exp
    c = torch.relu(b - 1.2)  # relu
    d = torch.floor(c * 3)  # floor
    e = torch.maximum(d, y)  # maximum
    return e.amax(1)  # amax


@pytest.mark.parametrize("backend", ["ascendgraph", "tritongraph", "topsgraph"])
@pytest.mark.filterwarnings("ignore")
def test_faults_through_a_simulator_and_an_interpreter(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    with planted(GRAPH_FAULTS), op_tools.OpAutoCompare(quiet=True) as tool:
        torch.compile(few, backend=backend, dynamic=False)(x, y)
    lines = lines_of(few)
    assert named(tool) == {(str(op), lines[marked(op)]) for op in GRAPH_FAULTS}
