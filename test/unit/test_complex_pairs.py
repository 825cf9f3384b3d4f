"""Complex arithmetic on pairs of real numbers: values, strides, gradients, and what stays eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dicp.compare import Rule, check_tensor
from dicp.dynamo_bridge.backend import Backend

BORDER = {"aten.view_as_real.default", "aten.view_as_complex.default"}
"""What a graph's complex inputs and results become pairs and complex values by."""


def pairs(*shape: int) -> Tensor:
    return torch.randn(*shape, 2, generator=torch.Generator().manual_seed(len(shape)))


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding by a table of complex numbers."""
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turns = table[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(z * turns).flatten(3)


def mixed(x: Tensor, y: Tensor) -> Any:
    z, w = torch.view_as_complex(x), torch.view_as_complex(y)
    moved = (z * w.conj() + z / 2 - w)[1:].transpose(0, 1)
    joined = torch.cat([z, w]).unsqueeze(1) * x[..., 0].sum()
    picked = z[torch.tensor([2, 0])].select(1, -1).expand(3, 2)
    polar = torch.polar(x[..., 0].abs(), y[..., 1]) + 1j
    parts = [moved, polar, -picked, z.permute(1, 0), (x[..., 0] + z).sum(1)]
    parts += [z @ w.t(), z / (w + 2), torch.rsub(3 - z, w), 2j - x[..., 0]]
    return (z * 2j).abs(), joined, *map(torch.view_as_real, parts)


def broadcast(x: Tensor, y: Tensor, z: Tensor) -> Any:
    return [torch.view_as_real(w) for w in (torch.complex(x, y), torch.complex(y, z))]


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "rotated": (rotated, [torch.randn(2, 3, 4, 8), torch.view_as_complex(pairs(16, 4))]),
    "mixed": (mixed, [pairs(3, 4), pairs(3, 4) + 1]),
    "broadcast": (broadcast, [torch.randn(4, 5), torch.randn(5), torch.randn(3, 1, 5)]),
    "double": (mixed, [pairs(3, 4).double(), pairs(3, 4).double() + 1]),
}


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def gradients(results: Any, inputs: list[Tensor]) -> list[Tensor]:
    real = [torch.view_as_real(t) if t.is_complex() else t for t in leaves(results)]
    wanted = [x for x in inputs if x.requires_grad]
    return list(torch.autograd.grad([(t * t).sum() for t in real], wanted))


@pytest.mark.sweep
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_but_the_border_is_complex(name: str, symbolic: bool) -> None:
    fn, inputs = CASES[name]
    torch._dynamo.reset()
    backend = Backend("cpu", cache=False)
    compiled = torch.compile(fn, backend=backend, dynamic=symbolic)
    for train in (False, True):
        given = [x.clone().requires_grad_(train and not x.is_complex()) for x in inputs]
        got, expected = compiled(*given), fn(*given)
        torch.testing.assert_close(got, expected)
        for mine, theirs in zip(leaves(got), leaves(expected), strict=True):
            assert mine.stride() == theirs.stride()
        if train:
            found, reference = gradients(got, given), gradients(expected, given)
            torch.testing.assert_close(found, reference)
    eager = {n.op for report in backend.reports for n in report.nodes if n.decision == "eager"}
    assert eager <= BORDER


INFINITE = torch.tensor([complex(torch.inf, 1), complex(2, -torch.inf), complex(0, torch.nan)])
EXTREME = torch.tensor([0j, 2e38 - 2e38j, 1e-38 + 0j, complex(torch.inf, 1), complex(-0.0, 3)])
VALUES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "real times number": (lambda x: x * 1j, [torch.randn(3, 4)]),
    "number times real": (
        lambda x, z: 1j * x + z,
        [torch.randn(3), torch.view_as_complex(pairs(3))],
    ),
    "complex alpha": (lambda z: torch.add(z, z * 2, alpha=1j), [torch.view_as_complex(pairs(3))]),
    "sum without dimensions": (lambda x: torch.complex(x, x).sum(0), [torch.randn(())]),
    "squeezed without dimensions": (lambda x: torch.complex(x, x).squeeze(0), [torch.randn(())]),
    "turned without dimensions": (lambda x: torch.complex(x, x).transpose(0, 0), [torch.randn(())]),
    "infinite times real": (lambda z, x: z * x, [INFINITE, torch.tensor(2.0)]),
    "infinite times number": (lambda z: z * 2.0, [INFINITE]),
    "numbers less infinite": (lambda z: (3 - z, 2j - z, torch.rsub(z, 1.5, alpha=2)), [INFINITE]),
    "infinite by real": (lambda z, x: z / x, [INFINITE, torch.tensor([1.0, 2.0, -4.0])]),
    "quotient": (
        lambda z, w: (z / w, w / (z + 1), 2.0 / w),
        [torch.view_as_complex(pairs(3, 4)), torch.view_as_complex(pairs(4, 1)[:, 0])],
    ),
    "quotient of extremes": (
        lambda z, w: z / w,
        [torch.tensor([1 + 2j, -3e38 + 1e38j, 0j]).unsqueeze(1), EXTREME],
    ),
    "products": (
        lambda z, w: (torch.mm(z, w), torch.bmm(z[None], w[None].conj())),
        [torch.view_as_complex(pairs(3, 4)), torch.view_as_complex(pairs(4, 5))],
    ),
    "conversions": (
        lambda x, z: (x.to(torch.complex64) * z, z.to(torch.complex128) + 1),
        [torch.randn(3), torch.view_as_complex(pairs(3))],
    ),
    "zeros, then copied": (
        lambda z: z.new_zeros(4, 3).copy_(z) * 2,
        [torch.view_as_complex(pairs(3))],
    ),
    "joined, then scaled": (
        lambda z, w: torch.cat([z, w]) * 2,
        [torch.view_as_complex(pairs(n)) for n in (3, 2)],
    ),
    "a range of symbolic length": (
        lambda z: z[: z.shape[0] // 2] * 2j,
        [torch.view_as_complex(pairs(6))],
    ),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_of_eager(name: str, symbolic: bool) -> None:
    fn, given = VALUES[name]
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=Backend("cpu", cache=False), dynamic=symbolic)
    torch.testing.assert_close(compiled(*given), fn(*given), equal_nan=True)


@pytest.mark.parametrize(
    "fn",
    [lambda z: torch.view_as_real(z.exp() * z), lambda z: torch.view_as_real(z / z.tan())],
    ids=["exponential", "tangent"],
)
def test_values_that_meet_an_operator_without_pairs_stay_complex(fn: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    backend = Backend("cpu", cache=False)
    z = torch.view_as_complex(pairs(3, 4))
    torch.testing.assert_close(torch.compile(fn, backend=backend)(z), fn(z))
    (report,) = backend.reports
    assert all(node.decision == "eager" for node in report.nodes)


def spectrum(x: Tensor) -> Tensor:
    """Fourier transforms around complex arithmetic, as of a filter."""
    found = torch.fft.rfft(x * 2)
    return torch.fft.irfft(found * found.conj() / (found.abs() + 1), n=x.shape[-1]).relu()


def low_pass(x: Tensor) -> Tensor:
    """As of a Fourier neural operator: some frequencies are scaled, the others are zero."""
    found = torch.fft.rfft2(x, dim=(1, 2))
    kept = torch.zeros(*found.shape, dtype=found.dtype)
    kept[:, :2, :2] = found[:, :2, :2] * torch.full((2, 2, 1), 2 - 1j)
    rest = torch.zeros_like(found)
    rest[:, -2:] = found[:, -2:] * x.sum().to(found.dtype)
    return torch.fft.irfft2(kept + rest, s=x.shape[1:3], dim=(1, 2)).square()


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("fn", "shape"), [(spectrum, (4, 16)), (low_pass, (2, 6, 6, 3))])
@pytest.mark.parametrize("target", ["cpu", "maca"])
def test_transforms_of_complex_values_are_called_between_pairs(
    target: str, fn: Callable[[Tensor], Tensor], shape: tuple[int, ...], symbolic: bool
) -> None:
    torch._dynamo.reset()
    backend = Backend(target, cache=False)
    x = torch.randn(shape).requires_grad_()
    got = torch.compile(fn, backend=backend, dynamic=symbolic)(x)
    torch.testing.assert_close(got, fn(x))
    assert got.stride() == fn(x).stride()
    (mine,), (theirs,) = (torch.autograd.grad(y.sum(), x) for y in (got, fn(x)))
    torch.testing.assert_close(mine, theirs)
    nodes = [node for report in backend.reports for node in report.nodes]
    called = {node.op for node in nodes if node.decision in ("eager", "library")} - BORDER
    assert called == {f"aten._fft_{kind}.default" for kind in ("r2c", "c2r", "c2c")}
    assert target == "cpu" or not [node for node in nodes if node.decision == "eager"]


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "reshape": lambda z: z.reshape(z.shape[0] // 5, 5, 4),
    "split": lambda z: (z.tensor_split(2, 1), z * 2),
    "expand": lambda z: z[None].expand(z.shape[0] - 3, -1, -1),
    "of a computed one": lambda z: [(w := z * 2j).flatten(), w.view(-1, 2)],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("target", ["cpu", "ascend"])
def test_views_of_complex_values_of_symbolic_sizes(name: str, target: str) -> None:
    """AOTAutograd makes those of inputs anew, like the graph's results."""
    fn = VIEWS[name]
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=Backend(target, cache=False), dynamic=True)
    for length, wanted in ((10, False), (15, True)):
        z = torch.view_as_complex(pairs(length, 4)).requires_grad_(wanted)
        mine, theirs = (torch.utils._pytree.tree_leaves(f(z)) for f in (compiled, fn))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
            shared = [
                t.untyped_storage().data_ptr() == z.untyped_storage().data_ptr() for t in (a, b)
            ]
            assert shared[0] == shared[1]
        if wanted:
            (got,), (right,) = (torch.autograd.grad(ys[0].abs().sum(), z) for ys in (mine, theirs))
            torch.testing.assert_close(got, right)


