"""Memory formats on Ascend: how blocked tensors lie in memory, and how few conversions are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ascend_recorder import Recorder, record
from torch import Tensor, nn

from dicp.dynamo_bridge.backend import Backend
from dicp.graphop.program import Graph, Node
from dicp.vendor.ascend.blocked import packed, storage_dims, unpacked

pytestmark = pytest.mark.sweep

SIZES = {
    "NC1HWC0": [(2, 3, 4, 5), (1, 16, 1, 1), (3, 33, 2, 2)],
    "FRACTAL_Z": [(8, 3, 3, 3), (16, 16, 1, 1), (33, 20, 2, 3)],
    "FRACTAL_NZ": [(3, 5), (16, 32), (2, 17, 1), (2, 3, 33, 16)],
}


@pytest.mark.parametrize(("fmt", "dims"), [(f, d) for f, all_ in SIZES.items() for d in all_])
def test_storage_holds_every_element_and_zeros(fmt: str, dims: tuple[int, ...]) -> None:
    x = torch.rand(dims) + 1
    storage = packed(x, fmt)
    assert list(storage.shape) == storage_dims(fmt, dims) and storage.is_contiguous()
    assert torch.equal(unpacked(storage, fmt, dims), x)
    assert storage.count_nonzero() == x.numel()


def test_where_elements_lie() -> None:
    image, weight, matrix = torch.rand(2, 20, 3, 4), torch.rand(20, 18, 3, 2), torch.rand(20, 40)
    assert packed(image, "NC1HWC0")[1, 1, 2, 3, 3] == image[1, 19, 2, 3]
    # C1 H W, then N1, N0, C0
    assert packed(weight, "FRACTAL_Z")[1 * 6 + 2 * 2 + 1, 1, 3, 1] == weight[19, 17, 2, 1]
    assert packed(matrix, "FRACTAL_NZ")[2, 1, 3, 7] == matrix[19, 39]


# ---- what graphs hold ----------------------------------------------------------------------------


def graphs_of(target: Recorder, *, once: bool) -> list[Graph]:
    """The graphs that run once, or those of every run; of the last program."""
    return [g for g in target.programs[-1].graphs if g.name.startswith("once") == once]


def kinds(graphs: list[Graph]) -> Counter[str]:
    return Counter(node.kind for graph in graphs for node in graph.operators)


def conversions(graphs: list[Graph]) -> list[tuple[Any, Any]]:
    nodes = [n for graph in graphs for n in graph.operators if n.kind == "TransData"]
    return sorted((n.attrs["src_format"], n.attrs["dst_format"]) for n in nodes)


def only(graphs: list[Graph], kind: str) -> Node:
    (node,) = [n for graph in graphs for n in graph.operators if n.kind == kind]
    return node


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels: int = 16, act: Any = torch.relu) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in "ab"
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in "ab")
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norms[0](self.first(x)))
        return self.act(self.norms[1](self.second(out)) + x)


def recorded(model: nn.Module, *inputs: Tensor, **options: Any) -> Recorder:
    with torch.no_grad():
        return record(model.eval(), *inputs, **options)


CHANNELS_LAST = torch.channels_last
BORDERS = [("NC1HWC0", "NCHW"), ("NCHW", "NC1HWC0")]
LAST_BORDERS = [("NC1HWC0", "NHWC"), ("NHWC", "NC1HWC0")]


def test_a_frozen_block_converts_no_weight_in_a_run() -> None:
    target = recorded(Block(), torch.ones(1, 16, 6, 6), freeze=True)
    assert conversions(graphs_of(target, once=False)) == BORDERS
    assert conversions(graphs_of(target, once=True)) == [("NCHW", "FRACTAL_Z")] * 2


def test_a_channels_last_block_has_no_transpose() -> None:
    x = torch.ones(2, 16, 6, 6).to(memory_format=CHANNELS_LAST)
    target = recorded(Block().to(memory_format=CHANNELS_LAST), x, freeze=True)
    every = graphs_of(target, once=False)
    assert conversions(every) == LAST_BORDERS and kinds(every)["Transpose"] == 0
    once = graphs_of(target, once=True)
    assert conversions(once) == [("NHWC", "FRACTAL_Z")] * 2 and kinds(once)["Transpose"] == 0


def test_a_block_in_training_converts_its_images_at_the_borders_alone() -> None:
    x = torch.ones(2, 16, 6, 6, requires_grad=True)
    target = record(Block().train(), x)
    forward, backward = (program.graphs for program in target.programs)
    images = [c for c in conversions(forward) if "FRACTAL_Z" not in c]
    saved = 3  # what backward reads of each convolution, norm and activation lies between graphs
    assert images.count(("NCHW", "NC1HWC0")) == 1 and len(images) <= 2 + 2 * saved
    # the second convolution's backward converts what the first activation's mask is made of
    assert sorted(formats(backward, "LessEqual")) == ["NC1HWC0", "ND"]
    assert kinds(forward)["BatchNormV3"] == kinds(backward)["BatchNormGradV3"] == 2
    assert kinds(forward)["Transpose"] == kinds(backward)["Transpose"] == 0


@pytest.mark.parametrize("channels", [16, 8])
def test_padding_is_cleared_before_channels_are_summed(channels: int) -> None:
    # the sigmoid of what fills up a block is not zero
    block = Block(channels, torch.sigmoid)
    target = recorded(block, torch.ones(1, channels, 6, 6), freeze=True)
    inner = conversions(graphs_of(target, once=False))
    assert inner == (BORDERS if channels == 16 else sorted(BORDERS * 2))


def test_grouped_filters_are_left_to_the_compiler() -> None:
    model = nn.Conv2d(16, 16, 3, groups=16, bias=False)
    target = recorded(model, torch.ones(1, 16, 6, 6), freeze=True)
    assert conversions(graphs_of(target, once=False)) == BORDERS
    assert not graphs_of(target, once=True)


# ---- matrix products -----------------------------------------------------------------------------


def mlp(width: int = 32, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 2 * width), act(), nn.Linear(2 * width, 2 * width), act(),
        nn.Linear(2 * width, width),
    )  # fmt: skip


def formats(graphs: list[Graph], kind: str) -> list[str]:
    found = [n for graph in graphs for n in graph.operators if n.kind == kind]
    return [n.formats.get("0", "ND") for n in found]


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_chain_of_products_stays_blocked(symbolic: bool) -> None:
    x = torch.ones(5, 32)
    if symbolic:
        torch._dynamo.mark_dynamic(x, 0)
    target = recorded(mlp(), x)
    every = graphs_of(target, once=False)
    assert formats(every, "MatMulV2") == ["FRACTAL_NZ", "FRACTAL_NZ", "ND"]
    assert formats(every, "Relu") == ["FRACTAL_NZ"] * 2
    assert not conversions(every)


def test_batches_of_rows_do_not_break_a_chain() -> None:
    # each product reshapes to a matrix and back; the activation between them need not
    target = recorded(mlp(), torch.ones(2, 8, 32))
    every = graphs_of(target, once=False)
    assert formats(every, "MatMulV2") == ["FRACTAL_NZ", "FRACTAL_NZ", "ND"]
    assert kinds(every)["Reshape"] == 2 and not conversions(every)


def test_frozen_weights_are_blocked_once() -> None:
    target = recorded(mlp(), torch.ones(5, 32), freeze=True)
    assert not conversions(graphs_of(target, once=False))
    assert conversions(graphs_of(target, once=True)) == [("ND", "FRACTAL_NZ")] * 3


def test_what_fills_up_blocks_must_stay_zero() -> None:
    # the sigmoid of zero is not: the product after it would sum over what is no element
    for width, blocked in ((32, "FRACTAL_NZ"), (12, "ND")):
        target = recorded(mlp(width, nn.Sigmoid), torch.ones(16, width))
        assert formats(graphs_of(target, once=False), "Sigmoid") == [blocked] * 2


def test_a_single_product_is_not_worth_a_conversion() -> None:
    target = recorded(nn.Linear(32, 32), torch.ones(16, 32))
    assert not conversions(target.programs[-1].graphs)


def test_what_eager_calls_read_is_plain() -> None:
    def model(x: Tensor, weight: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        image = F.conv2d(x, weight)
        product = torch.relu(matrix @ matrix)
        counts = torch.special.bessel_j0(image).sum() + torch.special.bessel_j0(product).sum()
        return F.conv2d(image, weight) + counts, product @ matrix

    target = record(model, torch.ones(1, 16, 4, 4), torch.ones(16, 16, 1, 1), torch.ones(16, 16))
    graphs = target.programs[-1].graphs
    assert len(graphs) == 2
    for graph in graphs:
        assert not any(node.formats for node in graph.inputs)
        assert not any(r.value.node.formats.get("0") in SIZES for r in graph.results)


# ---- transposes ----------------------------------------------------------------------------------


def test_transposes_move_behind_elementwise_operators_and_cancel() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return (torch.relu(x.permute(0, 2, 1)) * y.permute(0, 2, 1) + 1).permute(0, 2, 1)

    target = record(model, torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    assert target.kinds()["Transpose"] == 0


def test_what_else_reads_a_region_keeps_the_moves_where_they_are() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.exp(x.permute(1, 0))
        return y.softmax(-1), torch.tanh(y).softmax(-1)

    assert record(model, torch.ones(3, 4)).kinds()["Transpose"] == 1


def test_channels_last_arithmetic_has_no_transpose() -> None:
    x = torch.ones(2, 3, 4, 5).to(memory_format=CHANNELS_LAST)
    target = record(lambda x: torch.tanh(x * 2) + x, x)
    assert target.kinds()["Transpose"] == 0


def test_transposes_of_booleans_move_through_a_region() -> None:
    """No operator transposes booleans: a conversion stands around each transpose of them."""

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        transposed = x.swapaxes(2, 1)
        return transposed == transposed, torch.fmax(y, y)

    target = record(model, torch.ones(2, 2, 2), torch.ones(4, 3, 2).permute(2, 1, 0))
    assert target.kinds()["Transpose"] == 0


# ---- in the simulator ----------------------------------------------------------------------------


@pytest.fixture
def options() -> Iterator[dict[str, Any]]:
    torch._dynamo.reset()
    yield {"runs_on": "simulator"}
    torch._dynamo.reset()


def frozen_images() -> tuple[nn.Module, Tensor]:
    return Block(20, F.silu), torch.randn(2, 20, 5, 7)


def frozen_channels_last() -> tuple[nn.Module, Tensor]:
    model, x = frozen_images()
    return model.to(memory_format=CHANNELS_LAST), x.to(memory_format=CHANNELS_LAST)


def frozen_matrices() -> tuple[nn.Module, Tensor]:
    return mlp(20), torch.randn(3, 20)


@pytest.mark.parametrize("make", [frozen_images, frozen_channels_last, frozen_matrices])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_frozen_models_are_right(make: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = make()
    model = model.eval().to(dtype)
    compiled = torch.compile(model, backend=Backend("ascend", freeze=True, **options))
    for batch in (x.to(dtype), -x.to(dtype)):
        with torch.no_grad():
            expected, found = model(batch), compiled(batch)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


LAYOUTS = {
    "offset": lambda x: torch.cat([x.flatten(), x.flatten()])[x.numel() :].view(x.shape),
    "sliced": lambda x: torch.cat([x, x], 3)[..., 5:],
    "every second": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "channels last": lambda x: x.contiguous(memory_format=CHANNELS_LAST),
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_inputs_lie_as_they_like(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Block(4).eval()
    x = LAYOUTS[name](torch.randn(2, 4, 6, 5))

    def both(x: Tensor) -> tuple[Tensor, ...]:
        out = model(x)
        return out, out.permute(2, 0, 3, 1), x * 2, x.permute(1, 0, 2, 3) + 1

    with torch.no_grad():
        found = torch.compile(both, backend=Backend("ascend", **options))(x)
        expected = both(x)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()
