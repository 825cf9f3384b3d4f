"""What no generated code covers: complex, FFT, linear algebra, sparse, quantized, in one graph."""

from __future__ import annotations

from typing import Any

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
