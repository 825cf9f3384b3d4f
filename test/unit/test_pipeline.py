"""Stages of a compilation: stored graphs and their guards, lines, failures, parts of a graph."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dicp import Backend
from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge import compile_fx as compiler
from dicp.dynamo_bridge.aot_graph import GraphInfo
from dicp.dynamo_bridge.graph_cache import find_graph
from dicp.dynamo_bridge.observe import GraphReport
from dicp.dynamo_bridge.partition import split_data_dependent
from dicp.dynamo_bridge.passes.base import Pass, PassContext
from dicp.errors import DicpWarning, FallbackWarning, IndexOutOfBoundsError, InferenceMismatchError
from dicp.target import Artifact, Executable, LowerContext, Source
from dicp.vendor.cpu.target import CpuTarget

# ---- guards ----------------------------------------------------------------------------------


@dataclass
class Doubling:
    """A program whose code depends on a guard: large inputs are doubled, small ones negated."""

    large: bool
    nodes: Sequence[Any] = ()

    def kernels(self) -> Sequence[Any]:
        return ()


class Guarding(CpuTarget):
    """Compiles x * 2, with a guard of its own."""

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> Any:
        (x,) = (n for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor) and not n.args)
        return Doubling(bool(x.meta["val"].shape[0] > 8))

    def render(self, program: Any, config: Config) -> Source:
        return Source({}, dict)

    def build(self, program: Any, source: Source, cache: Cache, config: Config) -> Artifact:
        return Artifact(self.name, {"large": program.large})

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        factor = 2 if artifact.program["large"] else -1
        return lambda inputs: [inputs[-1] * factor]


def test_guards_of_a_compilation_are_stored_checked_and_added(tmp_path: Path) -> None:
    target, config = Guarding(), Config(cache_dir=tmp_path)
    reports: list[GraphReport] = []

    def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return compiler.compile_fx(gm, inputs, target, config, reports.append)

        return torch.compile(fn, backend=backend, dynamic=True)

    def found(run: Callable[..., Any], size: int) -> tuple[float, str]:
        return run(torch.ones(size))[0].item(), reports[-1].cache

    # Different graphs of Dynamo's, so that AOTAutograd's results differ, and equal ATen graphs.
    assert found(compiled(lambda x: x * 2), 10) == (2, "cold")
    second = compiled(lambda x: torch.mul(x, 2))
    assert found(second, 12) == (2, "graph")
    assert found(second, 4) == (-1, "cold"), "the stored guard is the second function's, too"
    assert len(reports) == 3
    third = compiled(lambda x: x.mul(2))
    assert found(third, 5) == (-1, "graph"), "the first entry's guard does not hold"
    torch._dynamo.reset()
    again = compiled(lambda x: x * 2)
    assert found(again, 11) == (2, "aot")
    assert found(again, 3) == (-1, "graph") and len(reports) == 6


def test_a_negative_start_does_not_find_the_program_of_a_positive_one(tmp_path: Path) -> None:
    def rest(x: Tensor, start: int) -> Tensor:
        return x[:, start:] * 2

    backend = Backend("cpu", cache_dir=tmp_path)
    x = torch.randn(10, 6)
    for start in (2, -2):
        torch._dynamo.reset()
        out = torch.compile(rest, backend=backend, dynamic=True)(x, start)
        assert out.shape == rest(x, start).shape
        assert backend.reports[-1].cache == "cold"


def test_constants_without_a_digest_have_no_key(tmp_path: Path) -> None:
    class Sparse(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.eye(3).to_sparse()

    graph = fx.Graph()
    table = graph.get_attr("table")
    graph.output((table,))
    gm = fx.GraphModule(Sparse(), graph)
    cache = Cache.open(Config(cache_dir=tmp_path))
    assert find_graph(cache, gm, GraphInfo("inference"), "").key == ""
    gm.table = torch.eye(3)
    assert find_graph(cache, gm, GraphInfo("inference"), "").key


# ---- lines -----------------------------------------------------------------------------------


def first(table: Tensor, at: Tensor) -> Tensor:
    doubled = table * 2
    return doubled[at].exp()


def second(table: Tensor, at: Tensor) -> Tensor:
    # the same graph as that of `first`

    doubled = table * 2
    return doubled[at].exp()


def third(table: Tensor, at: Tensor) -> Tensor:
    # the same ATen graph, another graph of Dynamo's
    doubled = torch.mul(table, 2)

    return doubled[at].exp()


def line_of(fn: Callable[..., Any], text: str) -> str:
    lines, start = inspect.getsourcelines(fn)
    (offset,) = [k for k, line in enumerate(lines) if text in line]
    return f"{Path(__file__).name}:{start + offset}"


def test_a_stored_graph_takes_the_lines_of_the_program_at_hand(tmp_path: Path) -> None:
    backend = Backend("cpu", cache_dir=tmp_path)
    at, bad = torch.tensor([0, 4]), torch.tensor([0, 9])
    for fn, level in ((first, "cold"), (second, "aot"), (third, "graph"), (second, "aot")):
        torch._dynamo.reset()
        backend.reports.clear()
        compiled = torch.compile(fn, backend=backend)
        compiled(torch.rand(5, requires_grad=True), at).sum().backward()
        assert [r.cache for r in backend.reports] == [level, level]
        doubling, picking = line_of(fn, "= t"), line_of(fn, "doubled[at]")
        for report in backend.reports:
            lines = {n.user_line.rpartition("/")[2] for n in report.nodes}
            assert lines == {doubling, picking}, report.kind
            sources = " ".join(s for k in report.kernels for s in k.sources)
            assert doubling in sources and picking in sources
        with pytest.raises(IndexOutOfBoundsError) as caught:
            compiled(torch.rand(5, requires_grad=True), bad)
        assert caught.value.user_line.endswith(picking)


def test_code_that_names_a_line_is_found_for_that_line_alone(tmp_path: Path) -> None:
    """What a GPU prints when an index is out of range is part of its code."""
    backend = Backend("triton", cache_dir=tmp_path)
    table, at = torch.rand(5), torch.tensor([0, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DicpWarning)
        for fn, level in ((first, "cold"), (second, "cold"), (third, "cold"), (first, "aot")):
            torch._dynamo.reset()
            torch.compile(fn, backend=backend)(table, at)
            assert backend.reports[-1].cache == level


# ---- failures --------------------------------------------------------------------------------


class Failing(CpuTarget):
    """Fails in one stage."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        original = getattr(self, stage)

        def fail(*args: Any) -> Any:
            raise AssertionError(f"{stage} fails") if stage != "load" else OSError("load fails")

        setattr(self, stage, fail)
        self.original = original


