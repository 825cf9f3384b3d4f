"""Whole programs: what must hold for any valid PyTorch code, beside the right numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dicp.testing import BackendUnderTest, Rule, assert_matches
from dicp.testing.inputs import clone_exactly

FLOAT_RULE = Rule(floor=8.0)


def same(fn: Callable[..., Any], backend: Any, *inputs: Any, **options: Any) -> Any:
    """Run `fn` compiled and eager on copies of the inputs; compare outputs and mutated inputs."""
    mine, theirs = [[_copy(v) for v in inputs] for _ in range(2)]
    got = torch.compile(fn, backend=backend, **options)(*mine)
    eager = fn(*theirs)
    compare(got, eager)
    compare(mine, theirs)
    return got


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return clone_exactly(value).requires_grad_(value.requires_grad)


def compare(got: Any, eager: Any) -> None:
    mine, theirs = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(eager)
    assert len(mine) == len(theirs)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(b, Tensor):
            assert_matches(a, b, name=f"value {i}", rule=FLOAT_RULE)
        else:
            assert a == b


# ---- aliasing, mutation, views -------------------------------------------------------------------


def test_input_mutation(backend: BackendUnderTest) -> None:
    same(lambda x: (x.add_(1), x * 2), backend, torch.randn(5, 7))


def test_mutation_through_a_view(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Tensor:
        x[1:, ::2].mul_(3)
        x.view(-1)[3] = 9
        return x.sum()

    same(fn, backend, torch.randn(5, 8))


def test_two_inputs_that_are_one_tensor(backend: BackendUnderTest) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    results = []
    for run in (torch.compile(fn, backend=backend), fn):
        x = torch.arange(6.0)
        results.append((run(x, x), x))
    compare(*results)


def test_two_inputs_that_overlap(backend: BackendUnderTest) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    results = []
    for run in (torch.compile(fn, backend=backend), fn):
        base = torch.arange(8.0)
        results.append((run(base[:5], base[3:]), base))
    compare(*results)


def test_output_is_an_input_or_its_view(backend: BackendUnderTest) -> None:
    run = torch.compile(lambda x: (x, x.t(), x[1:], x + 1), backend=backend)
    x = torch.randn(4, 5)
    same_tensor, transposed, sliced, fresh = run(x)
    for view in (same_tensor, transposed, sliced):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert fresh.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    sliced.zero_()
    assert not x[1:].any()


VIEWS_OF_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "steps of joined axes": lambda x: x.flatten()[::2],
    "halves of steps of joined axes": lambda x: x.flatten()[::3].view(2, -1),
    "halves of windows": lambda x: x.unfold(-1, 2, 1).view(2, -1, *x.shape[1:-1], 11, 2),
    "halves of a part": lambda x: x[..., 1:-1].view(2, -1, 10)[1::2].view(-1, 5, 2),
}


@pytest.mark.parametrize("name", VIEWS_OF_VIEWS)
def test_views_of_inputs_whose_sizes_and_strides_change(
    name: str, backend: BackendUnderTest
) -> None:
    """With symbols, AOTAutograd takes the view's strides and offset from the graph's result."""
    view = VIEWS_OF_VIEWS[name]
    run = torch.compile(view, backend=backend)
    run(torch.randn(4, 12))
    for x in (torch.randn(8, 24)[:, 1::2], torch.randn(12, 12)[2:8]):
        got = run(x)
        assert torch.equal(got, view(x))
        assert got.data_ptr() == view(x).data_ptr()


@pytest.mark.parametrize("name", VIEWS_OF_VIEWS)
def test_views_of_a_result_whose_sizes_change(name: str, backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return VIEWS_OF_VIEWS[name](y[2:]), y

    run = torch.compile(fn, backend=backend)
    for rows in (6, 10, 14):
        x = torch.randn(rows, 12)
        view, whole = run(x)
        assert torch.equal(view, fn(x)[0])
        whole.zero_()
        assert not view.any()


def test_outputs_that_alias_each_other(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y.view(-1), y[0], y

    y, flat, row, again = torch.compile(fn, backend=backend)(torch.randn(3, 4))
    y.zero_()
    assert not flat.any() and not row.any() and not again.any()


def test_outputs_are_fresh_on_every_call(backend: BackendUnderTest) -> None:
    run = torch.compile(lambda x: (x * 2).relu(), backend=backend)
    first = run(torch.ones(64))
    kept = first.clone()
    for i in range(4):
        run(torch.full((64,), float(i)))
    assert torch.equal(first, kept)


def test_same_tensor_returned_twice_and_constants(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Any:
        y = x + 1
        return y, y, 3, None, {"a": y, "b": [x.shape[0]]}

    same(fn, backend, torch.randn(3))


def test_buffer_mutation(backend: BackendUnderTest) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            self.mean.lerp_(x.mean(0), 0.1)
            return x - self.mean

    eager = Counter()
    run = torch.compile(copy.deepcopy(eager), backend=backend)
    for _ in range(3):
        x = torch.randn(8, 4)
        compare(run(x), eager(x))
    compare(dict(run.named_buffers()), dict(eager.named_buffers()))


def test_non_contiguous_inputs(backend: BackendUnderTest) -> None:
    base = torch.randn(6, 8, 10)
    inputs = (base.transpose(0, 2), base[::2, :, 1], base[:1].expand(6, -1, -1), base[..., ::3])
    same(lambda *xs: [x.exp().sum(-1) for x in xs], backend, *inputs)


def test_strides_of_inputs_change_between_calls(backend: BackendUnderTest) -> None:
    run = torch.compile(lambda x: x * 2 + x.sum(0), backend=backend)
    x = torch.randn(6, 6)
    for value in (x, x.t(), x[:, ::2], x[1:]):
        compare(run(value), value * 2 + value.sum(0))


def test_empty_and_zero_dim(backend: BackendUnderTest) -> None:
    same(
        lambda x, s: (x + s, x.sum(0), torch.cat((x, x)), x @ x.t(), s.exp()),
        backend,
        torch.randn(0, 5),
        torch.tensor(1.5),
    )


def test_pixels_of_empty_images(backend: BackendUnderTest) -> None:
    """Eager leaves an empty image as it is where it gathers pixels into channels."""

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        calls = (F.pixel_unshuffle, F.pixel_shuffle, F.channel_shuffle)
        return [call(z, 2) * 2 for call in calls for z in (x, y)]

    same(fn, backend, torch.zeros(1, 4, 0, 4), torch.zeros(0, 4, 2, 4))


def test_negative_and_conjugate_views(backend: BackendUnderTest) -> None:
    z = torch.randn(5, dtype=torch.complex64)
    same(lambda a, b: (a.sum(), (b * 2)), backend, z.conj(), z.conj().imag)


# ---- dtypes, autocast, modes ---------------------------------------------------------------------


def test_dtype_promotion(backend: BackendUnderTest) -> None:
    same(
        lambda i, h, d, b: (i + h, h * d, b + i, i / 2, h + 1.5, b * 2.5, i // 2, d + b),
        backend,
        torch.arange(5),
        torch.randn(5).bfloat16(),
        torch.randn(5).double(),
        torch.arange(5) > 2,
    )


@pytest.mark.parametrize("training", [False, True])
def test_autocast(training: bool, backend: BackendUnderTest) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x = torch.randn(8, 16)

    def step(m: Any) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(x)
        if training:
            y.float().square().mean().backward()
        return [y.detach(), *(p.grad for p in m.parameters() if p.grad is not None)]

    eager = step(copy.deepcopy(model))
    got = step(torch.compile(copy.deepcopy(model), backend=backend))
    assert [v.dtype for v in got] == [v.dtype for v in eager]
    assert got[0].dtype is torch.bfloat16
    for mine, theirs in zip(got, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=3e-2)


def test_autocast_inside_the_function(backend: BackendUnderTest) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
        return y, y.float() + 1

    got = torch.compile(fn, backend=backend)(torch.randn(4, 8), torch.randn(8, 3))
    assert (got[0].dtype, got[1].dtype) == (torch.bfloat16, torch.float32)


def test_no_grad_inference_mode_and_grad_share_a_function(backend: BackendUnderTest) -> None:
    model = nn.Linear(4, 4)
    run = torch.compile(model, backend=backend)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert not run(x).requires_grad
    with torch.inference_mode():
        compare(run(x), model(x))
    y = run(x)
    assert y.requires_grad
    y.sum().backward()
    assert model.weight.grad is not None


def test_set_grad_enabled_inside(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            y = x * 2
        return y, y * x

    x = torch.randn(4, requires_grad=True)
    y, z = torch.compile(fn, backend=backend)(x)
    assert not y.requires_grad and z.requires_grad


def test_random_state_like_eager_programs(backend: BackendUnderTest) -> None:
    run = torch.compile(lambda x: F.dropout(x, 0.5), backend=backend)
    x = torch.ones(100)
    torch.manual_seed(1)
    first = [run(x) for _ in range(3)]
    torch.manual_seed(1)
    again = [run(x) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])


def test_fallback_random_is_bit_for_bit_eager(backend: BackendUnderTest) -> None:
    if not backend.is_dicp:
        pytest.skip("an option of dicp's backends")

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return torch.rand_like(x), F.dropout(x, 0.3), torch.randn(x.shape), torch.randint(9, (5,))

    run = torch.compile(fn, backend=backend, options={"fallback_random": True})
    torch.manual_seed(7)
    got = run(torch.ones(50))
    torch.manual_seed(7)
    for mine, theirs in zip(got, fn(torch.ones(50)), strict=True):
        assert torch.equal(mine, theirs)


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool, backend: BackendUnderTest) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=use_reentrant)

    model = Block()
    x = torch.randn(4, 8, requires_grad=True)
    y = torch.compile(model, backend=backend)(x)
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    quiet = model.eval()
    grads = []
    for run in (torch.compile(quiet, backend=backend), quiet):
        x.grad = None
        run(x).sum().backward()
        grads.append(x.grad.clone())
    compare(*grads)


def test_gradient_accumulates_and_frees(backend: BackendUnderTest) -> None:
    model = nn.Linear(5, 3)
    run = torch.compile(model, backend=backend)
    x = torch.randn(7, 5)
    run(x).sum().backward()
    run(x).sum().backward()
    expected = torch.autograd.grad(model(x).sum() * 2, list(model.parameters()))
    compare([p.grad for p in model.parameters()], expected)


def test_retain_graph(backend: BackendUnderTest) -> None:
    x = torch.randn(5, requires_grad=True)
    loss = torch.compile(lambda t: (t.exp() * t.sin()).sum(), backend=backend)(x)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])


def test_double_backward_error_is_aot_autograds(backend: BackendUnderTest) -> None:
    x = torch.randn(5, requires_grad=True)
    y = torch.compile(lambda t: t.sin().exp().sum(), backend=backend)(x)
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(grad.sum(), x)


def test_gradient_inside_the_function(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: (t.sin() ** 2).sum())(x) * 2

    same(fn, backend, torch.randn(6))


def test_vmap_and_jvp(backend: BackendUnderTest) -> None:
    same(lambda x: torch.func.vmap(lambda row: row.softmax(0) @ row)(x), backend, torch.randn(4, 5))
    same(
        lambda x: torch.func.jvp(lambda t: t.exp() * 2, (x,), (torch.ones_like(x),)),
        backend,
        torch.randn(4),
    )


def test_vmap_promotes_numbers(backend: BackendUnderTest) -> None:
    # vmap casts the number beside a batch of scalars, which it gives for a tensor, to their dtype.
    def row(x: Tensor, n: Tensor, i: Tensor) -> Any:
        return x[i] * 2, 3 / x[i], n[i] * 2.5, x[i].half() + 0.1

    rows, numbers, at = torch.randn(4, 5), torch.arange(20).view(4, 5), torch.tensor([1, 2, 3, 0])
    same(torch.func.vmap(row), backend, rows, numbers, at)


def test_custom_autograd_function(backend: BackendUnderTest) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=0) * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * 5 * (x > 0)

    x = torch.randn(6, requires_grad=True)
    torch.compile(lambda t: Twice.apply(t).sum(), backend=backend)(x).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 5.0 * (x > 0))


def test_some_outputs_unused_in_backward(backend: BackendUnderTest) -> None:
    x = torch.randn(4, requires_grad=True)
    y, _ = torch.compile(lambda t: (t * 2, t.exp()), backend=backend)(x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((4,), 2.0))


def test_hooks_and_non_contiguous_cotangents(backend: BackendUnderTest) -> None:
    def run(fn: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.arange(12.0).reshape(3, 4).requires_grad_(True)
        y = fn(x)
        y.register_hook(lambda g: g * 3)
        y.backward(torch.arange(12.0).reshape(4, 3).t())
        assert x.grad is not None
        return x.grad

    def fn(x: Tensor) -> Tensor:
        return (x * 2).sin()

    compare(run(torch.compile(fn, backend=backend)), run(fn))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_steps(optimizer: Any, backend: BackendUnderTest) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    data, labels = torch.randn(32, 6), torch.randint(3, (32,))

    def losses(m: Any) -> Tensor:
        opt = optimizer(m.parameters(), lr=1e-2)
        found = []
        for _ in range(5):
            opt.zero_grad()
            loss = F.cross_entropy(m(data), labels)
            loss.backward()
            opt.step()
            found.append(loss.detach())
        return torch.stack(found)

    eager = losses(copy.deepcopy(model))
    got = losses(torch.compile(copy.deepcopy(model), backend=backend))
    torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-5)


# ---- what stays eager: custom, complex, sparse, quantized, data-dependent ------------------------


@torch.library.custom_op("dicp_test::shift", mutates_args=())
def shift(x: Tensor, by: float) -> Tensor:
    return torch.from_numpy(x.detach().numpy() + by)


@shift.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dicp_test::bump", mutates_args=("x",))
def bump(x: Tensor) -> None:
    x.add_(1)


def test_custom_operator_between_compiled_regions(backend: BackendUnderTest) -> None:
    same(lambda x: shift(x.exp() * 2, 1.5).sin() + x, backend, torch.randn(5), fullgraph=True)
    if backend.is_dicp:
        counts = backend.reports()[-1].counts
        assert counts["eager"] >= 1 and counts["compiled"] >= 1


def test_custom_operator_that_mutates(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        bump(y)
        bump(x)
        return y + x

    same(fn, backend, torch.randn(5), fullgraph=True)


def test_complex(backend: BackendUnderTest) -> None:
    same(lambda x: torch.view_as_real(torch.fft.fft(x * 2) * 1j).abs() + 1, backend, torch.randn(8))


def test_sparse(backend: BackendUnderTest) -> None:
    sparse = torch.eye(5).to_sparse()
    dense = torch.randn(5, 3)
    run = torch.compile(lambda d: torch.sparse.mm(sparse, d * 2) + 1, backend=backend)
    compare(run(dense), dense * 2 + 1)


def test_quantized(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Tensor:
        q = torch.quantize_per_tensor(x * 2, 0.1, 0, torch.qint8)
        return q.dequantize() + 1

    same(fn, backend, torch.randn(6))


def test_integer_quantized_matmul(backend: BackendUnderTest) -> None:
    a = torch.randint(-100, 100, (4, 16), dtype=torch.int8)
    b = torch.randint(-100, 100, (16, 8), dtype=torch.int8)
    same(lambda x, y: torch._int_mm(x, y).float() * 0.01, backend, a, b)


@pytest.mark.parametrize("unbacked", [False, True])
def test_data_dependent_shapes(unbacked: bool, backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Any:
        found = torch.nonzero(x > 0)
        picked = torch.masked_select(x, x > 0.5)
        return found + 1, picked * 2, x[x < 0].sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=unbacked):
        run = torch.compile(fn, backend=backend, fullgraph=unbacked)
        for seed in range(3):
            x = torch.randn(20, generator=torch.Generator().manual_seed(seed))
            compare(run(x), fn(x))


def test_parts_of_rows_whose_number_depends_on_data(backend: BackendUnderTest) -> None:
    """In training, whose gradients are scattered into such rows; and written in place."""

    def fn(x: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        part = rows[:, None][..., 1:] * rows[:, 1:].softmax(1)[:, None]
        part[..., 2] = 0.5
        return part.sum((0, 1))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(fn, backend=backend, fullgraph=True)
        for seed in range(3):
            values = torch.randn(20, 6, generator=torch.Generator().manual_seed(seed))
            x, y = (values.clone().requires_grad_() for _ in range(2))
            compare(run(x), fn(y))
            compare(torch.autograd.grad(run(x).sum(), x), torch.autograd.grad(fn(y).sum(), y))


@pytest.mark.parametrize("captured", [False, True])
def test_item(captured: bool, backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * x.sum().item() + x.argmax().item()

    with torch._dynamo.config.patch(capture_scalar_outputs=captured):
        run = torch.compile(fn, backend=backend, fullgraph=captured)
        for _ in range(3):
            x = torch.randn(5)
            compare(run(x), fn(x))


def test_python_control_flow_on_data(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x - 1

    run = torch.compile(fn, backend=backend)
    for x in (torch.ones(4), -torch.ones(4)):
        compare(run(x), fn(x))


# ---- higher-order operators ----------------------------------------------------------------------


def test_cond(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin() * 2, lambda t: t.cos(), (x,)) + 1

    for x in (torch.ones(5), -torch.ones(5)):
        same(fn, backend, x)


def test_while_loop(backend: BackendUnderTest) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def fn(i: Tensor, x: Tensor) -> Any:
        return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 1.5), (i, x))

    same(fn, backend, torch.tensor(0), torch.ones(4))


def test_scan(backend: BackendUnderTest) -> None:
    from torch._higher_order_ops.scan import scan

    def fn(x: Tensor) -> Any:
        return scan(lambda carry, v: (carry + v, (carry * v).clone()), torch.zeros(3), x, dim=0)

    same(fn, backend, torch.randn(6, 3))


@pytest.mark.parametrize("activation", [torch.tanh, torch.sigmoid, torch.relu, torch.exp])
def test_gradient_of_scan(activation: Callable[..., Tensor], backend: BackendUnderTest) -> None:
    """The gradient of an activation reads its result, which the scan returns, too."""
    from torch._higher_order_ops.scan import scan

    def fn(h: Tensor, x: Tensor) -> Any:
        return scan(lambda h, v: (activation(h * 0.5 + v), h * v), h, x, dim=0)

    run = torch.compile(fn, backend=backend)
    for length in (4, 6):
        leaves = torch.randn(3, requires_grad=True), torch.randn(length, 3, requires_grad=True)
        mine, theirs = run(*leaves), fn(*leaves)
        compare(mine, theirs)
        grads = [torch.autograd.grad(sum(y.sum() for y in ys), leaves) for ys in (mine, theirs)]
        compare(*grads)


def test_associative_scan(backend: BackendUnderTest) -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    same(
        lambda x: associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic"),
        backend,
        torch.rand(6, 3) + 0.5,
    )


def test_flex_attention(backend: BackendUnderTest) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    run = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.1),
        backend=backend,
    )
    positions = torch.arange(16)
    bias = (positions[:, None] - positions) * 0.1
    compare(run(q, k, v), F.scaled_dot_product_attention(q, k, v, bias))


# ---- recompilation -------------------------------------------------------------------------------


def test_batch_sizes_need_two_compilations(backend: BackendUnderTest) -> None:
    backend.start_over()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8))
    run = torch.compile(model, backend=backend)
    for batch in (4, 5, 7, 16, 33):
        x = torch.randn(batch, 6)
        compare(run(x), model(x))
    assert backend.frames() <= 2


def test_dynamic_needs_one_compilation(backend: BackendUnderTest) -> None:
    backend.start_over()
    run = torch.compile(lambda x: (x.exp().sum(-1), x.t() @ x), backend=backend, dynamic=True)
    for shape in ((3, 4), (5, 6), (17, 9)):
        x = torch.randn(shape)
        compare(run(x), (x.exp().sum(-1), x.t() @ x))
    assert backend.frames() == 1


def test_mark_dynamic_and_static(backend: BackendUnderTest) -> None:
    backend.start_over()
    run = torch.compile(lambda x: F.gelu(x).mean(-1), backend=backend)
    for n in (4, 9, 12):
        x = torch.randn(n, 7)
        torch._dynamo.mark_dynamic(x, 0)
        compare(run(x), F.gelu(x).mean(-1))
    assert backend.frames() == 1


def test_dtype_changes_after_compile(backend: BackendUnderTest) -> None:
    model = nn.Linear(4, 3)
    run = torch.compile(model, backend=backend)
    compare(run(torch.ones(2, 4)), model(torch.ones(2, 4)))
    for dtype in (torch.float64, torch.bfloat16):
        model.to(dtype)
        x = torch.ones(2, 4, dtype=dtype)
        compare(run(x), model(x))


def test_the_default_dtype_changes_between_compilations(backend: BackendUnderTest) -> None:
    """Also where the second one finds the first one's result on disk."""
    indices = torch.arange(3)
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        torch.compiler.reset()
        same(lambda i: i / 2 + 0.125, backend, indices)


