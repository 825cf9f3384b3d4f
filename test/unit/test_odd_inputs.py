"""Tensors that memory alone does not describe, and graphs of unusual size: as eager takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

BACKENDS = pytest.mark.parametrize("backend", ["cpugraph", "ascendgraph"])


def negative(x: Tensor) -> Tensor:
    return torch._neg_view(x)


def several(x: Tensor, wide: Tensor, z: Tensor, conjugate: Tensor) -> tuple[Tensor, ...]:
    return (
        x + 1, x.view(-1), wide * 2, x.sum(0), z.conj().imag * 2, negative(z.real) + 1,
        conjugate.real + conjugate.imag, torch.view_as_real(z.conj().resolve_conj()) * 2,
    )  # fmt: skip


@BACKENDS
def test_negative_and_conjugate_bits_are_read(backend: str) -> None:
    x, z = torch.randn(6, 4), torch.randn(5, dtype=torch.complex64)
    inputs = (negative(x)[::2, 1:], negative(x[:1]).expand(3, 4), z, z.conj())
    compiled = torch.compile(several, backend=backend, dynamic=False)
    expected = several(inputs[0].contiguous(), *inputs[1:])
    torch.testing.assert_close(compiled(inputs[0].contiguous(), *inputs[1:]), expected)
    plain = (x[::2, 1:].contiguous(), x[:1].expand(3, 4), z, z.clone())
    torch.testing.assert_close(compiled(*plain), several(*plain))


@BACKENDS
def test_an_input_with_the_negative_bit_is_written(backend: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    ours, theirs = torch.arange(4.0), torch.arange(4.0)
    found = torch.compile(fn, backend=backend)(negative(ours))
    torch.testing.assert_close(found, fn(negative(theirs)))
    assert torch.equal(ours, theirs)


@BACKENDS
def test_a_gradient_with_the_negative_bit_is_read(backend: str) -> None:
    x = torch.randn(4, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin() * 2, backend=backend)
    for given in (torch.ones(4), negative(torch.ones(4))):
        (found,) = torch.autograd.grad(compiled(x), x, given)
        torch.testing.assert_close(found, 2 * x.cos() * given)


def test_very_many_tensors_are_joined() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat(x.unbind()) * 2, torch.stack(x.unbind()[:150], 1) + 1

    x = torch.randn(600, 2, 3)
    torch.testing.assert_close(torch.compile(fn, backend="cpugraph", dynamic=False)(x), fn(x))


@BACKENDS
@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradient_of_an_embedding(backend: str, make: Any) -> None:
    options = {"mode": "sum"} if make is nn.EmbeddingBag else {}
    module = make(10, 4, sparse=True, **options)
    index = torch.tensor([[1, 2, 2]])
    torch.compile(lambda i: module(i) * 2, backend=backend)(index).sum().backward()
    grad = module.weight.grad
    assert grad.is_sparse
    assert torch.equal(grad.to_dense().sum(1), torch.tensor([0, 8, 16, 0, 0, 0, 0, 0, 0, 0.0]))


def test_sparse_inputs_beside_dense_ones() -> None:
    def fn(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return s * 2, torch.sparse.mm(s, x) + 1

    s, x = torch.eye(3).to_sparse(), torch.randn(3, 3)
    doubled, product = torch.compile(fn, backend="cpugraph")(s, x)
    torch.testing.assert_close(doubled.to_dense(), torch.eye(3) * 2)
    torch.testing.assert_close(product, x + 1)


@BACKENDS
def test_digits_of_integers_are_refused_as_by_eager(backend: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.round(x, decimals=-1)

    compiled = torch.compile(fn, backend=backend)
    x = torch.tensor([15.0, 25.0, -35.2, 1234.0])
    assert torch.equal(compiled(x), fn(x))
    with pytest.raises(RuntimeError, match="not implemented for 'Long'"):
        compiled(x.long())
