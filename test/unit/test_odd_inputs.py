"""Tensors that memory alone does not describe, and graphs of unusual size: as eager takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dicp.errors import FallbackWarning
from dicp.torch_private import FakeTensorMode

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


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin()


def product_of_some_rows(x: Tensor, w: Tensor) -> Tensor:
    return product(x[(x.detach()[:, 0] > 0).nonzero().squeeze(1)], w)


@pytest.mark.parametrize("backend", ["cpugraph", "topsgraph"])
@pytest.mark.parametrize("fn", [product, product_of_some_rows])
def test_backward_under_autocast(fn: Any, backend: str) -> None:
    """Forward ran without autocast: so do compiled and eager operators of the backward graph."""

    def gradients(run: Any, autocast: bool) -> list[Any]:
        x, w = (torch.arange(32.0).reshape(n, -1).cos().requires_grad_() for n in (8, 4))
        result = run(x, w)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            result.sum().backward()
        return [x.grad, w.grad]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = gradients(torch.compile(fn, backend=backend), autocast=True)
    torch.testing.assert_close(found, gradients(fn, autocast=False))


@BACKENDS
def test_a_gradient_with_the_negative_bit_is_read(backend: str) -> None:
    x = torch.randn(4, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin() * 2, backend=backend)
    for given in (torch.ones(4), negative(torch.ones(4))):
        (found,) = torch.autograd.grad(compiled(x), x, given)
        torch.testing.assert_close(found, 2 * x.cos() * given)


@pytest.mark.sweep
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


@BACKENDS
@pytest.mark.parametrize("grad", [False, True])
def test_tangents_of_inputs_and_parameters_reach_results(backend: str, grad: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend=backend)
    x, tangent = torch.randn(3, 4), torch.randn(3, 4)
    with torch.set_grad_enabled(grad):
        compiled(x)
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, tangent)))
            expected = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
        torch.testing.assert_close(found, expected)
        with forward_ad.dual_level():
            weight = model[0].weight.detach().clone()
            del model[0].weight
            model[0].weight = forward_ad.make_dual(weight, torch.ones_like(weight))
            found = forward_ad.unpack_dual(compiled(x))
            expected = forward_ad.unpack_dual(model(x))
        torch.testing.assert_close(found, expected)


@BACKENDS
def test_gradients_of_a_batch(backend: str) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x.sin() * x).cumsum(0) * y.sum(), x[:, None] * y

    x, y = torch.randn(5), torch.randn(3)
    compiled = torch.compile(fn, backend=backend)
    found = torch.autograd.functional.jacobian(compiled, (x, y), vectorize=True)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(fn, (x, y)))
    x.requires_grad_()
    batch = torch.randn(4, 5, 3)
    (found,) = torch.autograd.grad(compiled(x, y)[1], x, batch, is_grads_batched=True)
    (expected,) = torch.autograd.grad(fn(x, y)[1], x, batch, is_grads_batched=True)
    torch.testing.assert_close(found, expected)


@BACKENDS
@pytest.mark.filterwarnings("ignore:a graph runs eagerly")
def test_inputs_that_kernels_cannot_read_run_eagerly(backend: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.relu().to_dense() + 1

    x = torch.randn(10, 12)
    compiled = torch.compile(fn, backend=backend)
    for _ in range(2):
        with pytest.warns(FallbackWarning, match="layout torch._mkldnn"):
            torch.testing.assert_close(compiled(x.to_mkldnn()), fn(x))
    torch.testing.assert_close(compiled(x), fn(x))
    with FakeTensorMode():
        assert compiled(torch.empty(10, 12)).shape == (10, 12)


class Scale(torch._library.opaque_object.OpaqueBase):
    """An object that operators take beside tensors."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


torch._library.opaque_object.register_opaque_type(Scale, typ="reference")


@torch.library.custom_op("dicp_test::scaled", mutates_args=())
def scaled(x: Tensor, scale: Scale) -> Tensor:
    return x * scale.factor


@scaled.register_fake
def _(x: Tensor, scale: Scale) -> Tensor:
    return torch.empty_like(x)


@BACKENDS
def test_an_operator_takes_an_object(backend: str) -> None:
    compiled = torch.compile(lambda x, scale: scaled(x + 1, scale) * 2, backend=backend)
    x = torch.randn(4, 3)
    for factor in (2.0, 3.0):
        torch.testing.assert_close(compiled(x, Scale(factor)), (x + 1) * factor * 2)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.DeviceMesh]:
    """One for all tests: with a second, PyTorch's partitioner fails on every backend."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("mesh") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@BACKENDS
def test_distributed_tensors_are_taken_and_returned(backend: str, mesh: dist.DeviceMesh) -> None:
    x, weight = torch.randn(4, 6), torch.randn(6, 5)
    ours = distribute_tensor(weight, mesh, [Shard(1)]).requires_grad_()
    given = distribute_tensor(x, mesh, [Replicate()])
    found = torch.compile(lambda x, w: (x @ w).relu() + 1, backend=backend)(given, ours)
    torch.testing.assert_close(found.full_tensor(), (x @ weight).relu() + 1)
    found.full_tensor().sum().backward()
    assert ours.grad is not None
    expected = x.t() @ (x @ weight > 0).float()
    torch.testing.assert_close(ours.grad.full_tensor(), expected)


class Layers(nn.Sequential):
    """Dynamo compiles no `forward` that PyTorch itself defines, called from DDP's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


@BACKENDS
@pytest.mark.usefixtures("mesh")
def test_distributed_data_parallel_splits_a_graph_into_buckets(backend: str) -> None:
    layers = Layers(*[nn.Linear(600, 600) for _ in range(3)])
    x = torch.randn(2, 600)
    layers(x).sum().backward()
    expected = [parameter.grad for parameter in layers.parameters()]
    for _ in range(2):  # the second finds stored results
        torch.compiler.reset()
        layers.zero_grad(set_to_none=True)
        model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1)
        torch.compile(model, backend=backend)(x).sum().backward()
        torch.testing.assert_close([parameter.grad for parameter in layers.parameters()], expected)
