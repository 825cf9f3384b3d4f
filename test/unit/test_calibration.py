"""Which library multiplies: measured per class of shapes, decided alike under noise, and shown."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_routines import check
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dicp import explain
from dicp.cache import Cache
from dicp.compare import assert_matches
from dicp.config import Config
from dicp.loop.runtime.native import Libraries
from dicp.vendor.cpu import calibration, target, toolchain
from dicp.vendor.cpu.calibration import (
    PROBLEMS,
    ShapeClass,
    Verdict,
    decide,
    shape_class,
    verdict,
)
from dicp.vendor.cpu.routines import product
from dicp.vendor.cpu.thresholds import LIBRARY_MARGIN
from dicp.vendor.cpu.toolchain import cache_bytes
from dicp.vendor.cpu.trial import Trial
from dicp.vendor.cpu.units import Units

Clock = Callable[[float, float], tuple[Callable[[], None], Callable[[], None]]]


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    calibration._measured.cache_clear()
    yield
    calibration._measured.cache_clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Two ways of computing, of which BLAS takes `ratio` times as long, with noise of `spread`."""

    def make(ratio: float, spread: float) -> tuple[Callable[[], None], Callable[[], None]]:
        now, noise = [0.0], random.Random(0)
        monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])

        def way(seconds: float) -> Callable[[], None]:
            def run() -> None:
                now[0] += seconds * noise.lognormvariate(0, spread)

            return run

        return way(1e-3 * ratio), way(1e-3)

    return make


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.2])
@pytest.mark.parametrize(
    ("ratio", "model", "library"),
    [
        (2.0, "another vendor|fpu", "onednn"), (0.95, "another vendor|fpu", "blas"),
        (1.05, "another vendor|fpu", "blas"), (2.0, "AuthenticAMD|avx512f", "onednn"),
        (1.05, "AuthenticAMD|avx512f", "onednn"), (0.6, "AuthenticAMD|avx512f", "blas"),
        (1.05, "AuthenticAMD|avx2", "blas"),
    ],
)  # fmt: skip
def test_machines_get_their_library_under_noise(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, ratio: float, model: str, library: str,
    spread: float,
) -> None:  # fmt: skip
    """Zen 4 has ratios of 2 and 1.1, Sapphire Rapids one of 0.95: never a matter of the moment."""
    monkeypatch.setattr(calibration, "cpu_model", lambda: model)
    ways = clock(ratio, spread)
    verdicts = [decide(*ways) for _ in range(50)]
    assert {v.library for v in verdicts} == {library}
    assert sum(v.stable for v in verdicts) >= 30
    assert all(v.low <= v.median <= v.high for v in verdicts)


@pytest.mark.parametrize(
    ("model", "library"),
    [
        ("AuthenticAMD|a name|avx2 avx512f", "onednn"), ("AuthenticAMD|a name|avx2", "blas"),
        ("GenuineIntel|a name|avx2 avx512f", "blas"),
    ],
)  # fmt: skip
def test_what_stays_unstable_follows_the_table_and_is_not_kept(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, library: str
) -> None:
    monkeypatch.setattr(calibration, "cpu_model", lambda: model)
    ways = clock(LIBRARY_MARGIN[library], 0.5)
    found = decide(*ways)
    assert (found.library, found.stable) == (library, False) and "unstable" in str(found)
    monkeypatch.setattr(calibration, "has_onednn_linear", lambda: True)
    monkeypatch.setattr(calibration, "decide", lambda blas, onednn: found)
    cache = Cache.open(Config(cache_dir=tmp_path))
    assert verdict(cache, "medium") == found
    calibration._measured.cache_clear()
    monkeypatch.setattr(calibration, "decide", lambda *_: Verdict("onednn", 1.9, 2.0, 2.1))
    assert verdict(cache, "medium").stable
    calibration._measured.cache_clear()
    monkeypatch.setattr(calibration, "decide", lambda *_: found)
    assert verdict(cache, "medium").stable, "a stable one is read from the cache"
    assert not verdict(cache, "large").stable, "each class has its own"


