"""The way to a device through a double of CANN: find, build, load, run, unload, fail."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_in import cann
from torch import Tensor, nn

from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import DeviceError, DeviceMemoryError, ModelMismatchError, SimulatorWarning
from dicp.vendor.ascend import AscendTarget, toolchain
from dicp.vendor.ascend.installation import Cann, checked, device_count, version_in
from dicp.vendor.ascend.prototypes import PROTOTYPES
from dicp.vendor.ascend.runtime import Driver, Model, as_plain
from dicp.vendor.ascend.toolchain import compile_shared, find_toolchain, load_driver

CONFIG = Config(runs_on="device")
SOC = "Ascend910B1"


class Installed:
    """Installations of two dates, with the double's library and what computes for it."""

    def __init__(self, folder: Path) -> None:
        self.roots = {"2025": cann.install(folder / "2025", "2025")}
        self.roots["2023"] = cann.install(folder / "2023", "2023", self.roots["2025"])
        self.library, self.device = cann.connect(self.roots["2025"])

    def reset(
        self, devices: int = 2, memory: int = 1 << 40, work: int = 0, weights: int = 0
    ) -> None:
        self.library.double_reset(devices, memory, work, weights)
        device_count.cache_clear()
        toolchain._answers.cache_clear()

    def fail(self, call: str, status: int) -> None:
        self.library.double_fail(call.encode(), status)

    def calls(self, call: str) -> int:
        return int(self.library.double_calls(call.encode()))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("cann"))


@pytest.fixture
def double(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(installed.roots["2025"]))
    installed.device.operators = cann.operators("2025")
    installed.reset()
    installed.library.double_forget_device()
    yield installed
    installed.reset(devices=0)


@pytest.fixture
def driver(double: Installed) -> Driver:
    return Driver(load_driver(find_toolchain(CONFIG), Cache.open(Config())), simulated=False)


SOURCE = """
#include "graph/graph.h"
#include "graph/operator_factory.h"
extern "C" void define(ge::Graph& graph) {
  auto x = ge::OperatorFactory::CreateOperator("x", "Data");
  x.SetAttr("index", int64_t{0});
  x.UpdateOutputDesc("y", ge::TensorDesc(ge::Shape({SIZE, 3}), ge::FORMAT_ND, ge::DT_FLOAT));
  auto y = ge::OperatorFactory::CreateOperator("y", "Abs");
  y.SetInput("x", x);
  graph.SetInputs(std::vector<ge::Operator>{x});
  graph.SetOutputs(std::vector<std::pair<ge::Operator, std::vector<size_t>>>{{y, {0}}});
}
"""


@pytest.fixture(scope="module")
def defined(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> dict[int, int]:
    """By the number of rows, -1 for any: the address of a function that makes a graph."""
    import ctypes

    folder, found = tmp_path_factory.mktemp("graphs"), {}
    text = SOURCE.replace("define", "fixed").replace("SIZE", "2")
    text += SOURCE.replace("define", "changing").replace("SIZE", "-1")
    found_cann = checked(Cann(installed.roots["2025"], ""))
    tools = replace(find_toolchain(Config(runs_on="simulator")), cann=found_cann)
    (folder / "graph.so").write_bytes(compile_shared(tools, text))
    library = ctypes.CDLL(str(folder / "graph.so"))
    for size, name in ((2, "fixed"), (-1, "changing")):
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert address is not None
        found[size] = address
    return found


@pytest.fixture
def built(driver: Driver, defined: dict[int, int]) -> bytes:
    return driver.build(defined[2], "graph", "must_keep_origin_dtype")


def run(driver: Driver, handle: int, **options: Any) -> None:
    x, y = torch.tensor([[-1.0, 2, -3], [4, -5, 6]]), torch.empty(2, 3)
    driver.run(handle, [x], [y], False, **options)
    assert torch.equal(y, x.abs())


# ---- what is installed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("# version: 1.0\nruntime_running_version=[7.0.0.5.242:7.0.0]\n", "7.0.0"),
        ("# version: 1.0\nruntime_running_version=[7.1.0.3.220:7.0.RC1]\n"
         "runtime_upgrade_version=[7.1.0.3.220:7.0.RC1]\n", "7.0.RC1"),
        ("# version: 1.0\n\ncompiler_running_version=[7.6.T11.0.B128:8.0.0]\n", "8.0.0"),
        ("# version: 1.0\nruntime_running_version=[7.5.0.1.129:8.0.RC3][7.7.0.1:8.1.RC1]\n",
         "8.1.RC1"),
        ("# version: 1.0\ntoolkit_installed_version=[7.8.0.2:8.2.RC1.alpha002]\n",
         "8.2.RC1.alpha002"),
        ("package_name=Ascend-cann-toolkit\nversion=8.2.RC1\narch=aarch64\n", "8.2.RC1"),
        ("Version=7.6.0.1.220\nversion_dir=8.1.RC1\ntimestamp=20250301\n", "8.1.RC1"),
        ("# version\nVersion=8.0.RC1\n", "8.0.RC1"),
        ("# version: 1.0\n", None),
    ],
)  # fmt: skip
def test_version_files(text: str, version: str | None) -> None:
    assert version_in(text) == version


