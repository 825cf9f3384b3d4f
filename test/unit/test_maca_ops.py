"""Operator cases on the emulated GPU, which looks for races and for accesses out of range.

A choice of cases that meets every form of kernel; `test/maca_scripts` runs all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import MacaRecorder, record
from support.chosen import cases_named
from support.nvidia import VARIANTS, compile_for_nvidia, kernels_of
from torch import Tensor
from torch.testing import assert_close

import dicp
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import (
    IndexOutOfBoundsError,
    IntegerDivisionByZeroError,
    LaunchError,
    SimulatorWarning,
)
from dicp.target import find_target
from dicp.testing import BackendUnderTest
from dicp.vendor.maca import simulator
from dicp.vendor.maca.units import UNIT, header_texts

pytestmark = pytest.mark.sweep

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "op"))

CHOSEN = {
    "test_pointwise": ("where", "pow_ints"),
    "test_reduction": ("sum_dims", "argmax", "amax_amin", "any_all", "var"),
    "test_normalization": ("layer_norm", "batch_norm_training"),
    "test_scan": ("cumsum",),
    "test_shape": ("cat", "permute"),
    "test_indexing": ("scatter_add", "scatter_reduce_amin", "index_put"),
    "test_embedding": ("embedding",),
    "test_loss": ("cross_entropy",),
    "test_pooling": ("max_pool2d",),
}
"""Names of cases by the file they stand in."""
WAVE_OF_32 = ("sum_dims", "argmax", "layer_norm", "cumsum")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of this file's tests."""
    return tmp_path_factory.mktemp("kernels")


def emulated(kept: Path, **options: Any) -> BackendUnderTest:
    backend = BackendUnderTest("macagraph")
    backend.inner = Backend("maca", cache_dir=kept, maca_checked=True, **options)
    return backend


@pytest.mark.parametrize("case", cases_named(CHOSEN), ids=lambda case: case.name)
def test_operator(case: Any, kept: Path) -> None:
    case.check(emulated(kept), dynamic=case.name in ("softmax", "sum_dims", "cat"))


@pytest.mark.parametrize(
    "case", [c for c in cases_named(CHOSEN) if c.name in WAVE_OF_32], ids=lambda case: case.name
)
def test_operator_in_waves_of_32(case: Any, kept: Path) -> None:
    case.check(emulated(kept, maca_wave=32), dynamic=False)


def test_every_kernel_compiles_for_nvidia(kept: Path) -> None:
    for case in cases_named({"test_reduction": ("sum_dims", "argmax"), "test_scan": ("cumsum",)}):
        case.check(emulated(kept), dynamic=False)
    texts = [unit.read_text() for unit in kept.rglob(UNIT)]
    found = {name: body for text in texts for name, body in kernels_of(text).items()}
    assert len(found) > 50
    for defines in VARIANTS:
        compile_for_nvidia(found, defines)


def compiled(fn: Callable[..., Any], kept: Path, **options: Any) -> Any:
    torch._dynamo.reset()
    backend = Backend("maca", cache_dir=kept, maca_checked=True)
    return torch.compile(fn, backend=backend, **options)


def draws(x: Tensor) -> tuple[Tensor, ...]:
    return (
        F.dropout(x, 0.3), torch.rand_like(x), torch.randn_like(x), torch.rand_like(x.double()),
        torch.randint(0, 1000, (64,)),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(33, 7), (6, 64)], ids=["apart", "adjacent"])
