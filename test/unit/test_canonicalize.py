"""Canonical form: what is merged, folded and dropped, and above all what is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.graphs import Graph, apply, capture, rewrite
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dicp.dynamo_bridge.analysis.inference import Inference
from dicp.dynamo_bridge.passes.base import Pass, PassContext, run_passes, verify_graph
from dicp.dynamo_bridge.passes.canonicalize import CANONICALIZE
from dicp.errors import InferenceMismatchError

aten = torch.ops.aten
prims = torch.ops.prims
symbolic = pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])


def traced(fn: Any, *args: Any, symbolic: bool = False) -> Graph:
    gm = make_fx(fn, tracing_mode="symbolic" if symbolic else "fake")(*args)
    return Graph("inference", gm, list(args))


def tidy(fn: Any, *args: Any, symbolic: bool = False) -> Any:
    """Operator counts of the canonical form of `fn`; bit for bit the same numbers."""
    graph = traced(fn, *args, symbolic=symbolic)
    before = graph.run()
    apply(graph, [CANONICALIZE])
    after = graph.run()
    for old, new in zip(*((x if isinstance(x, tuple) else (x,)) for x in (before, after)),
                        strict=True):  # fmt: skip
        assert old.stride() == new.stride() and old.dtype == new.dtype
        assert torch.equal(torch.signbit(old), torch.signbit(new))
        assert torch.allclose(old, new, rtol=0, atol=0, equal_nan=True)
    assert not apply(graph, [CANONICALIZE]), "one run is enough"
    return graph.counts()


SPECIAL = torch.tensor([[0.0, -0.0, 1.5], [math.nan, math.inf, -math.inf]])


@symbolic
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: aten.mul.Tensor(x, 1) + 2,
        lambda x: aten.mul.Tensor(torch.ones(()), x) + 2,
        lambda x: aten.div.Tensor(x, 1.0) + 2,
        lambda x: aten.pow.Tensor_Scalar(x, 1) + 2,
        lambda x: aten.sub.Tensor(x, 0) + 2,
        lambda x: aten.add.Tensor(x, -0.0) + 2,
        lambda x: x.clone() + 2,
        lambda x: aten._to_copy.default(x, dtype=torch.float32) + 2,
        lambda x: prims.convert_element_type.default(x, torch.float32) + 2,
        lambda x: prims.convert_element_type.default(x.double(), torch.float32) + 2,
        lambda x: aten.alias.default(x) + 2,
        lambda x: aten.expand.default(x, x.shape) + 2,
        lambda x: aten.view.default(x, x.shape) + 2,
        lambda x: aten.slice.Tensor(x, 0, 0, 9223372036854775807) + 2,
        lambda x: aten.permute.default(x, [0, 1]) + 2,
        lambda x: aten.as_strided.default(x + 2, x.shape, (x.shape[1], 1)),
        lambda x: aten.copy.default(torch.empty_like(x), x) + 2,
        lambda x: x.t().t() + 2,
        lambda x: x.transpose(0, 1).permute(1, 0) + 2,
        lambda x: aten.cat.default([x]) + 2,
        lambda x: aten.constant_pad_nd.default(x, [0, 0, 0, 0]) + 2,
        lambda x: x.unsqueeze(1).squeeze(1) + 2,
    ],
)
def test_does_nothing(fn: Any, symbolic: bool) -> None:
    counts = tidy(fn, SPECIAL, symbolic=symbolic)
    assert sum(n for name, n in counts.items() if "sym_size" not in name) == 1, counts


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: aten.add.Tensor(x, 0) * 2,  # -0.0 + 0 is 0.0
        lambda x: aten.sub.Tensor(x, -0.0) * 2,
        lambda x: aten.mul.Tensor(x, 0) * 2,  # nan * 0 is nan
        lambda x: aten.mul.Tensor(x, torch.ones((), dtype=torch.float64)) @ x.t(),
        lambda x: x.half().float() * 2,
        lambda x: aten.mul.Tensor(x, torch.ones(2, 2, 3)) * 2,  # broadcasts
        lambda x: aten.slice.Tensor(x, 1, 0, 9223372036854775807, 2) * 2,
        lambda x: aten.slice.Tensor(x, 1, 0, -1) * 2,
        lambda x: x.t().clone(memory_format=torch.contiguous_format) * 2,
        lambda x: aten.as_strided.default(x, (2, 3), (3, 1), 0) * 2,  # of an input: its offset
        lambda x: aten.as_strided.default(x * 2, (3, 2), (1, 3)) + 1,
        lambda x: aten.as_strided.default((x * 2)[1:], (1, 3), (3, 1), 0) + 1,
        lambda x: aten.copy.default(torch.empty(2, 2, 3), x) * 2,
        lambda x: torch.bernoulli(torch.ones(2)) + torch.bernoulli(torch.ones(2)),
    ],
)
def test_does_something(fn: Any) -> None:
    graph = traced(fn, SPECIAL)
    size = len(graph)
    tidy(fn, SPECIAL)
    apply(graph, [CANONICALIZE])
    assert len(graph) >= min(size, 2)


def test_integers_drop_zero() -> None:
    assert tidy(lambda x: aten.add.Tensor(x, 0) * 3, torch.arange(4)) == {"aten.mul.Tensor": 1}


def test_constants_of_one_number_are_numbers() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.where(x > 1, x, torch.tensor(-math.inf))

    assert tidy(fn, SPECIAL) == {"aten.gt.Scalar": 1, "aten.full.default": 1, "aten.where.self": 1}


def test_constants_that_no_scalar_holds_stay_tensors() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.where(x > 1, torch.tensor(1 << 63, dtype=torch.uint64), 0)

    assert "aten.full.default" not in tidy(fn, SPECIAL)


@symbolic
def test_equal_computations_are_merged(symbolic: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.exp(x) + torch.exp(x)

    assert tidy(fn, SPECIAL, symbolic=symbolic) == {"aten.exp.default": 1, "aten.add.Tensor": 1}


def test_constants_that_compare_equal_are_not_merged() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.full_like(x, c).sum() for c in (0.0, -0.0, 1, 1.0, True))

    counts = tidy(fn, SPECIAL)
    assert counts["aten.full_like.default"] == 5


def test_random_numbers_are_not_merged() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.rand_like(x) - torch.rand_like(x)

    graph = traced(fn, SPECIAL)
    apply(graph, [CANONICALIZE])
    assert graph.counts()["aten.rand_like.default"] == 2


def test_view_of_view_and_permute_of_permute() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.view(6, 4).view(2, 12)
        return y * 2, x.permute(1, 2, 0).permute(0, 2, 1) * 2

    counts = tidy(fn, torch.randn(2, 3, 4))
    assert counts["aten.view.default"] == 1 and counts["aten.permute.default"] == 1


def test_symbolic_sizes_have_one_node_each() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        rows = x.shape[0] + y.shape[0]
        return x.new_zeros(rows) + y.new_zeros(y.shape[0] + x.shape[0])

    (graph,) = capture(fn, torch.randn(5, 4), torch.randn(7, 4), dynamic=True)
    apply(graph, [CANONICALIZE])
    assert graph.counts()["<built-in function add>"] == 1
    assert graph.counts()["aten.full.default"] == 1


# Storage: what the caller can tell apart stays apart.


def alias_pattern(values: Any, inputs: Any) -> list[list[bool]]:
    storages = [x.untyped_storage().data_ptr() for x in (*values, *inputs)]
    return [[a == b for b in storages] for a in storages]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.clone(),),
        lambda x: (aten.mul.Tensor(x, 1),),
        lambda x: (x + 1, x + 1),
        lambda x: (x.exp(), x.exp().clone()),
        lambda x: (x.exp(), x.exp().view(-1)),
        lambda x: (x.exp().clone(),),
        lambda x: (x.clone().view(-1),),
        lambda x: (x.view(-1).clone().view(3, 2), x.t()),
        lambda x: (aten.cat.default([x]),),
        lambda x: (aten.alias.default(x), aten.alias.default(x)),
        lambda x: (*aten.sort.default(x), *aten.sort.default(x)),
    ],
)
def test_outputs_share_storage_only_where_they_did(fn: Any) -> None:
    graph = traced(fn, torch.randn(2, 3))
    inputs = [x.clone() for x in graph.inputs]
    before = alias_pattern(fx.Interpreter(graph.gm).run(*inputs), inputs)
    apply(graph, [CANONICALIZE])
    outputs = fx.Interpreter(graph.gm).run(*inputs)
    assert alias_pattern(outputs, inputs) == before
    assert len({id(x) for x in (*outputs, *inputs)}) == len(outputs) + len(inputs)


def test_a_copy_of_a_mutated_input_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        before = x.clone()
        x.add_(1)
        return before * 2 + x

    (graph,) = capture(fn, torch.randn(4))
    rewrite(graph, [CANONICALIZE])

    def direct(x: Tensor) -> Tensor:
        before = aten.clone.default(x)
        aten.copy_.default(x, before + 1)
        return before * 2

    graph = traced(direct, torch.randn(4))
    expected = graph.run()
    apply(graph, [CANONICALIZE])
    assert torch.equal(graph.run(), expected)


def test_reads_before_and_after_a_write_are_not_merged() -> None:
    def direct(x: Tensor) -> Tensor:
        before = x * 3
        aten.copy_.default(x, before)
        return before + x * 3

    graph = traced(direct, torch.randn(4))
    expected = graph.run()
    apply(graph, [CANONICALIZE])
    assert torch.equal(graph.run(), expected)


def test_checks_and_unknown_operators_stay() -> None:
    def fn(x: Tensor) -> Tensor:
        aten._assert_async.msg(torch.ones(()), "never")
        return x * 2

    graph = traced(fn, torch.randn(4))
    apply(graph, [CANONICALIZE])
    assert graph.counts()["aten._assert_async.msg"] == 1


def test_merged_nodes_keep_their_sources() -> None:
    (graph,) = capture(lambda x: torch.exp(x * 2) + torch.exp(x * 2), torch.randn(4))
    apply(graph, [CANONICALIZE])
    (node,) = (n for n in graph.gm.graph.nodes if n.target is aten.exp.default)
    assert len(node.meta["dicp_sources"]) == 2 and node.meta["stack_trace"]


# Running passes.


def test_observer_sees_each_pass() -> None:
    graph = traced(lambda x: x.clone() + 1, torch.randn(3))
    seen: list[tuple[str, bool]] = []

    def observe(name: str, gm: fx.GraphModule, seconds: float, changed: bool) -> None:
        assert seconds >= 0
        seen.append((name, changed))

    context: Any = PassContext(None, None, "inference", Inference.of(graph.gm))  # type: ignore
    assert run_passes(graph.gm, [CANONICALIZE, CANONICALIZE], context, observe)
    assert seen == [("canonicalize", True), ("canonicalize", False)]


def test_a_pass_that_breaks_the_graph_is_caught() -> None:
    def spoil(gm: fx.GraphModule, context: PassContext) -> bool:
        node = next(n for n in gm.graph.nodes if n.target is aten.exp.default)
        node.target = aten.gt.Scalar
        node.args = (*node.args, 0)
        return True

    graph = traced(lambda x: torch.exp(x), torch.randn(3))
    with pytest.raises(InferenceMismatchError, match="dtype"):
        apply(graph, [Pass("spoil", spoil)])


def test_verify_accepts_a_graph_whose_sizes_depend_on_data() -> None:
    graph = traced(lambda x: torch.nonzero(x > 0) * 2, torch.randn(3), symbolic=True)
    verify_graph(graph.gm, Inference.of(graph.gm))