def test_operators_of_two_header_sets(double: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    new = AscendTarget().installed(CONFIG)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(double.roots["2023"]))
    old = AscendTarget().installed(CONFIG)
    assert old.kinds < new.kinds and {"RmsNorm", "SwiGlu"} <= new.kinds - old.kinds
    assert old.kinds == set(PROTOTYPES) & cann.operators("2023").keys()


def test_libraries_by_their_new_names(double: Installed, tmp_path: Path) -> None:
    """libascendcl.so is being divided into two."""
    root = cann.install(tmp_path / "cann", "2025", double.roots["2025"])
    (root / "lib64").unlink()
    (root / "lib64").mkdir()
    for name in ("acl_rt", "acl_mdl", *cann.LIBRARIES[1:]):
        library = double.roots["2025"] / "lib64" / "libascendcl.so"
        (root / "lib64" / f"lib{name}.so").symlink_to(library)
    found = Cann(root, "")
    assert found.linked == ("ge_compiler", "ge_runner", "graph", "acl_rt", "acl_mdl")
    assert device_count(found) == 2
    assert "ascendcl" in Cann(double.roots["2025"], "").linked
    (root / "lib64" / "libacl_rt.so").unlink()
    device_count.cache_clear()
    assert "has no libascendcl.so" in str(device_count(found))


def test_auto_is_a_device_that_answers(double: Installed) -> None:
    assert find_toolchain(Config()).cann is not None
    double.reset(devices=0)
    with pytest.warns(SimulatorWarning, match=r"no device answers .*doctor"):
        assert find_toolchain(Config()).cann is None
    assert find_toolchain(CONFIG).cann is not None
    double.reset()
    double.fail("aclrtGetDeviceCount", 507899)
    with pytest.warns(SimulatorWarning, match="gives status 507899"):
        assert find_toolchain(Config()).cann is None


