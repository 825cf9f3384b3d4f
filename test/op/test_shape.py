"""Shapes: views, permutations, joining, splitting, padding, repetition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dicp
from dicp.testing import ALL_LAYOUTS, FLOATS, INTS, LAYOUTS, T, op

X = (6, 37)
X3 = (4, 6, 10)
IMAGE = (2, 3, 6, 7)
ANY = (*FLOATS, *INTS)
F32 = (torch.float32,)
F32_F64 = (torch.float32, torch.float64)
aten = torch.ops.aten

VIEWS = [
    op("view", lambda x: (x.view(-1), x.view(1, -1, 1)), X, layouts=("contiguous",), dtypes=ANY),
    op("reshape", lambda x: (x.reshape(-1), x.reshape(x.shape[1], x.shape[0])), X, dtypes=ANY),
    op("reshape_values", lambda x: x.reshape(-1).exp(), X),
    op(
        "flatten_unflatten",
        lambda x: torch.unflatten(x.flatten(1), 1, (2, -1)),
        X3,
        fixed=(6, 10),
        # Not "expanded": with symbolic sizes AOTAutograd gives back an output that is a view of an
        # input as `as_strided`, whose gradient adds up over elements that share memory.
        layouts=("contiguous", "transposed", "sliced"),
    ),
    op(
        "transpose_in_tiles",
        lambda x: (x.t().clone(memory_format=torch.contiguous_format), x.t() + x.sum()),
        (37, 150),
        dtypes=ANY,
        layouts=("contiguous", "sliced"),
        grad=False,
    ),
    op("permute", lambda x: (x.permute(2, 0, 1), x.permute(1, 0, 2) + 1), X3, dtypes=ANY),
    op("transpose", lambda x: (x.t(), x.transpose(0, 1) * 2, x.mT), X),
    op("movedim", lambda x: (x.movedim(0, -1), x.swapaxes(0, 2)), X3, dtypes=F32),
    op(
        "unsqueeze_squeeze",
        lambda x: (x.unsqueeze(1), x[:, None].squeeze(1), x.squeeze()),
        (6, 1, 5),
    ),
    op("squeeze_dims", lambda x: (x.squeeze((0, 2)), x.squeeze(-1), x.squeeze(1)), (1, 6, 1)),
    op("expand", lambda x: (x.expand(4, -1, -1), x.expand(-1, 37) + 1), (6, 1)),
    op("expand_gradient", lambda x: (x.expand(5, -1, -1) * 2).sum(0), (6, 37)),
    op(
        "as_strided",
        lambda x: (x.as_strided((3, 4), (2, 5), 1), x.as_strided((5, 5), (1, 2)) * 2),
        X,
        layouts=("contiguous",),
    ),
    op(
        "as_strided_overlapping",
        lambda x: x.as_strided((5, 5), (1, 1)).sum(1),
        (37,),
        layouts=("contiguous",),
    ),
    op(
        "as_strided_scatter",
        lambda x, y: torch.as_strided_scatter(x, y, (3, 4), (2, 5), 1),
        X,
        (3, 4),
        fixed=(3, 4),
        layouts=("contiguous",),
    ),
    op("unfold", lambda x: (x.unfold(1, 5, 3), x.unfold(0, 2, 1).sum(-1)), X),
    op("diagonal", lambda x: (x.diagonal(), x.diagonal(1), x.diagonal(-2).exp()), (5, 7)),
    op("diag_embed", lambda x: torch.diag_embed(x), X, dtypes=F32_F64),
    op(
        "diag_embed_of_axes",
        lambda x: (torch.diag_embed(x, 2, 0, 2), torch.diag_embed(x, -1, 1, 0), x[0].diag(1)),
        X,
    ),
    op("alias_and_detach", lambda x: (x.detach(), aten.alias.default(x), x), X, grad=False),
    op(
        "view_dtype",
        lambda x: (x.view(torch.int32), x.view(torch.uint8)),
        X,
        dtypes=F32,
        grad=False,
        layouts=("contiguous",),
    ),
    op(
        "view_dtype_of_bfloat16",  # graph targets have no operator on its bits
        lambda x: (x.view(torch.int16), x.view(torch.int32), x.view(torch.uint8)),
        (5, 8),
        dtypes=(torch.bfloat16,),
        grad=False,
        fixed=(8,),
        layouts=("contiguous",),
    ),
    op(
        "view_dtype_as_bfloat16",
        lambda x: x.view(torch.bfloat16).isnan(),
        (5, 8),
        dtypes=(torch.int16, torch.float32),
        grad=False,
        layouts=("contiguous",),
    ),
    op(
        "view_as_complex",
        lambda x: torch.view_as_real(torch.view_as_complex(x) * 2),
        (5, 7, 2),
        fixed=(2,),
        dtypes=F32,
        layouts=("contiguous",),
        expect="native",
    ),
    op(
        "contiguous_clone",
        lambda x: (x.contiguous(), x.clone(), x.clone(memory_format=torch.contiguous_format)),
        X,
        dtypes=ANY,
    ),
    op(
        "memory_format",
        lambda x: (
            x.contiguous(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last) + 1,
        ),
        IMAGE,
        layouts=("contiguous", "channels_last", "sliced"),
    ),
    op("views_of_views", lambda x: x[1:].t()[2:].reshape(-1)[::3], X),
]


def views_before_what_they_show(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shown, hidden = x + 1, x * 2
    return shown.t(), shown, shown[1:], hidden[1:].t(), hidden.view(-1)


COPIES = [
    op("views_of_results", views_before_what_they_show, X, grad=False, layouts=("contiguous",)),
    op(  # not one of them shares memory with its input
        "copies_of_views",
        lambda x: (
            torch.alias_copy(x),
            torch.as_strided_copy(x, (3, 4), (2, 5)),
            torch.detach_copy(x),
            torch.diagonal_copy(x, 1),
            torch.expand_copy(x, (2, -1, -1)),
            torch.permute_copy(x, (1, 0)),
            torch.select_copy(x, 0, 1),
            torch.slice_copy(x, 0, 0, 4),
            torch.split_copy(x, 2),
            torch.split_with_sizes_copy(x, (2, 4)),
            torch.squeeze_copy(x),
            torch.squeeze_copy(x, 0),
            torch.t_copy(x),
            torch.transpose_copy(x, 0, 1),
            torch.unbind_copy(x),
            torch.unfold_copy(x, 0, 2, 1),
            torch.unsqueeze_copy(x, 0),
            torch.view_copy(x, (1, 6, -1)),
            torch.view_copy(torch.diagonal_scatter(x[:, :6], x[0, :6]), (-1,)),
        ),
        X,
        fixed=(6,),
        grad=False,
        dtypes=F32,
        layouts=("contiguous",),
    ),
]
JOIN_AND_SPLIT = [
    op("cat", lambda xs: (torch.cat(xs), torch.cat(xs, 1)), [X, X, X], dtypes=ANY),
    op("cat_uneven", lambda x, y, z: torch.cat((x, y, z), 1), (6, 37), (6, 5), (6, 11), dtypes=ANY),
    op("cat_with_empty", lambda x: torch.cat((x, x[:0], torch.empty(0))), X, dtypes=F32),
    op("cat_promotes", lambda x, y: torch.cat((x, y)), X, T(X, dtype=torch.int64), dtypes=FLOATS),
    op("cat_of_computed", lambda x, y: torch.cat((x.exp(), y * 2, x + y), -1), X, X),
    op(
        "cat_channels_last",
        lambda x, y: torch.cat((x, y), 1),
        IMAGE,
        IMAGE,
        layouts=ALL_LAYOUTS,
        dtypes=F32,
    ),
    op("stack", lambda xs: (torch.stack(xs), torch.stack(xs, -1)), [X, X], dtypes=ANY),
    op("split", lambda x: x.split(4, 1), X, fixed=(37,)),
    op("split_sizes", lambda x: [p * 2 for p in x.split([7, 20, 10], 1)], X, fixed=(37,)),
    op("chunk", lambda x: [p.sum(1) for p in x.chunk(3, 1)], X, fixed=(37,)),
    op("unbind", lambda x: [p + 1 for p in x.unbind(0)], X, fixed=(6,)),
    op("tensor_split", lambda x: [p * 1 for p in x.tensor_split(3, 0)], X, fixed=(6,), dtypes=F32),
    op(
        "meshgrid",
        lambda x, y: torch.meshgrid(x, y, indexing="ij"),
        (5,),
        (7,),
        dtypes=F32_F64,
        layouts=("contiguous", "sliced"),
    ),
    op(
        "atleast",
        lambda x: (torch.atleast_3d(x), torch.broadcast_to(x, (2, *x.shape))),
        X,
        dtypes=F32,
        layouts=("contiguous", "transposed", "sliced"),
    ),
]

REPEAT = [
    op("repeat", lambda x: (x.repeat(2, 3), x.repeat(2, 1, 1)), X, dtypes=ANY),
    op("tile", lambda x: x.tile(2), X),
    op("repeat_interleave", lambda x: x.repeat_interleave(3, dim=1), X),
    op(
        "repeat_kv",
        lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(x.shape[0], -1, *x.shape[2:]),
        (2, 4, 6, 8),
        fixed=(4,),
    ),
    op("flip", lambda x: (x.flip(0), x.flip(1), x.flip(0, 1)), X, dtypes=ANY),
    op("fliplr", torch.fliplr, X, dtypes=F32),
    op("roll", lambda x: (x.roll(2, 0), x.roll((1, -3), (0, 1)), x.roll(5)), X),
    op("rot90", lambda x: torch.rot90(x), X),
]

PAD = [
    op(
        "constant_pad",
        lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 1, 2, 0), value=1.5)),
        X,
        dtypes=FLOATS,
    ),
    op("constant_pad_ints", lambda x: F.pad(x, (1, 2), value=1), X, dtypes=INTS),
    op("negative_pad", lambda x: F.pad(x, (-1, 2, 1, -2)), X, dtypes=F32_F64),
    op(
        "pad_channels_last",
        lambda x: F.pad(x, (1, 2, 1, 0)),
        IMAGE,
        layouts=ALL_LAYOUTS,
        dtypes=F32,
    ),
    op("reflection_pad1d", lambda x: F.pad(x, (2, 3), mode="reflect"), (2, 5, 7), dtypes=F32_F64),
    op("reflection_pad2d", lambda x: F.pad(x, (2, 3, 1, 0), mode="reflect"), IMAGE, dtypes=F32_F64),
    op(
        "reflection_pad3d",
        lambda x: F.pad(x, (2, 1, 1, 0, 1, 2), mode="reflect"),
        (2, 3, 4, 5, 6),
        dtypes=F32_F64,
    ),
    op(
        "replication_pad1d", lambda x: F.pad(x, (2, 3), mode="replicate"), (2, 5, 7), dtypes=F32_F64
    ),
    op(
        "replication_pad2d",
        lambda x: F.pad(x, (2, 3, 1, 0), mode="replicate"),
        IMAGE,
        dtypes=F32_F64,
    ),
    op(
        "replication_pad3d",
        lambda x: F.pad(x, (2, 1, 1, 0, 1, 2), mode="replicate"),
        (2, 3, 4, 5, 6),
        dtypes=F32_F64,
    ),
    op("circular_pad", lambda x: F.pad(x, (2, 1), mode="circular"), (2, 5, 7), dtypes=F32_F64),
    op("circular_pad2d", lambda x: F.pad(x, (0, 3, 2, 1), mode="circular"), IMAGE, dtypes=F32_F64),
]

REARRANGE = [
    op("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (2, 8, 5, 7), fixed=(8,), dtypes=F32_F64),
    op(
        "pixel_unshuffle",
        lambda x: F.pixel_unshuffle(x, 2),
        (2, 3, 6, 8),
        fixed=(6, 8),
        dtypes=F32_F64,
        layouts=("contiguous", "transposed"),  # with more, PyTorch proves guards for half a minute
    ),
    op(
        "channel_shuffle",
        lambda x: F.channel_shuffle(x, 2),
        (2, 8, 5, 7),
        fixed=(8,),
        dtypes=F32_F64,
    ),
    op("im2col", lambda x: F.unfold(x, 3, padding=1, stride=2), IMAGE, dtypes=F32_F64),
    op(
        "col2im",
        lambda x: F.fold(x, (8, 8), 3, padding=1),
        (2, 27, 64),
        dtypes=F32_F64,
        fixed=(27, 64),
    ),
    op("kron", torch.kron, (3, 4), (2, 5), dtypes=F32_F64),
    op(
        "tensor_properties",
        lambda x: x * (x.shape[0] + x.numel() + x.stride(0) + x.dim()),
        X,
        dtypes=F32,
    ),
    op("nothing_at_all", lambda x: x, X, layouts=LAYOUTS, dtypes=ANY),
]

CASES = [*VIEWS, *COPIES, *JOIN_AND_SPLIT, *REPEAT, *PAD, *REARRANGE]


@pytest.mark.sweep
def test_op(case: Any, check_op: Any) -> None:
    check_op(case)


@pytest.mark.parametrize(
    "sizes", [(2, 1), (0, 3, 2, 1), (8, 8, 7, 7, 3, 0), (2, -1, 1, 0, 3, 3), (0, 0, 0, 0)]
)
def test_circular_padding(sizes: tuple[int, ...], backend_name: str) -> None:
    """Its result is a contiguous tensor of its own, whatever the strides of the image."""
    x = (
        torch.arange(2 * 3 * 3 * 7 * 8.0)
        .reshape(2, 3, 3, 7, 8)
        .to(memory_format=torch.channels_last_3d)
    )
    x = x if len(sizes) == 6 else x[:, :, 0] if len(sizes) == 4 else x[0, :, 0]
    x = x if any(sizes) else x.contiguous()

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.pad(x, sizes, mode="circular")
        return y, y * 2

    with torch.no_grad():
        got = torch.compile(fn, backend=backend_name, dynamic=False)(x)
    assert all(map(torch.equal, got, fn(x)))
    assert [y.stride() for y in got] == [y.stride() for y in fn(x)]
    assert got[0].data_ptr() != x.data_ptr()


def test_circular_padding_is_a_concatenation(backend_name: str) -> None:
    """Copies of slices into a tensor took 1.3 to 1.5 times as long on the host."""
    explained = dicp.explain(
        lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"), torch.rand(2, 3, 7, 8),
        backend=backend_name,
    )  # fmt: skip
    assert "aten.cat" in str(explained) and "slice_scatter" not in str(explained)


@pytest.mark.parametrize(("size", "step"), [(1, 2), (1, 4), (2, 2), (3, 3), (2, 3)])
def test_windows_returned_of_what_is_written(size: int, step: int, backend_name: str) -> None:
    """Later calls have other strides, which views of symbolic length would not follow."""

    def windows(x: torch.Tensor) -> torch.Tensor:
        found = x.unfold(0, size, step)
        x.relu_()
        return found

    compiled = torch.compile(windows, backend=backend_name, dynamic=True)
    for count, gap in ((6, 1), (6, 3), (12, 2)):
        mine, given = (torch.arange(-3.0, 60.0)[: count * gap : gap] for _ in range(2))
        got, eager = compiled(mine), windows(given)
        assert torch.equal(got, eager) and got.stride() == eager.stride()
        assert got.data_ptr() == mine.data_ptr()


WRITTEN_WINDOWS = {
    "behind the last window": lambda x: x.unfold(1, 3, 3).mul_(2),
    "between windows": lambda x: x[:, 2:].unfold(-1, 2, 4).neg_(),
    "behind the last window's gap": lambda x: x.unfold(dimension=0, size=2, step=3)[1:].neg_(),
    "up to the end": lambda x: x.unfold(1, 2, 9).fill_(0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_WINDOWS)
def test_what_is_written_into_windows_leaves_other_elements(name: str, backend_name: str) -> None:
    def written(x: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        WRITTEN_WINDOWS[name](copy)
        return copy

    def written_in_batch(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(written)(x)

    x = torch.randn(2, 7, 11)
    for function, operand in ((written, x[0]), (written_in_batch, x)):
        compiled = torch.compile(function, backend=backend_name)
        assert torch.equal(compiled(operand), function(operand))
