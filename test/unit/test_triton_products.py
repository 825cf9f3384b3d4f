"""Matrix products as generated kernels: forms, what is fused, who is chosen to compute them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import TritonRecorder, calls, kernels, portable, record
from torch import Tensor

from dicp.cache import Cache
from dicp.compare import assert_matches
from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import CompilerError
from dicp.gpu import measured
from dicp.gpu.autotuner import Autotuner, Program
from dicp.gpu.build import Binary
from dicp.gpu.measured import Platform, by_table
from dicp.gpu.products import Product, ProductTile, kernels_of
from dicp.gpu.thresholds import MARGIN
from dicp.gpu.tiling import Tiling, candidates
from dicp.loop.ir import expr as ir
from dicp.loop.ir.kernel import Kernel
from dicp.loop.program import RenderedKernel
from dicp.loop.runtime.executable import LoopExecutable
from dicp.loop.runtime.host_memory import HostMemory
from dicp.vendor.triton import aot, choice, target
from dicp.vendor.triton.builder import Builder, Job, Workers
from dicp.vendor.triton.choice import platform
from dicp.vendor.triton.render.kernel import render
from dicp.vendor.triton.simulator import Simulator

pytestmark = pytest.mark.sweep

SMALL = Tiling(16, 32, 16, 2, 2)
IN_PARTS = Tiling(16, 32, 16, 2, 2, 3)


def by(choose: Any) -> Callable[..., Any]:
    """A chooser that asks `choose` in place of the table and the autotuner."""
    return lambda table, platform, autotuner: choose


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product that a kernel can compute is computed by one."""
    monkeypatch.setattr(target, "chooser", by(lambda product: SMALL))


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype)


def residual_block(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b)) + r


FORMS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(37, 24), (24, 41)]),
    "even": (torch.mm, [(32, 32), (32, 64)]),
    "transposed": (lambda a, b: a.t() @ b.t(), [(24, 37), (41, 24)]),
    "strided": (lambda a, b: a[:, ::2] @ b[1:], [(19, 20), (11, 33)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(7, 9), (7, 5), (5, 9)]),
    "bias": (lambda c, a, b: torch.addmm(c, a, b), [(9,), (7, 5), (5, 9)]),
    "column": (lambda c, a, b: torch.addmm(c, a, b), [(7, 1), (7, 5), (5, 9)]),
    "one row": (torch.mm, [(1, 50), (50, 40)]),
    "one column": (torch.mm, [(40, 50), (50, 1)]),
    "bmm": (torch.bmm, [(3, 20, 18), (3, 18, 33)]),
    "broadcast batch": (
        lambda a, b: torch.bmm(a, b.expand(3, 18, 33)), [(3, 20, 18), (1, 18, 33)]
    ),
    "baddbmm": (torch.baddbmm, [(3, 1, 33), (3, 20, 18), (3, 18, 33)]),
    "activation": (lambda x, w, b: F.relu(F.linear(x, w, b)), [(4, 9, 24), (40, 24), (40,)]),
    "residual": (residual_block, [(4, 9, 24), (40, 24), (40,), (4, 9, 40)]),
    "batched residual": (
        lambda a, b, m: torch.bmm(a, b) * 0.25 + m, [(4, 9, 8), (4, 8, 9), (9,)]
    ),
    "batched bias, activation, residual, cast": (
        lambda c, a, b, r: (F.relu(torch.baddbmm(c, a, b)) + r).float(),
        [(3, 1, 9), (3, 4, 8), (3, 8, 9), (3, 4, 9)],
    ),
    "batches in groups": (
        lambda q, k: torch.softmax(q.flatten(0, 1) @ k.repeat_interleave(2, 1).flatten(0, 1), -1),
        [(2, 4, 5, 16), (2, 2, 16, 20)],
    ),
    "swiglu": (
        lambda x, u, g: F.silu(x @ g) * (x @ u), [(30, 20), (20, 36), (20, 36)]
    ),
    "result used twice": (lambda a, b: ((y := a @ b) * 2, y.sum(0)), [(30, 20), (20, 36)]),
    "heads": (
        lambda x, w: (x @ w).view(2, 15, 4, 9).transpose(1, 2).contiguous() + 1,
        [(30, 20), (20, 36)],
    ),
}  # fmt: skip


