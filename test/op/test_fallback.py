"""What no generated code covers: complex, FFT, linear algebra, sparse, quantized, in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dicp.testing import T, op

X = (6, 16)
SQUARE = (5, 5)
F32 = (torch.float32,)
F32_F64 = (torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
ONE = ("contiguous",)


def well_conditioned(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT + 5 * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def other(name: str, fn: Any, *specs: Any, **options: Any) -> Any:
    options.setdefault("dtypes", F32_F64)
    options.setdefault("layouts", ONE)
    return op(name, fn, *specs, **options)


CASES = [
    other("rfft", lambda x: torch.view_as_real(torch.fft.rfft(x)) * 2, X),
    other("irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2), X, fixed=(16,)),
    other("fft", lambda x: torch.fft.fft(x), X, dtypes=COMPLEX),
    other("fft2", lambda x: torch.fft.fft2(x).abs(), X),
    other(
        "stft",
        lambda x: torch.stft(x, 8, 4, window=torch.ones(8), return_complex=True).abs() + 1,
        (2, 64),
        dtypes=F32,
    ),
    other("fftshift", lambda x: torch.fft.fftshift(x), X),
    other(
        "complex_arithmetic",
        lambda x, y: (x * y + x.conj(), x / y, x.abs(), x.real + y.imag),
        X,
        X,
        dtypes=COMPLEX,
    ),
    other("complex_matmul", torch.mm, (5, 7), (7, 4), dtypes=COMPLEX),
    other(
        "complex_and_real", lambda x: (torch.view_as_real((x + 1j) * x) + 1).sum(), X, dtypes=F32
    ),
    other("angle", lambda x: (x.angle(), torch.polar(x.abs(), x.angle()).real), X, grad=False),
    other("svd", lambda x: torch.linalg.svdvals(x), SQUARE),
    other("qr", lambda x: torch.linalg.qr(x)[1].abs() + 1, SQUARE),
    other("inverse", lambda x: torch.linalg.inv(well_conditioned(x)) * 2, SQUARE),
    other("solve", lambda x, y: torch.linalg.solve(well_conditioned(x), y) + 1, SQUARE, (5, 3)),
    other("cholesky", lambda x: torch.linalg.cholesky(well_conditioned(x)) + 1, SQUARE),
    other("det", lambda x: torch.linalg.det(well_conditioned(x)), SQUARE),
    other("eigh", lambda x: torch.linalg.eigvalsh(well_conditioned(x)) + 1, SQUARE),
    other(
        "triangular_solve",
        lambda x, y: torch.linalg.solve_triangular(well_conditioned(x).tril(), y, upper=False),
        SQUARE,
        (5, 3),
    ),
    other("matrix_exp", lambda x: torch.matrix_exp(x * 0.1), SQUARE),
    other(
        "between_compiled_regions",
        lambda x: (torch.linalg.svdvals(x.exp() + 1) + 1).relu().sum(),
        SQUARE,
    ),
    other(
        "fake_quantize",
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255) + 1,
        X,
        dtypes=F32,
        fullgraph=False,
        graphs=6,
    ),
    other("polygamma", lambda x: torch.polygamma(1, x) * 2, T(X, 0.5, 4), grad=False),
    other("igamma", lambda x, y: torch.igamma(x, y) + 1, T(X, 0.5, 4), T(X, 0.5, 4), grad=False),
    other("bessel", lambda x: torch.special.bessel_j0(x) * 2, X, grad=False),
    other("cross", lambda x, y: torch.linalg.cross(x, y), (6, 3), (6, 3), fixed=(3,)),
    other(
        "ctc_loss",
        lambda x: torch.nn.functional.ctc_loss(
            x.log_softmax(-1),
            torch.tensor([[1, 2], [2, 1]]),
            torch.tensor([6, 6]),
            torch.tensor([2, 2]),
        ),
        (6, 2, 5),
        dtypes=F32,
        fixed=(6, 2, 5),
        fullgraph=False,
        graphs=6,
    ),
    other(
        "lstm_cell",
        lambda x, h, c, w, u: torch.lstm_cell(x, (h, c), w, u),
        (3, 4),
        (3, 5),
        (3, 5),
        (20, 4),
        (20, 5),
        dtypes=F32,
        fixed=(4, 5, 20),
    ),
]


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)


def test_pseudoinverse_of_complex_matrices_in_the_first_call(backend: Any, dynamic: bool) -> None:
    """AOTAutograd runs it under a dispatch mode, in which PyTorch's own gives another result."""
    x = torch.randn(2, 5, 3, dtype=torch.complex64)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.linalg.pinv(x), torch.linalg.pinv(x, atol=0.5), torch.pinverse(x, 0.5)

    compiled = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
    torch.testing.assert_close(compiled(x), fn(x))
    assert compiled(x[:, :0])[0].shape == (2, 3, 0)


def test_polygamma_in_place(backend: Any) -> None:
    """AOTAutograd does not make it functional."""
    x = torch.rand(3, 4) + 0.5
    y = x.clone()
    compiled = torch.compile(lambda x: x.polygamma_(1) + 1, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), y.polygamma_(1) + 1)
    torch.testing.assert_close(x, y)


def test_effects_come_in_order(backend: Any, dynamic: bool) -> None:
    """PyTorch passes tokens from one such call to the next; kernels run between them."""
    noted: list[tuple[int, float]] = []

    @torch.library.custom_op("fallback_test::note", mutates_args=())
    def note(x: torch.Tensor, number: int) -> torch.Tensor:
        noted.append((number, float(x.sum())))
        return x + 1

    note.register_fake(lambda x, number: torch.empty_like(x))
    note.register_effect(torch.library.EffectType.ORDERED)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = note(x * 2, 1), note(x.relu() - 1, 2)
        return note(first * second, 3) * 3, note(x, 4)

    compiled = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
    for rows in (4, 6) if dynamic else (4,):
        x = torch.randn(rows, 3)
        noted.clear()
        got, mine = compiled(x), list(noted)
        noted.clear()
        torch.testing.assert_close(got, fn(x))
        assert [number for number, _ in mine] == [1, 2, 3, 4]
        torch.testing.assert_close(mine, noted)


def test_factorizations_refuse_what_eager_refuses(backend: Any, dynamic: bool) -> None:
    """Their check is a call with an effect, whose result nothing reads."""
    compiled = torch.compile(
        lambda x: torch.linalg.inv(x + 1) * 2, backend=backend, dynamic=dynamic
    )
    good = 3 * torch.eye(4)
    torch.testing.assert_close(compiled(good), torch.linalg.inv(good + 1) * 2)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(torch.zeros(4, 4))
    if backend.is_dicp:  # the report names what is called, not how PyTorch orders it alone
        nodes = [node.op for report in backend.reports() for node in report.nodes]
        assert "with_effects(aten._linalg_check_errors.default)" in nodes


def test_meta_tensors_have_a_shape_alone(backend: Any, dynamic: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU()).to("meta")
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    result = compiled(torch.empty(4, 6, device="meta"))
    assert (result.shape, result.device.type) == ((4, 5), "meta")
    result.sum().backward()
    assert all(p.grad is not None and p.grad.device.type == "meta" for p in module.parameters())