CONJUGATES: dict[str, Callable[[Tensor], Any]] = {
    "conjugate": lambda z: ((z * z.conj()).real, z.exp().real),
    "negative": lambda z: ((z * torch._neg_view(z)).real, z.exp().real),
}


@pytest.mark.parametrize("name", CONJUGATES)
def test_saved_conjugates_of_views_of_real_tensors(name: str) -> None:
    """Eager marks them by a bit of the tensor: memory holds what they are the conjugate of."""
    fn = CONJUGATES[name]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: fn(torch.view_as_complex(x)), backend=Backend("cpu", cache=False)
    )
    x = pairs(3, 4).requires_grad_()
    for mine, theirs in zip(compiled(x), fn(torch.view_as_complex(x)), strict=True):
        torch.testing.assert_close(mine, theirs)
        (got,), (right,) = (
            torch.autograd.grad(result.abs().sum(), x, retain_graph=True)
            for result in (mine, theirs)
        )
        torch.testing.assert_close(got, right)


MARKED: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugate": Tensor.conj, "negative": torch._neg_view,
    "both": lambda z: torch._neg_view(z.conj()),
}  # fmt: skip


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("marked", [False, True], ids=["plain gradient", "marked gradient"])
def test_gradients_of_results_that_are_marked(name: str, marked: bool) -> None:
    """They are traced with the bits of the results, and given with any."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.view_as_complex(x)
        return MARKED[name](z.imag + z), z.sin().real

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=Backend("cpu", cache=False))
    x, grad = pairs(3, 4).requires_grad_(), torch.view_as_complex(pairs(1, 3, 4)[0])
    grads = MARKED[name](grad) if marked else grad, torch.ones(3, 4)
    got, right = (torch.autograd.grad(f(x), x, grads) for f in (compiled, fn))
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_products_and_differences_are_rounded_apart(dtype: torch.dtype) -> None:
    """Nothing is contracted, whether it is in a vector or behind the last one."""
    for count in (7, 1000):
        z, w = torch.randn(2, count, dtype=dtype)
        torch._dynamo.reset()
        compiled = torch.compile(torch.mul, backend=Backend("cpu", cache=False))
        real, imaginary = z.real * w.real - z.imag * w.imag, z.real * w.imag + z.imag * w.real
        assert torch.equal(compiled(z, w), torch.complex(real, imaginary))


def test_inputs_marked_as_negatives() -> None:
    """`imag` toggles the bit that marks a tensor as the negative of what its memory holds."""
    z = torch._neg_view(torch.view_as_complex(pairs(3, 4)))
    fn = lambda z: z.conj().imag + z  # noqa: E731
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend=Backend("cpu", cache=False))(z), fn(z))


def test_results_marked_as_conjugates() -> None:
    """The bit of a computed result is eager's: `view_as_real` takes no marked tensor."""

    def fn(z: Tensor) -> tuple[Tensor, ...]:
        return (z * 2).conj(), (z * 3).mH, (z + 1).conj() * z, torch.fft.ifft(z.real)

    z = torch.view_as_complex(pairs(3, 4))
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=Backend("cpu", cache=False))
    for mine, theirs in zip(compiled(z), fn(z), strict=True):
        assert (mine.is_conj(), mine.stride()) == (theirs.is_conj(), theirs.stride())
        torch.testing.assert_close(mine, theirs)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "conj": Tensor.conj, "neg": Tensor.neg, "adjoint": Tensor.adjoint,
    "exp": lambda z: (z / (z.abs() + 1)).exp(), "abs": lambda z: z * z.conj() / (z.abs() + 1),
    "imag": lambda z: z.conj().imag + z, "turn": lambda z: z * 2j,
    "parts": lambda z: torch.complex(z.imag, z.real), "square": lambda z: (z * z.conj()).real + z,
    "rows": lambda z: torch.cat([z.conj(), z])[1:4], "sum": lambda z: z.sum(0) + z,
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda z, w: z + w.conj(), "mul": torch.mul, "mm": lambda z, w: z @ w.mH,
    "complex": lambda z, w: torch.complex(z.real, w.imag),
}  # fmt: skip
RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda z: z, "conj": Tensor.conj, "imag": lambda z: z.conj().imag, "abs": Tensor.abs,
    "sin": lambda z: (z / (z.abs() + 1)).sin().real,
}  # fmt: skip
OPERANDS = st.integers(0, 7)
STEPS = st.tuples(st.sampled_from([*UNARY, *BINARY]), OPERANDS, OPERANDS)
ENDS = st.tuples(st.sampled_from([*RESULTS]), OPERANDS)