def test_parameters_change_after_compile(backend: BackendUnderTest) -> None:
    model = nn.Linear(4, 3)
    run = torch.compile(model, backend=backend)
    x = torch.randn(2, 4)
    with torch.no_grad():
        run(x)
        model.weight.fill_(2.0)
        compare(run(x), model(x))
        model.weight = nn.Parameter(torch.zeros(3, 4))
        compare(run(x), model(x))
    model.load_state_dict({"weight": torch.ones(3, 4), "bias": torch.zeros(3)})
    compare(run(x), model(x))


def test_train_and_eval_switch(backend: BackendUnderTest) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    run = torch.compile(model, backend=backend)
    x = torch.randn(16, 4)
    run(x).sum().backward()
    model.eval()
    compare(run(x), model(x))
    model.train()
    assert (run(x) == 0).any()


def test_moved_model_fails_or_follows_like_eager(backend: BackendUnderTest) -> None:
    model = nn.Linear(4, 3)
    run = torch.compile(model, backend=backend)
    x = torch.randn(2, 4)
    run(x)
    model.to("meta")
    with pytest.raises(Exception):  # noqa: B017 - mixed devices: whoever notices first
        run(x)
    restored = nn.Linear(4, 3)
    assert restored(x).shape == (2, 3)


# ---- errors like eager's -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [lambda x, y: x // y, lambda x, y: x % y, lambda x, y: torch.div(x, y, rounding_mode="trunc")],
    ids=["floor", "remainder", "trunc"],
)
def test_integer_division_by_zero(fn: Any, backend: BackendUnderTest) -> None:
    x, y = torch.arange(6), torch.tensor([1, 2, 0, 4, 5, 6])
    with pytest.raises(RuntimeError, match="(?i)zero"):
        fn(x, y)
    run = torch.compile(fn, backend=backend)
    with pytest.raises(RuntimeError, match="(?i)zero"):
        run(x, y)
    compare(run(x, y.clamp(min=1)), fn(x, y.clamp(min=1)))