def matched(name: str, dtype: torch.dtype, sized: str, folder: Path) -> Any:
    """The report of a form whose results are right."""
    fn, shapes = FORMS[name]
    inputs = [make(*shape, dtype=dtype) for shape in shapes]
    backend = Backend("triton", cache_dir=folder)
    torch._dynamo.reset()
    got = torch.compile(fn, backend=backend, dynamic=sized != "static")(*inputs)
    eager, truth = fn(*inputs), fn(*(x.double() for x in inputs))
    leaves = torch.utils._pytree.tree_leaves
    for mine, theirs, real in zip(leaves(got), leaves(eager), leaves(truth), strict=True):
        assert_matches(mine, theirs, real)
    (report,) = backend.reports
    return report


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("sized", ["static", "any size"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, dtype: torch.dtype, sized: str, tmp_path: Path) -> None:
    report = matched(name, dtype, sized, tmp_path)
    assert all("total" in k.text for k in report.kernels if "mm" in str(k.sources[0]))


@pytest.mark.parametrize("sized", ["static", "any size"])
@pytest.mark.parametrize("name", FORMS)
def test_form_in_parts(
    name: str, sized: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of products cut into three, of which the last may be shorter or empty."""
    monkeypatch.setattr(target, "chooser", by(lambda product: IN_PARTS))
    report = matched(name, torch.bfloat16, sized, tmp_path)
    assert sum("_sums[" in k.text and "total" in k.text for k in report.kernels)


def test_sums_are_cut_into_parts_of_whole_blocks() -> None:
    product = product_of(torch.mm, make(5, 1000), make(1000, 24))
    first, rest = kernels_of(product, IN_PARTS, False, TritonRecorder().with_form)
    assert isinstance(first.form, ProductTile)
    assert first.form.product.shape == (3, 5, 24, 1000)
    text = render(first)
    assert text.extra["launch"]["axes"]["z"]["size"] == 3
    assert "tl.minimum(begin + chunk" in text.body
    assert len({e.index for s in rest.phases[0].stmts for e in ir.walk(s.value)
                if e.op == "read"}) == 3  # fmt: skip


def test_stores_of_a_product_with_random_numbers_have_one_vector_length() -> None:
    """That of the widest element: random numbers are computed once for all stores."""

    def kept(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x = F.dropout(a @ b, 0.25)
        return x, x != 0

    product = product_of(kept, make(32, 32), make(32, 64))
    (kernel,) = kernels_of(product, SMALL, False, TritonRecorder().with_form)
    assert isinstance(kernel.form, ProductTile) and set(kernel.form.limited.values()) == {4}
    stores = {store for store in kernel.stores() if store.ref.dtype == torch.bool}
    assert stores and kernel.form.limited.keys() == stores
    assert render(kernel).body.count("tl.max_contiguous(") == len(stores)


def test_long_sums_with_few_results_are_worth_cutting() -> None:
    def most(*shape: int) -> int:
        return max(t.parts for t in candidates(*shape[1:], torch.bfloat16, shape[0]))

    assert most(1, 1, 4096, 4096) >= 4  # one token
    assert most(1, 768, 768, 65536) >= 8  # a gradient of weights
    assert most(1, 8192, 8192, 8192) == most(512, 64, 64, 4096) == most(1, 1, 4096, 128) == 1


def steps_of(fn: Callable[..., Any], *inputs: Tensor) -> tuple[int, list[str]]:
    found = record(fn, *inputs, target=TritonRecorder())
    return kernels(found)[0], calls(found)


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize(
    ("name", "count"),
    [("activation", 1), ("residual", 1), ("swiglu", 2), ("batched residual", 1),
     ("batched bias, activation, residual, cast", 1), ("result used twice", 2), ("heads", 1)],
)  # fmt: skip
def test_what_follows_is_computed_in_the_products_kernel(name: str, count: int) -> None:
    fn, shapes = FORMS[name]
    assert steps_of(fn, *(make(*shape) for shape in shapes)) == (count, [])


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("name", ["residual", "baddbmm"])
def test_golden_text(name: str, golden: Callable[[Path, str], None]) -> None:
    fn, shapes = FORMS[name]
    found = record(fn, *(make(*shape, dtype=torch.bfloat16) for shape in shapes),
                   target=TritonRecorder())  # fmt: skip
    text = portable(found.render(found.programs[0], Config()).files["kernels.py"])
    golden(Path(__file__).parent / "golden" / "products" / f"{name}.txt", text)


@pytest.mark.usefixtures("generated")
def test_what_a_kernel_cannot_take_stays_with_the_library() -> None:
    double = [make(4, 5).double(), make(5, 6).double()]
    assert steps_of(lambda a, b: (a @ b).relu(), *double) == (1, ["aten::mm.out"])
    assert steps_of(lambda a, b: a @ b, make(4, 0), make(0, 5))[1] == ["aten::mm.out"]


@pytest.mark.usefixtures("generated")
def test_a_factor_that_is_overwritten_is_read_before() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        a.copy_(y + 1)
        return y * 2

    a, b = make(16, 16), make(16, 16)
    expected = (a @ b) * 2
    torch.testing.assert_close(torch.compile(fn, backend=Backend("triton", cache=False))(a, b),
                               expected)  # fmt: skip
    torch.testing.assert_close(a, expected / 2 + 1)


def test_the_library_computes_products_that_nobody_measured() -> None:
    assert steps_of(*(lambda f, s: (f, *(make(*x) for x in s)))(*FORMS["residual"])) == (
        1, ["aten::addmm.out"]
    )  # fmt: skip


# ---- the choice ----------------------------------------------------------------------------------


def product_of(fn: Callable[..., Any], *inputs: Tensor) -> Product:
    """The one product of a graph, with what follows it."""
    found: list[Product] = []
    before = target.chooser
    target.chooser = by(found.append)
    try:
        record(fn, *inputs, target=TritonRecorder())
    finally:
        target.chooser = before
    (product,) = found
    return product


@pytest.fixture
def product() -> Product:
    return product_of(lambda a, b, c: F.relu(a @ b) + c, make(40, 32), make(32, 48), make(40, 48))


class Compiled(Builder):
    """A compiler that refuses one tiling and has not enough shared memory for another."""

    def __init__(self, refused: Tiling, large: Tiling) -> None:
        self.refused, self.large = refused, large

    def attempt(self, jobs: Any) -> list[Binary | CompilerError]:
        self.asked = len(jobs)
        return [self._one(job) for job in jobs]

    def _one(self, job: Job) -> Binary | CompilerError:
        asked = (*job.blocks().values(), job.launch.get("constants", {}).get("KBLOCK", 0))
        if asked == (self.refused.y, self.refused.x, self.refused.k):
            return CompilerError("triton", [], "refused", ())
        blocks = job.blocks()
        if asked == (self.large.y, self.large.x, self.large.k):
            blocks = {"y": blocks["y"] // 2, "x": blocks["x"]}
        return Binary(b"", job.name, 0, 4, blocks)


class Stopwatch:
    """Runs what it times, and answers with the times it was given."""

    def __init__(self, library: float, *kernels: float) -> None:
        self.times = [library, *kernels]
        self.results: list[Any] = []

    def __call__(self, run: Callable[[], Any], device: torch.device) -> float:
        self.results.append(run())
        return self.times[min(len(self.results), len(self.times)) - 1]


@pytest.fixture
def autotuner(tmp_path: Path, product: Product) -> Iterator[Callable[..., Autotuner]]:
    tilings = candidates(40, 48, 32, torch.float32)
    assert len(tilings) > 3

    def made(timer: Stopwatch, chip: str = "a chip") -> Autotuner:
        def load(program: Program) -> LoopExecutable:
            plain, texts = program
            return LoopExecutable(plain, Simulator(texts, plain["buffers"]), HostMemory())

        own = choice.TritonProducts(90, Compiled(tilings[0], tilings[1]), load)
        cache = Cache.open(Config(cache_dir=tmp_path))
        return Autotuner(torch.device("cpu"), platform(chip), cache, own, timer)

    yield made


def test_the_fastest_kernel_wins_and_the_outcome_is_kept(
    autotuner: Callable[..., Autotuner], product: Product
) -> None:
    first, second, *rest = candidates(40, 48, 32, torch.float32)
    refused = [(t.y, t.x, t.k) for t in (first, second)]
    built = [t for t in rest if (t.y, t.x, t.k) not in refused]
    watch = Stopwatch(10.0, 9.0, 5.0, *[8.0] * 20)
    assert autotuner(watch).choose(product) == built[1]
    assert len(watch.results) == 1 + len(built)
    idle = Stopwatch(1.0)
    assert autotuner(idle).choose(product) == built[1] and not idle.results
    other = Stopwatch(1.0, 2.0)
    assert autotuner(other, "another chip").choose(product) is None and other.results


def test_candidates_compute_the_same(autotuner: Callable[..., Autotuner], product: Product) -> None:
    torch.manual_seed(0)
    watch = Stopwatch(1.0, 2.0)
    arena = autotuner(watch)
    fill = arena._filled
    kept: dict[str, Tensor] = {}

    def filled(buffer: Any) -> Tensor:
        return kept.setdefault(buffer["name"], fill(buffer))

    object.__setattr__(arena, "_filled", filled)
    tiling, seconds = arena.measure(product)
    assert tiling is None and seconds["library"] == 1.0
    first, *rest = watch.results
    for result in rest:
        torch.testing.assert_close(result, first)


def test_tuning_leaves_the_programs_random_numbers_alone(
    autotuner: Callable[..., Autotuner], product: Product
) -> None:
    before = torch.get_rng_state()
    assert autotuner(Stopwatch(1.0, 2.0)).choose(product) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_split_k_tilings_are_tuned_too(autotuner: Callable[..., Autotuner]) -> None:
    torch.manual_seed(0)
    product = product_of(lambda a, b: F.relu(a @ b), make(4, 4096), make(4096, 32))
    watch = Stopwatch(10.0, *[9.0] * 30)
    arena = autotuner(watch)
    tiling, seconds = arena.measure(product)
    cut = [name for name in seconds if name != "library" and not name.endswith("x1")]
    assert len(cut) >= 2 and tiling is not None
    assert arena.kernels.builder.asked > len(seconds)  # all of them at once, side by side
    fastest = Stopwatch(*[10.0 if not name.endswith("x4") else 5.0 for name in seconds])
    chosen = autotuner(fastest, "another chip").choose(product)
    assert chosen is not None and chosen.parts == 4


def test_a_kernel_must_win_by_a_margin(
    autotuner: Callable[..., Autotuner], product: Product
) -> None:
    assert autotuner(Stopwatch(1.0, 0.99)).choose(product) is None


def test_a_product_too_small_for_any_tiling_is_the_librarys(
    autotuner: Callable[..., Autotuner],
) -> None:
    small = product_of(torch.mm, make(32, 16), make(16, 8))
    assert not candidates(32, 8, 16, torch.float32)
    assert autotuner(Stopwatch(1.0)).choose(small) is None
    row = autotuner(Stopwatch(1.0)).row(small)
    assert row is not None and (row.tiling, row.library, row.kernel) == (None, 1.0, None)


def test_products_of_any_size_are_not_measured(autotuner: Callable[..., Autotuner]) -> None:
    found: list[Product] = []

    def choose(product: Product) -> Tiling | None:
        found.append(product)
        return autotuner(Stopwatch(1.0, 0.1)).choose(product)

    class Any_(TritonRecorder):
        def chooser(self, name: str, config: Config) -> Any:
            return choose

    assert "mm" in str(calls(record(torch.mm, make(8, 9), make(9, 7), dynamic=True, target=Any_())))
    assert found


def test_a_measurement_becomes_a_row_of_the_table(
    autotuner: Callable[..., Autotuner], product: Product, tmp_path: Path
) -> None:
    row = autotuner(Stopwatch(10.0, 9.0, 5.0, *[8.0] * 20)).row(product)
    assert row is not None and row.tiling is not None
    assert (row.library, row.kernel, row.problem.layout) == (10.0, 5.0, "nn")
    other = product_of(torch.mm, make(40, 32), make(48, 32).t())
    lost = autotuner(Stopwatch(1.0, 2.0)).row(other)
    assert lost is not None and (lost.tiling, lost.kernel, lost.problem.layout) == (None, 2.0, "nt")
    file = tmp_path / "products.json"
    measured.write(file, measured.table_of([row, lost]))
    table, here = measured.read(file), platform("a chip")
    assert list(table.values()) == [row, lost]
    assert by_table(table, product, here) == row.tiling
    assert by_table(table, product, platform("another chip")) is None
    assert by_table(table, other, here) is None
    wide = product_of(torch.mm, make(65, 32), make(32, 48))
    assert by_table(table, wide, here) is None
    assert by_table(table, product, replace(here, compiler="0.0")) is None
    assert by_table(table, product, replace(here, tf32=not here.tf32)) is None


def test_rows_that_ship_were_measured_on_chips() -> None:
    for row in choice.TABLE.values():
        assert row.problem.chip.startswith("NVIDIA") and row.library > 0
        assert row.tiling is None or (row.kernel or math.inf) < MARGIN * row.library


def test_the_table_chooses_on_the_chip_that_it_names(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = measured.Problem.of(product, platform("a chip"))
    assert problem is not None
    row = measured.Row(problem, SMALL, 2.0, 1.0)
    monkeypatch.setattr(target, "TABLE", measured.table_of([row]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a chip")
    choose = target.TritonTarget().chooser("cuda:0", Config())
    assert choose(product) == SMALL
    assert target.TritonTarget().chooser("cpu", Config())(product) is None


def test_what_was_chosen_by_measurement_is_for_these_very_chips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever of them is the current one."""
    chips = ["a chip", "a chip"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(chips))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: chips[device])
    tuned, plain = Config(mode="max-autotune"), Config()
    before = [target.TritonTarget().fingerprint(config) for config in (tuned, plain)]
    chips[1] = "another"
    after = [target.TritonTarget().fingerprint(config) for config in (tuned, plain)]
    assert before[0] != after[0] and (before[1] == after[1] or choice.TABLE)


class Other:
    """Kernels of a vendor whose compiler refuses the first candidate."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def with_form(self, kernel: Kernel) -> Kernel:
        return kernel

    def render(self, kernel: Kernel) -> RenderedKernel:
        form = kernel.form
        text = str(form.tiling) if isinstance(form, ProductTile) else "after the library"
        return RenderedKernel("k", text, (), (), kernel, (), {"launch": {}})

    def attempt(self, programs: Sequence[Program]) -> list[bool]:
        return [k > 0 for k in range(len(programs))]

    def load(self, program: Program) -> Callable[..., None]:
        self.loaded += program[1].values()
        return lambda inputs: None


def test_any_vendor_tunes_its_products(product: Product, tmp_path: Path) -> None:
    tilings, own, watch = candidates(40, 48, 32, torch.float32), Other(), Stopwatch(5.0, 3.0, 2.0)
    cache, where = Cache.open(Config(cache_dir=tmp_path)), Platform("wave 64", "9", "", False)
    arena = Autotuner(torch.device("cpu"), where, cache, own, watch)
    watch.times += [4.0] * len(tilings)
    assert arena.choose(product) == tilings[2]
    assert own.loaded == ["after the library", *map(str, tilings[1:])]


def test_tilings_fit_the_product() -> None:
    for rows, columns, depth in ((1, 4096, 4096), (8192, 8192, 8192), (40, 17, 100)):
        for tiling in candidates(rows, columns, depth, torch.bfloat16):
            assert 16 <= tiling.y <= max(16, 2 * rows) and 16 <= tiling.x <= max(16, 2 * columns)
            assert math.log2(tiling.y * tiling.x * tiling.k).is_integer()
    large = candidates(8192, 8192, 8192, torch.bfloat16)
    assert len(large) == len(set(large)) > 8


@pytest.mark.usefixtures("generated")
def test_products_are_built_for_two_chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the compiler's processes, with tiles as they are on a chip."""
    chosen = [Tiling(128, 128, 32, 3, 8), Tiling(64, 64, 64, 4, 4, 4)]
    backend = Backend("triton", cache_dir=tmp_path)
    cases = [("residual", torch.bfloat16), ("bmm", torch.float16), ("strided", torch.float32)]
    for at, (name, dtype) in enumerate(cases):
        monkeypatch.setattr(target, "chooser", by(lambda p, at=at: chosen[at % 2]))
        fn, shapes = FORMS[name]
        torch._dynamo.reset()
        torch.compile(fn, backend=backend)(*(make(*shape, dtype=dtype) for shape in shapes))
    cache, workers = Cache.open(Config(cache_dir=tmp_path)), Workers()
    jobs = aot.jobs_of(aot.stored_programs(cache), aot.ARCHITECTURES)
    try:
        failures = aot.build_all(jobs, Builder(cache, workers, 2))
    finally:
        workers.close()
    assert len(jobs) >= 6 and not failures, failures[:2]
