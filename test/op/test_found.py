"""What random programs have found (`python -m dicp.fuzz`), as small programs for every target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.compare import Rule, check_tensor, storage_relations
from dicp.fuzz.batch import fails
from dicp.fuzz.check import Mode
from dicp.fuzz.program import Program, Statement, TensorInput

NEAR_A_TENTH = (0.1, -0.1, 0.099, 0.101, 0.0, 1.0)


def tenths(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(NEAR_A_TENTH, dtype=dtype)


def _shown_beside_an_eager_call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    flat = y.reshape(-1)
    return torch.remainder(flat, y.abs() + 1), y, flat


def _window(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided_copy(x, (x.numel() // 2,), (2,))


def _written_through_a_window(x: torch.Tensor) -> torch.Tensor:
    count = x.numel() // 2
    return torch.as_strided_scatter(x, x.reshape(-1)[:count] + 1, (count,), (2,))


def _bag(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(places, table, torch.tensor([0, 1]), mode="sum")


def _column_of_transposed_convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv_transpose2d(x, w.transpose(0, 1), stride=2)[..., 0:1].reshape(-1)


def _window_of_column(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w)[:, :, :, 1:3].as_strided((2, 3), (4, 2)) * 2


def _attention_to_a_convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    keys = F.conv2d(x, w, padding=1, groups=2)
    return F.scaled_dot_product_attention(x, keys, x)


def _parts_of_a_convolution(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = F.conv2d(x, w, padding=1, groups=4).relu()
    return y.tensor_split(2, 1)[1], y, y + 1, y.flatten(2)[:, 0]


def _centred(x: torch.Tensor) -> torch.Tensor:
    rows = torch.unfold_copy(x, 0, 1, 1)
    return rows - rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + 0.01)


def _complex_inner_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.conj() * y).sum().abs()


ROW_OF_COMPLEX = torch.randn(1, 4, dtype=torch.complex64, requires_grad=True)
BOOLEANS = torch.tensor([True, False, True])
PLACE = torch.tensor([1])
LARGEST = torch.finfo(torch.float64).max
FOUND: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "strides_of_an_eager_view_with_a_size_of_one": (
        _complex_inner_product,
        (ROW_OF_COMPLEX, torch.ones(1, 4, dtype=torch.complex64)),
    ),
    "a_view_keeps_its_strides_in_another_format": (
        _column_of_transposed_convolution,
        (torch.randn(1, 1, 1, 1), torch.randn(2, 1, 2, 2)),
    ),
    "memory_of_a_slice_in_another_format": (
        _window_of_column,
        (torch.randn(1, 3, 4, 5), torch.randn(2, 3, 2, 2)),
    ),
    "two_results_share_memory_beside_an_eager_call": (
        _shown_beside_an_eager_call,
        (torch.randn(3, 1),),
    ),
    "window_of_an_expanded_tensor": (_written_through_a_window, (torch.ones(1).expand(2),)),
    "window_of_a_tensor_with_an_offset": (_written_through_a_window, (torch.randn(2, 7)[:, 1::2],)),
    "layers_of_one_element": (
        lambda x: F.layer_norm(_centred(x), (1,)) + 1,
        (torch.randn(3, 6).bfloat16().requires_grad_(),),
    ),
    "groups_of_one_element": (
        lambda x: F.group_norm(_centred(x), 6) + 1,
        (torch.randn(3, 6).bfloat16().requires_grad_(),),
    ),
    "attention_to_keys_in_another_format": (
        _attention_to_a_convolution,
        (torch.randn(2, 2, 2, 3), torch.randn(2, 1, 3, 3).requires_grad_()),
    ),
    "results_share_memory_in_another_format": (
        _parts_of_a_convolution,
        (torch.randn(2, 4, 5, 5), torch.randn(4, 1, 3, 3)),
    ),
    "attention_shares_memory_with_its_view": (
        lambda x: (lambda y: (y[..., None], y, y[0]))(torch.softmax(x @ x.mT * 0.5, -1) @ x),
        (torch.randn(2, 7, 4),),
    ),
    "logic_of_a_number_that_the_common_dtype_rounds_to_zero": (
        lambda x, y: (torch.logical_and(x, y), torch.logical_or(y, x), torch.logical_xor(x, y)),
        (torch.tensor(1e-300, dtype=torch.float64), torch.tensor([0.0, 2.0]).half()),
    ),
    "complex_numbers_are_joined_with_nothing": (
        lambda x, y: (torch.cat([x, y], -1), torch.cat([y, x]), torch.cat([x, x])),
        (torch.empty(0, dtype=torch.complex64), torch.randn(2, 3, dtype=torch.complex64)),
    ),
    "views_in_other_dtypes_share_memory": (
        lambda x: (lambda y: (y, y[2:].view(torch.int16)[1:], y[2:].view(torch.int64)))(x + 1),
        (torch.randn(6),),
    ),
    "a_product_is_scaled_before_it_overflows": (
        lambda x: torch.addcmul(x, x, x, value=0),
        (torch.tensor([1.0, 1e30]),),
    ),
    "a_bool_is_added_no_times": (
        lambda x, y: (torch.add(x, y, alpha=0), torch.add(y, True, alpha=0)),
        (torch.tensor([False, True]), torch.tensor([True, False])),
    ),
    "rolling_nothing_copies": (lambda x: x[:0].roll(1, 0), (torch.ones(3),)),
    "gradient_of_a_window_of_one": (_window, (torch.ones(2).requires_grad_(),)),
    "a_result_without_use_has_another_shape_than_inferred": (
        _bag,
        (torch.randn(2, 3).bfloat16(), torch.tensor([1])),
    ),
    "threshold_of_integers_is_cut_off": (lambda x: F.threshold(x, -2.5, 7), (torch.arange(-4, 4),)),
    "transposed_convolution_of_empty_images": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        (torch.randn(0, 1, 2, 0), torch.randn(1, 1, 2, 2)),
    ),
    "gradient_of_one_of_equal_values": (
        lambda x: x.kthvalue(2, 0)[0],
        (torch.arange(48.0).reshape(16, 3).remainder(4).requires_grad_(),),
    ),
    "positions_of_equal_values": (
        lambda x: (*x.kthvalue(2, 0), *x.median(0)),
        (torch.arange(48.0).reshape(16, 3).remainder(4),),
    ),
    "threshold_is_not_rounded": (
        lambda x: F.threshold(x, 0.1, 7),
        (tenths(torch.bfloat16).requires_grad_(),),
    ),
    "dropped_elements_are_products": (
        lambda x: (torch.signbit(F.dropout(x, 1.0)), F.dropout(x, 1.0)),
        (torch.tensor([-1.0, 1.0, torch.nan]),),
    ),
    "gradient_of_dropout_of_a_transposed_tensor": (
        lambda x, mask: torch.ops.aten.native_dropout_backward(x, mask, 1.25),
        (torch.randn(3, 4).t(), torch.ones(3, 4, dtype=torch.bool).t()),
    ),
    "hardsigmoid_has_eager_gradient_in_float64": (
        lambda x: F.hardsigmoid(x),
        (torch.zeros(3, dtype=torch.float64).requires_grad_(),),
    ),
    "distances_of_a_transposed_tensor": (lambda x: F.pdist(x), (torch.randn(3, 4).t(),)),
    "windows_of_a_row": (
        lambda x: torch.any(x.narrow(0, 2, 1).unfold(1, 2, 2), 0),
        (torch.arange(32).view(4, 8) % 3,),
    ),
    "select_scatter_into_windows": (
        lambda x, y: torch.select_scatter(x.unfold(1, 2, 1), y, 1, 2),
        (torch.arange(6.0).view(1, 6), torch.full((1, 2), -1.0)),
    ),
    "slice_scatter_into_windows": (
        lambda x, y: torch.slice_scatter(x.unfold(0, 4, 2), y, 0, 1, 2),
        (torch.arange(9.0), torch.full((1, 4), -1.0)),
    ),
    "diagonal_scatter_outside": (
        lambda x, y: torch.diagonal_scatter(x, y, -3),
        (torch.ones(1, 2), torch.ones(0)),
    ),
    "diagonal_scatter_into_windows": (
        lambda x, y: torch.diagonal_scatter(x[1:].unfold(0, 3, 1), y, 1),
        (torch.arange(8.0), torch.tensor([-1.0, -2.0])),
    ),
    "strides_of_a_copy_count_from_its_start": (
        lambda x, y: (
            torch.as_strided(x[1:].clone(), (2,), (2,), 1) + 0,
            torch.as_strided(x[2:] * 1, (2,), (2,), 1) + 0,
            torch.as_strided(torch.cat([x[1:]]), (2,), (2,), 1) + 0,
            torch.as_strided(torch.empty_like(y).copy_(x[3:5]), (1,), (1,), 1) + 0,
            torch.as_strided_scatter(x[1:].clone(), y, (2,), (2,), 1),
        ),
        (torch.arange(8.0), torch.tensor([-1.0, -2.0])),
    ),
    "scatter_into_a_part_that_is_all": (
        lambda x, y: (
            torch.as_strided_scatter(x * 2, y.t(), (2, 3), (3, 1)),
            torch.as_strided_scatter(x * 2, y.t(), (2, 3), (3, 1), 0),
            torch.as_strided_scatter(x * 2, y, (3, 2), (1, 3)),
            torch.as_strided_scatter((x * 2)[1:], y[:, 0], (3,), (1,)),
            torch.as_strided_scatter(x * 2, y[:2, :1].t(), (1, 2), (2, 1)),
        ),
        (torch.arange(6.0).view(2, 3), -torch.arange(6.0).view(3, 2)),
    ),
    "scatter_into_nothing_that_is_expanded": (
        lambda x: _written_through_a_window(x.expand(2, 0)),
        (torch.zeros(1, 0),),
    ),
    "scatter_multiplies_booleans": (
        lambda x, i: x.scatter(0, i, 2, reduce="multiply"),
        (BOOLEANS, PLACE),
    ),
    "gradient_of_eigenvalues": (
        lambda x: torch.linalg.eigvals(x).abs(),
        (torch.diag(torch.arange(1.0, 5.0)).requires_grad_(),),
    ),
    "gradient_of_softmax_overflows": (
        lambda g, y: torch._softmax_backward_data(g, y, 0, g.dtype),
        (LARGEST * torch.tensor([1.0, -1.0, 0.0]).double(), torch.tensor([2.0, 1, 1]).double() / 4),
    ),
    "scatter_adds_booleans": (lambda x, i: x.scatter_reduce(0, i, x, "sum"), (BOOLEANS, PLACE)),
}


def results(function: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Outputs, then gradients."""
    found = function(*given)
    outputs = list(found) if isinstance(found, tuple) else [found]
    leaves = [each for each in given if each.requires_grad]
    sums = [each.sum() for each in outputs if each.requires_grad]
    return [*outputs, *(torch.autograd.grad(sum(sums), leaves) if leaves else ())]