def test_without_a_device_the_simulator_runs_the_installations_graphs(
    double: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the operators that it declares, by the names that it declares."""
    root = cann.install(tmp_path / "cann", "2025", double.roots["2025"])
    for header in root.rglob("*.h"):
        text = header.read_text()
        if "REG_OP(SwiGluGrad)" in text:
            header.write_text(text.replace(".INPUT(y_grad", ".INPUT(grad"))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(root))
    double.reset(devices=0)
    sources: list[str] = []

    def render(self: AscendTarget, *args: Any) -> str:
        sources.append(rendered(self, *args))
        return sources[-1]

    rendered = AscendTarget.render_graph
    monkeypatch.setattr(AscendTarget, "render_graph", render)

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up * 2

    x = torch.randn(3, 16)
    mine, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulatorWarning)
        compiled(gated, runs_on="auto")(mine).sum().backward()
    gated(eager).sum().backward()
    torch.testing.assert_close(mine.grad, eager.grad)
    assert any('.In("grad", ' in source for source in sources)
    assert double.calls("aclmdlExecuteAsync") == 0


def test_doctor_names_what_is_there_and_what_is_missing(double: Installed) -> None:
    lines = {check.name: check for check in AscendTarget().doctor(Config())}
    assert "8.2.RC1" in lines["CANN"].detail and "BatchNormV3" in lines["CANN"].detail
    assert lines["devices"].detail == "2" and lines["SoC"].detail == SOC
    for name in ("driver", "torch_npu"):
        assert not lines[name].ok and lines[name].fix
    double.reset(devices=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulatorWarning)
        lines = {check.name: check for check in AscendTarget().doctor(Config())}
    assert not lines["devices"].ok and "LD_LIBRARY_PATH" in lines["devices"].fix


# ---- load, run, unload ---------------------------------------------------------------------------


def test_nothing_is_left_behind(double: Installed, driver: Driver, built: bytes) -> None:
    double.reset(work=4096, weights=512)
    handle = driver.load(built, SOC)
    assert double.library.double_used(0) == 4096 + 512
    run(driver, handle)
    run(driver, handle)
    driver.unload(handle)
    assert double.library.double_used(0) == double.library.double_objects() == 0
    assert double.library.double_models() == 0


def test_models_without_memory_ask_for_none(
    double: Installed, driver: Driver, built: bytes
) -> None:
    double.reset()
    handle = driver.load(built, SOC)
    assert double.calls("aclrtMalloc") == 0
    driver.unload(handle)


def test_models_share_one_workspace(double: Installed, driver: Driver, built: bytes) -> None:
    double.reset(work=4096)
    handles = [driver.load(built, SOC) for _ in range(3)]
    assert double.library.double_workspaces() == 1 and double.library.double_used(0) == 4096
    for handle in handles:
        run(driver, handle)
    for handle in handles:
        driver.unload(handle)
    assert double.library.double_used(0) == 0


def test_two_devices_and_threads(double: Installed, driver: Driver, built: bytes) -> None:
    model = Model(driver, built, SOC, dynamic=False)
    double.library.double_forget_device()
    run(driver, model.handle(1))
    failures: list[BaseException] = []

    def work(model: Model, device: int) -> None:
        try:  # a new thread has no context
            for _ in range(5):
                run(driver, model.handle(device))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(model, k % 2)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and double.library.double_models() == 2
    with pytest.raises(DeviceError, match="status 107001: there is no device 7"):
        model.handle(7)
    double.reset()
    del threads, work, model
    assert double.library.double_models() == 0


def test_the_device_of_a_thread_is_left_as_it_was(
    double: Installed, driver: Driver, built: bytes
) -> None:
    double.library.aclrtSetDevice(1)
    run(driver, handle := driver.load(built, SOC, device=0))
    assert double.library.double_current() == 1
    driver.unload(handle)


def test_streams_that_share_memory_wait_for_each_other(
    double: Installed, driver: Driver, built: bytes
) -> None:
    import ctypes

    double.reset(work=64)
    handles = [driver.load(built, SOC) for _ in "ab"]
    streams = [ctypes.c_void_p() for _ in "ab"]
    double.library.aclrtSetDevice(0)
    for stream in streams:
        assert double.library.aclrtCreateStream(ctypes.byref(stream)) == 0
    for handle, stream in zip(handles, streams, strict=True):
        run(driver, handle, stream=stream.value)
    assert double.calls("aclrtSynchronizeStream") == 3  # one of them for the shared memory
    for handle in handles:
        driver.unload(handle)


def test_models_of_changing_sizes(
    double: Installed, driver: Driver, defined: dict[int, int]
) -> None:
    model = driver.build(defined[-1], "graph", "must_keep_origin_dtype", "x:-1,3")
    options = double.device.options
    assert options["input_shape"] == "x:-1,3" and options["input_format"] == "ND"
    double.reset(work=4096)
    handle = driver.load(model, SOC, dynamic=True)
    assert double.calls("aclmdlQuerySizeFromMem") == double.calls("aclrtMalloc") == 0
    for rows in (1, 4):
        x, y = -torch.ones(rows, 3), torch.empty(rows, 3)
        driver.run(handle, [x], [y], True)
        assert torch.equal(y, x.abs())
    driver.unload(handle)
    with pytest.raises(DeviceError, match="changing sizes manages its memory itself"):
        driver.load(model, SOC)
    assert double.library.double_used(0) == 0


@pytest.mark.parametrize(
    ("call", "status", "error"),
    [
        ("aclrtMalloc", 200000, DeviceMemoryError),
        ("aclrtMalloc", 207001, DeviceMemoryError),
        ("aclmdlLoadFromMemWithMem", 207018, DeviceMemoryError),
        ("aclmdlLoadFromMemWithMem", 507008, ModelMismatchError),
        ("aclmdlLoadFromMemWithMem", 145009, DeviceError),
        ("aclmdlQuerySizeFromMem", 107002, DeviceError),
        ("aclmdlLoadFromMemWithMem", 507899, DeviceError),
        ("aclrtSetDevice", 507899, DeviceError),
    ],
)
def test_a_load_that_fails_leaves_nothing(
    double: Installed, driver: Driver, built: bytes, call: str, status: int, error: type[Exception]
) -> None:
    double.reset(work=4096, weights=512)
    double.library.double_forget_device()
    driver.open(0)
    double.library.double_forget_device()
    double.fail(call, status)
    with pytest.raises(error) as caught:
        driver.load(built, SOC)
    assert type(caught.value) is error
    assert double.library.double_used(0) == double.library.double_models() == 0


def test_a_device_without_room(double: Installed, driver: Driver, built: bytes) -> None:
    double.reset(memory=4000, work=4096)
    with pytest.raises(DeviceMemoryError, match="4096 bytes"):
        driver.load(built, SOC)
    double.reset(memory=40)
    handle = driver.load(built, SOC)
    with pytest.raises(DeviceMemoryError, match="a run"):  # for the second of two tensors
        run(driver, handle)
    driver.unload(handle)
    assert double.library.double_used(0) == double.library.double_objects() == 0


def test_a_run_that_fails(double: Installed, driver: Driver, built: bytes) -> None:
    handle = driver.load(built, SOC)
    double.fail("aclmdlExecuteAsync", 507899)
    with pytest.raises(DeviceError, match="507899"):
        run(driver, handle)
    run(driver, handle)
    driver.unload(handle)


def test_tensors_in_formats_of_the_chip_are_made_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = {"plain": 2, "private": 29}
    extension = SimpleNamespace(
        get_npu_format=lambda t: formats[t.name],
        npu_format_cast=lambda t, fmt: SimpleNamespace(name="cast", fmt=fmt),
    )
    monkeypatch.setitem(sys.modules, "torch_npu", extension)
    plain, private = (
        SimpleNamespace(name=name, device=SimpleNamespace(type="npu")) for name in formats
    )
    assert as_plain(plain) is plain  # type: ignore[comparison-overlap, arg-type]
    assert as_plain(private).fmt == 2  # type: ignore[arg-type, attr-defined]
    host = torch.ones(2)
    assert as_plain(host) is host


class OnDevice:
    """A tensor as torch_npu gives it, in the memory of a device of the double."""

    def __init__(self, library: Any, index: int, values: Tensor) -> None:
        import ctypes

        self._memory = ctypes.c_void_p()
        library.aclrtSetDevice(index)
        size = ctypes.c_size_t(values.nbytes)
        assert library.aclrtMalloc(ctypes.byref(self._memory), size, 0) == 0
        assert self._memory.value is not None
        self.device = SimpleNamespace(type="npu", index=index)
        content = (ctypes.c_char * values.nbytes).from_address(self._memory.value)
        self.values = torch.frombuffer(content, dtype=values.dtype).view(values.shape)
        self.values.copy_(values)
        self.dtype, self.shape = values.dtype, values.shape
        self.numel, self.dim, self.element_size = values.numel, values.dim, values.element_size
        self.data_ptr = self.values.data_ptr

    def to(self, where: Any) -> OnDevice:
        assert where is self.device or where == self.device
        return self


def test_tensors_of_a_device_run_there_on_its_current_stream(
    double: Installed, driver: Driver, built: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ctypes

    given = torch.tensor([[-1.0, 2, -3], [4, -5, 6]])
    x = OnDevice(double.library, 1, given)
    y = OnDevice(double.library, 1, torch.zeros(2, 3))
    stream = ctypes.c_void_p()
    double.library.aclrtSetDevice(1)
    assert double.library.aclrtCreateStream(ctypes.byref(stream)) == 0
    asked: list[Any] = []

    def current_stream(device: Any) -> SimpleNamespace:
        asked.append(device.index)
        return SimpleNamespace(npu_stream=stream.value)

    monkeypatch.setattr(torch, "npu", SimpleNamespace(current_stream=current_stream), raising=False)
    double.library.aclrtSetDevice(0)
    copies = double.calls("aclrtMemcpy")
    model = Model(driver, built, SOC, dynamic=False)
    model([x], [y])  # type: ignore[list-item]
    assert asked == [1] and double.library.double_current() == 0
    assert not y.values.any()  # nobody waited for the stream
    double.library.aclrtSetDevice(1)
    assert double.library.aclrtSynchronizeStream(stream) == 0
    assert torch.equal(y.values, given.abs()) and double.calls("aclrtMemcpy") == copies
    for tensor in (x, y):
        assert double.library.aclrtFree(tensor._memory) == 0


# ---- from torch.compile --------------------------------------------------------------------------


def compiled(fn: Any, runs_on: str = "device", **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend=Backend("ascend", runs_on=runs_on, cache=False), **options)


def test_tensors_of_the_host_stay_there_unless_asked(double: Installed) -> None:
    backend = Backend("ascend", runs_on="auto", cache=False)
    torch._dynamo.reset()
    x = torch.rand(3)
    assert torch.equal(torch.compile(torch.sigmoid, backend=backend)(x), torch.sigmoid(x))
    (node,) = backend.reports[-1].nodes
    assert node.decision == "eager" and "where there is a device" in node.reason
    assert double.calls("aclmdlExecuteAsync") == 0
    torch.testing.assert_close(compiled(torch.sigmoid)(x), torch.sigmoid(x))
    assert double.calls("aclmdlExecuteAsync") == 1


def test_a_graph_writes_to_tensors_of_the_host(double: Installed) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        before = x.sum(-1)
        x[:, 1:2] = y
        return before * x.sum(-1)

    mine, eager, y = torch.ones(2, 4), torch.ones(2, 4), torch.full((2, 1), 5.0)
    assert torch.equal(compiled(fn)(mine, y), fn(eager, y))
    assert torch.equal(mine, eager)


class Block(nn.Module):
    """The parts of BERT, llama and ResNet-50 that the operators missing in 2023 stood for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm2d = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.ln, self.rms = nn.LayerNorm(16), nn.RMSNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.norm2d(self.conv(image))).flatten(2)
        x = F.gelu(self.ln(x + 1)) + F.gelu(x, approximate="tanh")
        gate, up = self.up(self.rms(x + self.down(x))).chunk(2, -1)
        y = F.silu(gate) * up
        return F.scaled_dot_product_attention(y[None], y[None], y[None], is_causal=True)[0]


@pytest.mark.sweep
@pytest.mark.parametrize("header_set", ["2023", "2025"])
def test_models_run_with_the_operators_of_both_sets(
    double: Installed, header_set: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(double.roots[header_set]))
    double.device.operators = cann.operators(header_set)
    torch.manual_seed(0)
    block, image = Block(), torch.randn(2, 4, 4, 4)
    for batch in (image, torch.randn(3, 4, 4, 4))[: 1 + dynamic]:
        eager = block(batch)
        wanted = torch.autograd.grad(eager.sum(), list(block.parameters()))
        made = compiled(block, dynamic=dynamic)(batch)
        got = torch.autograd.grad(made.sum(), list(block.parameters()))
        torch.testing.assert_close(made, eager, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert double.calls("aclmdlExecuteAsync") > 0