@pytest.mark.sweep
@settings(max_examples=20, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=5), st.lists(ENDS, min_size=1, max_size=3),
       st.booleans())  # fmt: skip
def test_random_programs(steps: list[Any], ends: list[Any], of_pairs: bool) -> None:
    """Values and gradients of operators with rows for pairs and without, of views and copies."""

    def program(*given: Tensor) -> list[Tensor]:
        values = [torch.view_as_complex(x) if of_pairs else x for x in given]
        for name, first, second in steps:
            z, w = values[first % len(values)], values[second % len(values)]
            values.append(UNARY[name](z) if name in UNARY else BINARY[name](z, w))
        return [RESULTS[name](values[k % len(values)]) for name, k in ends]

    def run(fn: Callable[..., list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype) for x in (pairs(3, 3), pairs(3, 3, 1)[..., 0, :])]
        inputs = [x if of_pairs else torch.view_as_complex(x) for x in inputs]
        inputs = [x.clone().requires_grad_() for x in inputs]
        results = fn(*inputs)
        loss = torch.stack([result.abs().square().sum() for result in results]).sum()
        return [*results, *torch.autograd.grad(loss, inputs, materialize_grads=True)]

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=Backend("cpu", cache=False))
    for mine, exact, theirs in zip(
        run(compiled, torch.float32), run(program, torch.float64), run(program, torch.float32),
        strict=True,
    ):  # fmt: skip
        assert not check_tensor(mine, theirs, exact, Rule(strides=False, floor=4.0))