def half_done(gm: fx.GraphModule, context: PassContext) -> bool:
    """A pass that rewrites a graph wrongly before it fails."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = torch.ops.aten.cos.default
    raise InferenceMismatchError("sin", "shape", (1,), (2,))


@pytest.mark.parametrize(
    "stage", ["fingerprint", "prepare", "joint", "forward", "lower", "render", "build", "load"]
)
def test_a_failure_of_any_stage_leaves_the_graph_to_eager(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = compiler.graph_passes

    def with_failure(config: Config, kind: str) -> tuple[Pass, ...]:
        return (*passes(config, kind), *([Pass("bad", half_done)] if kind == stage else []))

    monkeypatch.setattr(compiler, "graph_passes", with_failure)
    target = Failing(stage) if hasattr(CpuTarget, stage) else CpuTarget()

    def run(on_compile_error: Any) -> tuple[Tensor, Any]:
        config = Config(cache=False, on_compile_error=on_compile_error)
        torch._dynamo.reset()
        x = torch.linspace(-2, 2, 8).requires_grad_()

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return compiler.compile_fx(gm, inputs, target, config, lambda report: None)

        y = torch.compile(lambda x: x.sin() * x, backend=backend)(x)
        y.sum().backward()
        return y.detach(), x.grad

    with pytest.raises(Exception, match="fails|infers shape"):
        run("raise")
    with pytest.warns(FallbackWarning, match="running eagerly"):
        y, gradient = run("eager")
    x = torch.linspace(-2, 2, 8)
    torch.testing.assert_close(y, x.sin() * x)
    torch.testing.assert_close(gradient, x.cos() * x + x.sin())


# ---- what depends on data ----------------------------------------------------------------------


@pytest.fixture
def _captures_data() -> Iterator[None]:
    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(settings):
        yield


@pytest.mark.usefixtures("_captures_data")
def test_only_what_depends_on_data_runs_eagerly(dynamic: bool, tmp_path: Path) -> None:
    def mixed(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y = torch.softmax(x, -1) * 3
        picked = y[mask]
        x.mul_(2)
        count = mask.sum().item()
        rest = picked.sum(0) + y.mean()
        return rest.exp() + 1, picked * 2, y * count, (y + x).relu().sum(-1)

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        return sum(out.square().sum() for out in mixed(x * 1, mask))

    mask = torch.rand(8, 6) > 0.5
    backend = Backend("cpu", cache_dir=tmp_path)
    for _ in range(2):
        torch._dynamo.reset()
        x = torch.randn(8, 6)
        given = [x.clone(), x.clone()]
        torch.testing.assert_close(
            torch.compile(mixed, backend=backend, dynamic=dynamic)(given[0], mask),
            mixed(given[1], mask),
        )
        torch.testing.assert_close(given[0], given[1])
    report = backend.reports[-1]
    eager = {n.op.split(".")[1] for n in report.nodes if n.decision == "eager" and "aten" in n.op}
    assert {"index", "_local_scalar_dense"} <= eager and not {"exp", "relu", "softmax"} & eager
    assert report.counts["compiled"] >= 8 and report.cache == "graph"

    given = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    torch.compile(loss, backend=backend, dynamic=dynamic)(given[0], mask).backward()
    loss(given[1], mask).backward()
    torch.testing.assert_close(given[0].grad, given[1].grad)
    assert all(r.counts["compiled"] for r in list(backend.reports)[-2:])


def test_writes_and_draws_keep_their_places() -> None:
    """A write is compiled after an eager read before it, and draws stay in order."""
    aten = torch.ops.aten
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x, table = torch.empty(4), torch.empty(4, dtype=torch.bool)
        found = aten.nonzero.default(table)
        some = torch.empty_like(found, dtype=torch.float32)
    assert mode is not None
    graph = fx.Graph()

    def add(value: Tensor, op: Any, *args: Any) -> fx.Node:
        node = graph.call_function(op, args) if op is not None else graph.placeholder("given")
        node.meta["val"] = value
        return node

    given = add(x, None)
    places = add(found, aten.nonzero.default, given)
    drawn = add(some, aten.rand_like.default, places)  # eager
    also = add(x, aten.rand_like.default, given)  # compiled, drawn after it
    read = add(some, aten.add.Tensor, drawn, given)  # eager, reads before the write
    written = add(x, aten.copy_.default, given, also)
    graph.output((read, written))
    parts = split_data_dependent(fx.GraphModule({}, graph), GraphInfo("inference", (0,)))
    assert [part.compiled for part in parts] == [False, True]
    assert parts[0].outputs == (read.name,) and parts[1].outputs == (written.name,)
    assert parts[1].info.static_inputs == (0,)