@pytest.mark.parametrize("bad", [7, -8])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: F.embedding(i, x),
        lambda x, i: x.gather(0, i[:, None]),
        lambda x, i: x.index_put((i,), x[:1]),
        lambda x, i: x.scatter_add(0, i[:, None], x[:3]),
    ],
    ids=["index", "index_select", "embedding", "gather", "index_put", "scatter_add"],
)
def test_index_out_of_bounds(fn: Any, bad: int, backend: BackendUnderTest) -> None:
    x, i = torch.randn(7, 3), torch.tensor([0, bad, 2])
    with pytest.raises((IndexError, RuntimeError)):
        fn(x, i)
    run = torch.compile(fn, backend=backend)
    with pytest.raises((IndexError, RuntimeError)):
        run(x, i)
    good = torch.tensor([0, 6, 2])
    compare(run(x, good), fn(x, good))


def test_wrong_shapes_raise(backend: BackendUnderTest) -> None:
    run = torch.compile(lambda a, b: a @ b, backend=backend)
    with pytest.raises(Exception, match="(?i)shape|size"):
        run(torch.randn(3, 4), torch.randn(5, 6))


def test_eager_model_survives_a_compile_failure() -> None:
    def broken(gm: Any, example_inputs: Any) -> Any:
        raise RuntimeError("no compiler today")

    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    expected = model(x)
    with pytest.raises(Exception, match="no compiler today"):
        torch.compile(model, backend=broken)(x)
    assert torch.equal(model(x), expected)
    assert "_compiled_call_impl" not in model.state_dict()


