"""The layout pass: conversions only where needed, numbers and the caller's strides unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from support.graphs import apply, capture, check_same_numbers, context_of, rewrite
from torch import Tensor, nn

from dicp.config import Config
from dicp.dynamo_bridge.analysis.values import is_channels_last
from dicp.dynamo_bridge.layout import LAYOUT, assign_layouts
from dicp.dynamo_bridge.passes.canonicalize import CANONICALIZE
from dicp.loop.lowering.layout import normalized_strides

PASSES = [CANONICALIZE, LAYOUT, CANONICALIZE]
FLOATS = frozenset({torch.float32})
symbolic = pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.max_pool2d(F.relu(self.second(x) + x), 2)
        return self.head(x.flatten(1))


@symbolic
def test_one_conversion_of_the_image_serves_the_network(symbolic: bool) -> None:
    (graph,) = capture(Block().eval(), torch.randn(2, 3, 8, 8), dynamic=symbolic)
    counts, changed = rewrite(graph, PASSES, channels_last=FLOATS)
    assert changed
    # image, two weights, and one way back before the flattening
    assert counts["aten.clone.default"] == 4
    convolutions = [n for n in graph.gm.graph.nodes if "convolution" in str(n.target)]
    assert all(is_channels_last(n.meta["val"]) for n in convolutions)


@symbolic
def test_forward_and_backward_graphs(symbolic: bool) -> None:
    x = torch.randn(2, 3, 8, 8)
    _joint, *graphs = capture(Block(), x, train=True, dynamic=symbolic)
    assert len(graphs) == 2
    for graph in graphs:
        _, changed = rewrite(graph, PASSES, channels_last=FLOATS)
        assert changed


@symbolic
def test_the_caller_sees_eager_strides(symbolic: bool) -> None:
    conv = nn.Conv2d(3, 8, 3)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = conv(x)
        return y, F.relu(y), y.transpose(1, 2), y + 1, y.sum((2, 3))

    (graph,) = capture(fn, torch.randn(2, 3, 8, 8), dynamic=symbolic)
    rewrite(graph, PASSES, channels_last=FLOATS)  # compares strides too


def test_channels_last_inputs_cost_nothing() -> None:
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    (graph,) = capture(lambda x: F.relu(conv(x)), x)
    counts, changed = rewrite(graph, PASSES, channels_last=FLOATS)
    assert not changed and not counts["aten.clone.default"]


def test_permutation_to_the_last_axis_is_free() -> None:
    conv = nn.Conv2d(3, 8, 4, stride=4)

    def patches(x: Tensor) -> Tensor:
        return F.layer_norm(conv(x).permute(0, 2, 3, 1), (8,))

    (graph,) = capture(patches, torch.randn(2, 3, 16, 16))
    counts, _ = rewrite(graph, PASSES, channels_last=FLOATS)
    assert counts["aten.clone.default"] == 2  # image and weight


def test_a_view_that_no_longer_works_reads_a_copy() -> None:
    conv = nn.Conv2d(3, 8, 3)
    (graph,) = capture(lambda x: conv(x).view(2, 8 * 6, 6) * 2, torch.randn(2, 3, 8, 8))
    rewrite(graph, PASSES, channels_last=FLOATS)


def test_an_operator_that_reads_strides_gets_the_traced_ones() -> None:
    conv = nn.Conv2d(3, 8, 3)

    def fn(x: Tensor) -> Tensor:
        return torch.as_strided(conv(x), (4, 4), (4, 1)) * 2

    (graph,) = capture(fn, torch.randn(2, 3, 8, 8))
    rewrite(graph, PASSES, channels_last=FLOATS)


def test_weights_are_marked_static() -> None:
    (graph,) = capture(Block().eval(), torch.randn(2, 3, 8, 8))
    values = [n.meta["val"] for n in graph.gm.graph.nodes if n.op == "placeholder"]
    context = context_of(graph, channels_last=FLOATS)
    parameters = frozenset(i for i, v in enumerate(values) if v.shape != (2, 3, 8, 8))
    context = type(context)(**{**vars(context), "static_inputs": parameters})
    assert assign_layouts(graph.gm, context)
    marked = [n for n in graph.gm.graph.nodes if n.meta.get("dicp_static")]
    assert len(marked) == 2


def test_off_unless_the_target_wants_it() -> None:
    (graph,) = capture(Block().eval(), torch.randn(2, 3, 8, 8))
    assert not apply(graph, [LAYOUT])


@pytest.mark.parametrize(
    "conv, shape", [(nn.Conv1d(3, 8, 3), (2, 3, 8)), (nn.Conv3d(3, 8, 3), (2, 3, 8, 8, 8))]
)
def test_other_ranks_are_left(conv: nn.Module, shape: tuple[int, ...]) -> None:
    (graph,) = capture(conv, torch.randn(shape))
    assert not apply(graph, [LAYOUT], channels_last=FLOATS)


def test_transposed_and_grouped() -> None:
    model: Any = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=4), nn.GELU(), nn.ConvTranspose2d(8, 3, 2), nn.Upsample(size=9)
    )
    (graph,) = capture(model, torch.randn(2, 4, 8, 8))
    before, exact = graph.run(), graph.run(torch.float64)
    assert apply(graph, PASSES, channels_last=FLOATS)
    check_same_numbers(before, graph.run(), exact)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("groups, wanted", [(4, True), (2, False), (1, False)])
def test_depthwise_convolutions_decide_where_the_target_says_so(
    groups: int, wanted: bool, frozen: bool
) -> None:
    """Frozen parameters decide nothing: conversions of weights are not what convolutions cost."""
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3, groups=groups))
    (graph,) = capture(model, torch.randn(2, 3, 8, 8))
    context = context_of(graph, channels_last_depthwise=FLOATS)
    assert assign_layouts(graph.gm, replace(context, config=Config(freeze=frozen))) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types_decide_where_the_target_says_so(dtype: torch.dtype) -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3)).to(dtype)
    (graph,) = capture(model, torch.randn(2, 3, 8, 8, dtype=dtype))
    wanted = frozenset({torch.bfloat16})
    assert apply(graph, [LAYOUT], channels_last=wanted) == (dtype == torch.bfloat16)


@symbolic
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_convolutions_of_rows_are_2d(symbolic: bool, train: bool) -> None:
    """Dense and depthwise ones, whose tensors stay channels last between them; no others."""
    dense, depthwise = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1, groups=8)
    grouped, single = nn.Conv1d(8, 8, 3, padding=1, groups=2), nn.Conv1d(1, 8, 3, padding=1)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = depthwise(F.gelu(dense(x)))
        return y, grouped(x.repeat(1, 2, 1)), single(x[:, :1])

    graphs = capture(fn, torch.randn(2, 4, 19), dynamic=symbolic, train=train)
    facts = {"channels_last": FLOATS, "channels_last_depthwise": FLOATS}
    found = []
    for graph in graphs[1:] if train else graphs:
        assert not apply(graph, [LAYOUT], **facts), "the target computes them as they are"
        _, changed = rewrite(graph, [LAYOUT], **facts, conv1d_as_conv2d=True)  # strides too
        assert changed
        for node in graph.gm.graph.nodes:
            if "aten.convolution" in str(node.target):
                value = node.meta["val"]
                found.append(value if isinstance(value, Tensor) else value[1])
    backward = [3, 3, 4, 4] if train else []
    assert [value.dim() for value in found] == [4, 4, 3, 3, *backward]
    assert all(is_channels_last(value) for value in found if value.dim() == 4)


def test_dtypes_without_a_gain_stay_1d() -> None:
    conv = nn.Conv1d(8, 8, 3, groups=8).double()
    (graph,) = capture(conv, torch.randn(2, 8, 19, dtype=torch.float64))
    assert not apply(graph, [LAYOUT], channels_last_depthwise=FLOATS, conv1d_as_conv2d=True)


def test_strides_of_single_rows_and_images_are_channels_last() -> None:
    """PyTorch tells layouts by them; those of contiguous tensors are as they were."""
    n = sympy.Symbol("s0", integer=True, positive=True)
    for size, extent in ((5, 30), (n, 6 * n)):
        shape = (1, 6, 1, size)
        assert normalized_strides(shape, (9, 1, 9, 6)) == (extent, 1, extent, 6)
        assert normalized_strides(shape, (9, size, 9, 1)) == (extent, size, size, 1)


def test_images_whose_number_depends_on_data_stay_as_they_are() -> None:
    """PyTorch's inference takes results of their convolutions for contiguous, in any format."""
    conv = nn.Conv2d(16, 16, 3, padding=1, groups=16)

    def fn(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        y = conv(x[which])
        return y, y.flatten(1)

    x, which = torch.randn(6, 16, 9, 10), torch.arange(6) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        results = torch.compile(fn, backend="cpugraph", fullgraph=True)(x, which)
    for result, expected in zip(results, fn(x, which), strict=True):
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()