def test_each_number_of_threads_and_each_rule_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = iter(Verdict("onednn", 1.9, 2.0 + turn, 9.0) for turn in range(9))
    monkeypatch.setattr(calibration, "has_onednn_linear", lambda: True)
    monkeypatch.setattr(calibration, "decide", lambda *_: next(found))
    cache = Cache.open(Config(cache_dir=tmp_path))
    medians = []
    for threads in (1, 2, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        medians.append(verdict(cache, "medium").median)
    monkeypatch.setattr(calibration, "LIBRARY_MARGIN", {"blas": 1.1, "onednn": 0.9})
    assert [*medians, verdict(cache, "medium").median] == [2.0, 3.0, 2.0, 4.0]
    assert calibration.tiles_key("large", "one") != calibration.tiles_key("large", "another")


def test_libraries_are_measured_on_real_tensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compilation runs under a mode in which tensors compute nothing."""
    seen: list[Tensor] = []

    def product(x: Tensor, w: Tensor) -> Tensor:
        seen.append(x @ w.t())
        return seen[-1]

    monkeypatch.setattr(calibration, "by_blas", product)
    monkeypatch.setattr(calibration, "by_onednn", product)
    state = torch.get_rng_state()
    with FakeTensorMode():
        verdict(Cache.open(Config(cache_dir=tmp_path)), "few rows")
    assert torch.equal(state, torch.get_rng_state()), "a program draws what it draws elsewhere"
    rows, _, columns = PROBLEMS["few rows"]
    assert seen and not any(isinstance(y, FakeTensor) for y in seen)
    assert all(y.shape == (rows, columns) and torch.isfinite(y).all() for y in seen)


def test_classes_of_shapes() -> None:
    assert all(shape_class(*sizes) == which for which, sizes in PROBLEMS.items())
    rows = torch.fx.experimental.symbolic_shapes.ShapeEnv().create_unbacked_symint()
    assert shape_class(rows, 4096, 4096) == "medium"
    assert shape_class(1, 1 << 20, 1 << 20) == "few rows"


def mixed(x: Tensor, w: Tensor, q: Tensor) -> Tensor:
    hidden = F.gelu(F.linear(x, w))
    return F.scaled_dot_product_attention(q, q, q).sum() + (hidden @ w).sum()


@pytest.mark.usefixtures("shared_builds")
@pytest.mark.parametrize("library", ["blas", "onednn"])
def test_only_plain_products_follow_the_measured_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str
) -> None:
    """Attention and products with an activation are ours on every machine with wide vectors."""
    found = Verdict(library, 0.9, 1.0, 1.1)  # type: ignore[arg-type]
    monkeypatch.setattr(target, "verdict", lambda cache, which: found)
    features = "avx2 amx_tile avx512f avx512_bf16"
    monkeypatch.setattr(toolchain, "cpu_model", lambda: f"GenuineIntel|a name|{features}")
    target.rules_by.cache_clear()
    inputs = torch.randn(48, 64), torch.randn(128, 64), torch.randn(1, 2, 32, 16)
    text = str(explain(mixed, *inputs, backend="cpu", options={"cache_dir": tmp_path}))
    kernels = sum(line.strip().startswith("dicp_product") for line in text.splitlines())
    assert "dicp_attention" in text
    assert kernels == (1 if library == "blas" else 2), text
    assert re.search(r"library: aten\.mm\.default \(\w+\) at \S+test_calibration", text)
    assert str(found) in text, "explain says why"
    target.rules_by.cache_clear()


@pytest.mark.usefixtures("shared_builds")
@pytest.mark.parametrize("library", ["blas", "onednn"])
def test_narrow_batches_follow_the_measured_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str
) -> None:
    """Few columns go to BLAS where it is the faster library; more of them are ours everywhere."""
    found = Verdict(library, 0.9, 1.0, 1.1)  # type: ignore[arg-type]
    monkeypatch.setattr(target, "verdict", lambda cache, which: found)
    monkeypatch.setattr(toolchain, "cpu_model", lambda: "GenuineIntel|a name|avx2 avx512f")
    monkeypatch.setattr(product, "has_tiles", lambda: False)
    target.rules_by.cache_clear()
    for columns in (16, 64):
        torch._dynamo.reset()
        a, b = torch.randn(3, 16, 48), torch.randn(3, 48, columns)
        text = str(explain(torch.bmm, a, b, backend="cpu", options={"cache_dir": tmp_path}))
        assert ("dicp_product" in text) == (library == "onednn" or columns == 64), text
    target.rules_by.cache_clear()


@pytest.mark.usefixtures("shared_builds")
@pytest.mark.parametrize("own", [True, False])
def test_tiles_of_bfloat16_follow_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: bool
) -> None:
    """With tile registers oneDNN is the rival, per class of shapes; explain and doctor say so."""
    found = Verdict("own" if own else "onednn", 1.0, 1.5, 2.0, names=calibration.TILE_NAMES)
    unclear = Verdict("onednn", 0.5, 1.0, 2.0, stable=False, names=calibration.TILE_NAMES)
    for module in (target, product):
        monkeypatch.setattr(module, "has_tiles", lambda: True)
    monkeypatch.setattr(
        Trial, "verdict", lambda self: unclear if self.which == "few rows" else found
    )
    calibration._stored.cache_clear()
    options = {"cache_dir": tmp_path}
    half = torch.bfloat16
    x, w, q = torch.randn(48, 64), torch.randn(128, 64), torch.randn(1, 2, 32, 16)
    text = str(explain(mixed, *(t.to(half) for t in (x, w, q)), backend="cpu", options=options))
    kernels = sum(line.strip().startswith("dicp_product") for line in text.splitlines())
    assert (kernels, "dicp_attention" in text) == (2 if own else 0, True), text
    assert str(found) in text
    few = torch.randn(8, 64).to(half)
    torch._dynamo.reset()
    text = str(explain(lambda x, w: x @ w.t(), few, w.to(half), backend="cpu", options=options))
    assert "dicp_product" not in text and "unstable" in text
    checks = {c.name: c.detail for c in target.CpuTarget().doctor(Config(cache_dir=tmp_path))}
    assert checks["products in bfloat16, medium"] == str(found)


@pytest.mark.usefixtures("shared_builds")
@pytest.mark.parametrize("which", PROBLEMS)
def test_our_tiles_are_compared_with_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: ShapeClass
) -> None:
    """The routine that is timed computes the product."""
    if not calibration.has_onednn_linear(torch.bfloat16):
        monkeypatch.setattr("dicp.vendor.cpu.trial.by_onednn", calibration.by_blas)
    config = Config(cache_dir=tmp_path)
    cache = Cache.open(config)
    trial = Trial(which, Units.open(config, cache, {}), Libraries())
    x, w = torch.randn(7, 40).to(torch.bfloat16), torch.randn(50, 40).to(torch.bfloat16)
    out = x.new_empty(7, 50)
    trial.product(x, w, out)
    assert_matches(out, x @ w.t(), x.double() @ w.double().t())
    state = torch.get_rng_state()
    with FakeTensorMode():
        found = trial.verdict()
    assert torch.equal(state, torch.get_rng_state())
    assert 0 < found.low <= found.median <= found.high
    assert found.library in ("onednn", "own") and "our kernel" in str(found)


@pytest.mark.usefixtures("shared_builds")
@pytest.mark.parametrize(
    ("interval", "library", "stable"),
    [((0.91, 0.95, 1.0), "own", True), ((0.5, 0.6, 0.89), "onednn", True),
     ((0.5, 0.8, 2.0), "own", False)],
)  # fmt: skip
def test_our_tiles_are_taken_up_to_a_tenth_slower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    interval: tuple[float, float, float], library: str, stable: bool,
) -> None:  # fmt: skip
    """They save the passes behind a product; the table decides where the clock does not."""
    if not calibration.has_onednn_linear(torch.bfloat16):
        monkeypatch.setattr("dicp.vendor.cpu.trial.by_onednn", calibration.by_blas)
    monkeypatch.setattr(calibration, "_interval", lambda ratios: interval)
    config = Config(cache_dir=tmp_path)
    trial = Trial("few rows", Units.open(config, Cache.open(config), {}), Libraries())
    found = trial.verdict()
    assert (found.library, found.stable) == (library, stable)


def test_bfloat16_needs_a_processor_whose_onednn_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x, w, b = (torch.randn(*s).to(torch.bfloat16) for s in ((64, 96), (96, 96), (96,)))
    monkeypatch.setattr(product.Products, "takes", lambda *given: False)
    for supported in {False, calibration.has_onednn_linear(torch.bfloat16)}:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda s=supported: s)
        (step,) = check(tmp_path / str(supported), F.linear, x, w, b)
        assert step == ("mkldnn::_linear_pointwise." if supported else "aten::addmm.out")


@pytest.mark.skipif(not calibration.has_onednn_linear(), reason="this PyTorch has no oneDNN linear")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_multiplies_dense_weights_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype
) -> None:
    """For others it has no kernel: it takes a thousand times as long as BLAS, which copies them."""
    monkeypatch.setattr(product.Products, "fits", lambda *given, **named: False)
    x, w, b = (torch.randn(*s).to(dtype) for s in ((8, 300), (16, 304), (16,)))

    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.linear(x, w, b))

    for weights in (w[:, :300], w[:1, :300].expand(16, 300), w.new_empty(300, 20)[:, :16].t()):
        assert "mkldnn" not in " ".join(check(tmp_path, layer, x, weights.fill_(0.5), b))


@pytest.mark.parametrize(
    ("features", "answer", "granted"),
    [("amx_tile amx_bf16", 0, True), ("amx_tile amx_bf16", -1, False), ("avx512_bf16", 0, False),
     ("amx_tile amx_int8", 0, False)],
)  # fmt: skip
def test_tiles_are_used_with_the_kernels_permission(
    monkeypatch: pytest.MonkeyPatch, features: str, answer: int, granted: bool
) -> None:
    monkeypatch.setattr(toolchain, "cpu_model", lambda: f"GenuineIntel|a name|{features}")
    monkeypatch.setattr(toolchain, "_request_tiles", lambda: answer)
    toolchain.has_tiles.cache_clear()
    try:
        assert toolchain.has_tiles() is granted
        assert ("-DDICP_TILES" in toolchain.find_toolchain(Config()).flags) is granted
    finally:
        toolchain.has_tiles.cache_clear()


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("vendor_id : GenuineIntel\nmodel name : Xeon\nflags : fpu asimd avx2\n", "GenuineIntel"),
        ("Features : fp asimd sve\nCPU part : 0xd40\nFeatures : fp\n", "0xd40"),
    ],
)
def test_features_are_read_on_every_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, vendor: str
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    model = toolchain.cpu_model(tmp_path / "cpuinfo")
    monkeypatch.setattr(toolchain, "cpu_model", lambda: model)
    monkeypatch.setattr(calibration, "cpu_model", lambda: model)
    assert toolchain.has_feature("asimd") and not toolchain.has_feature("0xd40")
    assert calibration._vendor() == vendor


def test_a_kernel_without_tiles_refuses_them() -> None:
    """The request itself, on whatever machine this is: a number, and no signal."""
    assert (toolchain._request_tiles() == 0) == toolchain.has_feature("amx_tile")


def test_without_wide_vectors_and_slow_blas_all_is_left_to_the_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for features, slow in itertools.product(("sse2 avx", "avx avx2"), (False, True)):
        monkeypatch.setattr(toolchain, "cpu_model", lambda text=features: f"a|b|{text}")
        target.rules_by.cache_clear()
        rules = target.rules_by(frozenset({"medium"} if slow else ()))
        assert (rules is target.LIBRARY_RULES) == ("avx2" not in features and not slow)
    target.rules_by.cache_clear()


@pytest.mark.parametrize(
    ("size", "sharing", "cpus", "usable"),
    [
        ("32768K", "3", 2, 32 << 20),  # all of it
        ("32768K", "ff", 2, 8 << 20),  # two of eight CPUs
        ("491520K", "3", 2, 32 << 20),  # a host's 480 MiB, shown to a machine of two CPUs
        ("491520K", "ffffffff,ffffffff", 64, 480 << 20),
    ],
)
def test_of_a_shared_cache_a_process_has_its_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: str, sharing: str, cpus: int, usable: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cpus)))
    for name, text in (("size", size), ("shared_cpu_map", sharing)):
        (tmp_path / "index3").mkdir(exist_ok=True)
        (tmp_path / "index3" / name).write_text(text + "\n")
    assert cache_bytes(tmp_path) == usable
    assert cache_bytes(tmp_path / "none") == math.inf