FLOORS = {"attention_to_keys_in_another_format": 4.0}
"""Of what adds up in another order than eager."""


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, backend_name: str) -> None:
    function, given = FOUND[name]
    eager = results(function, given)
    compiled = torch.compile(function, backend=backend_name, fullgraph=True)
    got = results(compiled, given)
    assert len(got) == len(eager)
    for mine, theirs in zip(got, eager, strict=True):
        assert not check_tensor(mine, theirs, None, Rule(floor=FLOORS.get(name, 1.0)))
    assert storage_relations(got, given) == storage_relations(eager, given)


def test_a_result_returned_twice_is_one_tensor(backend_name: str) -> None:
    """Dynamo, which would return it once, is left out."""
    x = TensorInput("x0", "float32", ((2, 1, 2), (2, 1, 2)), "reversed")
    put = Statement(
        "{x}.put(torch.tensor([1]), {x}[0, 0, :1], accumulate=True)", {"x": "x0"}, ("v0",)
    )
    program = Program((x,), (put,), ("v0", "v0"))
    assert not fails(program, Mode(backend_name, dynamo=False))


@pytest.mark.parametrize("columns", [2, 3, 5, 8])
def test_columns_of_joined_rows_in_another_order(columns: int, backend_name: str) -> None:
    """g++ 12 does not permute masked loads (`scalar_rows`)."""

    def mirrored(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.cat([x, y])
        return torch.stack([z[:, k] - z[:, columns - 1 - k] * 2 for k in range(columns)], -1)

    given = torch.randn(30, columns), torch.randn(20, columns)
    run = torch.compile(mirrored, backend=backend_name, fullgraph=True)
    torch.testing.assert_close(run(*given), mirrored(*given))


def test_a_size_that_a_guard_makes_one_is_broadcast(backend_name: str) -> None:
    def bounded(x: torch.Tensor, offset: int) -> torch.Tensor:
        return torch.clamp_max(x, x.diagonal(offset, 0, -1).cumsum(-1))

    run = torch.compile(bounded, backend=backend_name)
    for rows, offset in ((17, 0), (2, -1), (4, -3)):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(run(x, offset), bounded(x, offset))


@pytest.mark.parametrize("marked", [torch.Tensor.conj, torch._neg_view], ids=["conj", "neg"])
def test_parts_of_a_marked_tensor_with_a_gradient(marked: Any, backend_name: str) -> None:
    x = marked(torch.randn(4, 3, dtype=torch.complex64)).requires_grad_()
    for split in (torch.unbind, lambda x: x.chunk(2), lambda x: [part * 2 for part in x.split(3)]):
        run = torch.compile(split, backend=backend_name)
        for mine, theirs in zip(run(x), split(x), strict=True):
            assert not check_tensor(mine, theirs, None, Rule())
            totals = mine.abs().sum(), theirs.abs().sum()
            grads = [torch.autograd.grad(total, x, retain_graph=True)[0] for total in totals]
            assert not check_tensor(grads[0], grads[1], None, Rule(floor=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_other_strides_in_an_optimizer(dtype: torch.dtype, backend_name: str) -> None:
    """Dynamo guards no strides of the gradients that an optimizer reads."""

    def steps(compiled: bool) -> torch.Tensor:
        gen = torch.Generator().manual_seed(0)
        x = torch.randn(4, 3, generator=gen).to(dtype).t().requires_grad_()
        optimizer = torch.optim.SGD([x], lr=0.5)
        run = torch.compile(optimizer.step, backend=backend_name) if compiled else optimizer.step
        for transposed in (True, False, False, True):
            grad = torch.randn(3, 4, generator=gen).to(dtype)
            x.grad = torch.empty_like(x).copy_(grad) if transposed else grad
            run()
        return x.detach()

    assert not check_tensor(steps(True), steps(False), None, Rule())


def scaled_by_norm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As gradients are clipped by their norm."""
    torch._foreach_mul_([x, y], x.norm())
    torch._foreach_add_([x], y.sum())
    return x * 2


@pytest.mark.parametrize("size", [0, 3])
def test_several_tensors_and_a_number_that_is_data(size: int, backend_name: str) -> None:
    """PyTorch reads the number: an operator that runs eagerly has several results."""
    mine, theirs = ((torch.ones(size), torch.full((size, 2), 3.0)) for _ in range(2))
    run = torch.compile(scaled_by_norm, backend=backend_name, fullgraph=True)
    assert not check_tensor(run(*mine), scaled_by_norm(*theirs), None, Rule(floor=2))
    for got, eager in zip(mine, theirs, strict=True):
        assert not check_tensor(got, eager, None, Rule(floor=2))


def test_infinities_become_numbers_that_are_replaced_themselves(backend_name: str) -> None:
    """Each element is replaced once, by the number for its own value."""
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([nan, inf, -inf, 1.0])

    def replaced(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        numbers = ((0.0, nan, 1.0), (0.0, -inf, 1.0), (0.0, 1.0, nan), (inf, 2.0, 1.0))
        return tuple(x.nan_to_num(*each) for each in numbers)

    got = torch.compile(replaced, backend=backend_name)(x)
    for mine, theirs in zip(got, replaced(x), strict=True):
        assert not check_tensor(mine, theirs, None, Rule(exact=True))