def test_missing_compiler_is_one_clear_error(
    backend: BackendUnderTest, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    if not backend.is_dicp:
        pytest.skip("an error of dicp's backends")
    monkeypatch.setenv("DICP_CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("DICP_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU())
    x = torch.randn(2, 4)
    with pytest.raises(Exception, match="no-such-compiler"):
        torch.compile(model, backend=backend)(x)
    assert model(x).shape == (2, 3)
    torch._dynamo.reset()
    monkeypatch.setenv("DICP_ON_COMPILE_ERROR", "eager")
    with pytest.warns(UserWarning):
        compare(torch.compile(model, backend=backend)(x), model(x))


def test_unknown_option_lists_the_valid_ones(backend: BackendUnderTest) -> None:
    if not backend.is_dicp:
        pytest.skip("an error of dicp's backends")
    with pytest.raises(Exception, match="(?s)fallbck.*fallback"):
        torch.compile(lambda x: x + 1, backend=backend, options={"fallbck": "error"})(torch.ones(3))


def test_forbidden_fallback_names_everything(backend: BackendUnderTest) -> None:
    if not backend.is_dicp:
        pytest.skip("an error of dicp's backends")

    def fn(x: Tensor) -> Tensor:
        return shift(x * 2, 1.0)

    with pytest.raises(Exception, match="dicp_test") as caught:
        torch.compile(fn, backend=backend, options={"fallback": "error"})(torch.ones(3))
    assert "test_robustness.py" in str(caught.value), "the user's line is missing"


# ---- programs ------------------------------------------------------------------------------------


def test_graph_breaks(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        return y.sum(0) * 2

    same(fn, backend, torch.randn(3, 4))


def test_keyword_none_and_nested_inputs(backend: BackendUnderTest) -> None:
    def fn(x: Tensor, *, mask: Tensor | None = None, extra: Any = ()) -> Any:
        y = x if mask is None else x.masked_fill(mask, 0)
        return {"y": y + sum(e["v"] for e in extra)}

    run = torch.compile(fn, backend=backend)
    x = torch.randn(4)
    compare(run(x), fn(x))
    arguments = {"mask": x > 0, "extra": [{"v": torch.ones(4)}, {"v": torch.ones(4)}]}
    compare(run(x, **arguments), fn(x, **arguments))


def test_large_unrolled_graph(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Tensor:
        for i in range(120):
            x = (x * 1.01 + i * 0.001).sin()
        return x

    same(fn, backend, torch.randn(50))


def recurrence(x: Tensor, decay: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for step in range(x.shape[1]):
        state = state * decay + x[:, step]
        states.append(state)
    return torch.stack(states, 1)


def test_gradients_of_a_long_recurrence(backend: BackendUnderTest) -> None:
    """Each step's gradient depends on the next one's, and is written into a tensor of all steps."""
    x, decay = torch.randn(3, 100, 4, requires_grad=True), torch.rand(4, requires_grad=True)
    grad = torch.randn(3, 100, 4)
    result = torch.compile(recurrence, backend=backend)(x, decay)
    wanted = torch.autograd.grad(recurrence(x, decay), (x, decay), grad)
    compare(torch.autograd.grad(result, (x, decay), grad), wanted)


def test_a_long_chain_that_is_read_transposed(backend: BackendUnderTest) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x
        for _ in range(100):
            y = (y - x * 0.5) * x + 0.1
        return torch.cat([y.t(), y.t() * 2], 1) + 1

    same(fn, backend, torch.rand(8, 16) * 0.1)


def test_many_inputs_and_outputs(backend: BackendUnderTest) -> None:
    same(
        lambda *xs: [x * (i + 1) for i, x in enumerate(xs)],
        backend,
        *(torch.randn(4, 3) for _ in range(60)),
    )


def test_threads_share_a_compiled_function(backend: BackendUnderTest) -> None:
    from concurrent.futures import ThreadPoolExecutor

    run = torch.compile(lambda x: (x.exp() + 1).sum(-1), backend=backend)
    inputs = [torch.randn(64, 32) for _ in range(16)]
    run(inputs[0])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, inputs))
    compare(results, [(x.exp() + 1).sum(-1) for x in inputs])


def test_nothing_to_compile(backend: BackendUnderTest) -> None:
    same(lambda x: x, backend, torch.randn(3))
    same(lambda x: x.shape, backend, torch.randn(3, 4))
    same(lambda x: (), backend, torch.randn(3))


def test_subclass_and_parameter_outputs(backend: BackendUnderTest) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.w, x + self.w

    model = Model()
    weight, _ = torch.compile(model, backend=backend)(torch.randn(3))
    assert weight is model.w