def test_random_numbers_are_those_of_the_host(
    shape: tuple[int, int], dtype: torch.dtype, kept: Path
) -> None:
    x = torch.ones(shape, dtype=dtype)
    torch.manual_seed(11)
    device = compiled(draws, kept)(x)
    torch._dynamo.reset()
    torch.manual_seed(11)
    host = torch.compile(draws, backend=Backend("cpu", cache_dir=kept))(x)
    for one, other in zip(host, device, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_other_sizes_need_no_other_kernel(kept: Path) -> None:
    fn = compiled(lambda x: (x.softmax(-1), x.sum(0)), kept, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, columns in ((3, 5), (64, 700), (200, 17), (2, 9000)):
            x = torch.randn(rows, columns)
            for found, wanted in zip(fn(x), (x.softmax(-1), x.sum(0)), strict=True):
                assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_an_index_out_of_range_names_operator_and_line(kept: Path) -> None:
    fn = compiled(lambda x, i: x[i] + 1, kept)
    with pytest.raises(IndexOutOfBoundsError, match=r"index.*test_maca_ops\.py:\d+"):
        fn(torch.ones(4), torch.tensor([1, 4]))


def test_a_division_by_zero_names_operator_and_line(kept: Path) -> None:
    fn = compiled(lambda x, y: x // y, kept)
    with pytest.raises(IntegerDivisionByZeroError, match=r"test_maca_ops\.py:\d+"):
        fn(torch.ones(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))


def test_a_fault_that_the_emulation_finds_names_kernel_operator_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waves of a row do not wait for each other's sums."""
    texts = dict(header_texts())
    stored = "shared[d_thread() / D_WAVE] = x;\n"
    waits = f"{stored}    d_barrier();\n"
    assert waits in texts["device.h"]
    texts["device.h"] = texts["device.h"].replace(waits, stored)
    monkeypatch.setattr(simulator, "header_texts", lambda: texts)
    fn = compiled(lambda x: x.sum(-1), tmp_path)
    wanted = r"(?s)kernel sum_\w+ cannot be run: a race: thread \d.*aten\.sum.*test_maca_ops\.py:\d"
    with pytest.raises(LaunchError, match=wanted):
        fn(torch.ones(4, 5000))


def test_dtypes_without_kernels_run_eagerly_with_the_reason(kept: Path) -> None:
    def fn(x: Tensor) -> Tensor:
        return (x.to(torch.uint16) ^ 3).float() + 1

    x = torch.arange(8.0)
    assert torch.equal(compiled(fn, kept)(x), fn(x))
    report = dicp.explain(fn, x, backend="maca")
    reasons = {n.op: n.reason for r in report.reports for n in r.nodes if n.decision == "eager"}
    assert "aten.bitwise_xor.Scalar" in reasons and "aten.add.Tensor" not in reasons
    assert set(reasons.values()) == {"dtype torch.uint16 is not generated for maca"}
    assert "dtype torch.uint16 is not generated for maca" in str(report)


def test_profiles_and_explanations_name_operators_and_lines(kept: Path, tmp_path: Path) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.softmax(x * 2, -1).sum(0)

    x = torch.randn(16, 16)
    run = compiled(fn, kept)
    run(x)
    with torch.profiler.profile(record_shapes=True) as profile:
        run(x)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [e["args"] for e in events if "operators" in e.get("args", {})]
    named = " ".join(kernel["operators"] for kernel in kernels)
    assert "softmax" in named and "sum" in named
    assert all("test_maca_ops.py" in kernel["source"] for kernel in kernels)
    text = str(dicp.explain(fn, x, backend="maca"))
    assert "kernel " in text and "aten._softmax.default" in text and "test_maca_ops.py:" in text


LIBRARY_CALLS: dict[str, Callable[[Tensor], Any]] = {
    "singular values": lambda x: torch.linalg.svdvals(x),
    "factors": lambda x: torch.linalg.qr(x)[1],
    "determinant": lambda x: torch.linalg.det(x),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x @ x.mT),
    "exponential": lambda x: torch.matrix_exp(x),
    "triangular": lambda x: torch.linalg.solve_triangular(x, x, upper=True),
    "transforms": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2),
    "bilinear": lambda x: F.bilinear(x, x, x.expand(3, -1, -1)),
    "special functions": lambda x: (
        torch.special.i0(x), torch.special.ndtri(x.sigmoid()), torch.polygamma(1, x.exp()),
        torch.special.bessel_j0(x), torch.igamma(x.exp(), x.exp()),
    ),
    "windows": lambda x: torch.as_strided_scatter(x, x[0], (4,), (2,), 1),
    "fake quantization": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255),
    "checks": lambda x: F.one_hot(x.argmax(-1), 4),
    "other dtype": lambda x: x.view(torch.int32) + 1,
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARY_CALLS)
def test_libraries_of_the_device_are_no_eager_calls(name: str) -> None:
    target = record(LIBRARY_CALLS[name], torch.rand(4, 4) + torch.eye(4), target=MacaRecorder())
    nodes = [node for report in target.reports for node in report.nodes]
    assert nodes and not [node for node in nodes if node.decision == "eager"]


def test_the_emulation_warns_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_target("maca"), "_warned", False)
    with pytest.warns(SimulatorWarning, match="an emulation of the GPU") as seen:
        compiled(lambda x: x + 1, kept)(torch.ones(3))
        compiled(lambda x: x + 2, kept)(torch.ones(3))
    assert len([w for w in seen if issubclass(w.category, SimulatorWarning)]) == 1


def test_doctor_says_what_runs_in_the_place_of_the_chip() -> None:
    from dicp.config import Config

    target = find_target("maca")
    checks = {c.name: c for c in target.doctor(Config.from_env({}, target.options))}
    assert "/opt/maca" in checks["mxcc"].detail and "MACA_PATH" in checks["mxcc"].fix
    assert checks["simulator"].ok and checks["build"].ok
    asked = Config.from_env({}, target.options).with_options({"runs_on": "device"})
    checks = {c.name: c for c in target.doctor(asked)}
    assert not any(checks[name].ok for name in ("mxcc", "runtime library", "simulator"))
