"""Compiling and launching MACA C++ for a device: what can be said of it without one.

The toolkit is a stand-in that writes down what it is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import MacaRecorder, record
from torch._dynamo.exc import BackendCompilerFailed

from dicp import torch_private
from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend, target_for_devices
from dicp.errors import CompilerError, LaunchError, ToolchainError
from dicp.gpu.launch import Device
from dicp.gpu.module_driver import ModuleDriver, open_driver
from dicp.serialize import evaluate_size
from dicp.target import find_target
from dicp.vendor.maca import MacaTarget
from dicp.vendor.maca.builder import Builder, Plan
from dicp.vendor.maca.facts import MIN_WAVE
from dicp.vendor.maca.toolchain import driver_api, find_mxcc
from dicp.vendor.triton import TritonTarget

MXCC = """#!/bin/sh
echo "$@" >> {folder}/commands
case "$1" in --version) echo "mxcc stand-in 1.0"; exit 0;; esac
if [ -e {folder}/fail ]; then
  line=$(grep -n -m1 "$(cat {folder}/fail)" unit.maca | cut -d: -f1)
  echo "unit.maca:$line:3: error: no such type"; exit 1
fi
cat unit.maca > unit.so
"""
RUNTIME = """
extern "C" {
unsigned long seen[8];
int load_result, function_result, launch_result;
int mcModuleLoadData(void** module, const char*) { *module = (void*)5; return load_result; }
int mcModuleGetFunction(void** f, void*, const char*) {
  *f = (void*)0x123456789abcul;
  return function_result;
}
int mcModuleUnload(void*) { return 0; }
const char* mcGetErrorName(int code) { return code == 719 ? "mcErrorLaunchFailure" : "mcError"; }
int mcModuleLaunchKernel(void* f, unsigned x, unsigned, unsigned, unsigned threads, unsigned,
                         unsigned, unsigned shared, void* stream, void** parameters, void**) {
  unsigned long now[] = {(unsigned long)f, x, threads, shared, (unsigned long)stream,
                         *(unsigned long*)parameters[0], *(unsigned long*)parameters[1],
                         *(unsigned*)parameters[2]};
  for (int k = 0; k < 8; ++k) seen[k] = now[k];
  return launch_result;
}
}
"""


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a toolkit whose compiler copies, and whose runtime keeps its last launch."""
    folder = tmp_path_factory.mktemp("maca")
    compiler = folder / "mxgpu_llvm" / "bin" / "mxcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(MXCC.format(folder=folder))
    compiler.chmod(0o755)
    (folder / "lib").mkdir()
    (folder / "runtime.cpp").write_text(RUNTIME)
    built = str(folder / "lib" / "libmcruntime.so")
    command = ["g++", "-shared", "-fPIC", str(folder / "runtime.cpp"), "-o", built]
    subprocess.run(command, check=True)
    return folder


def config_with(folder: Path, **options: Any) -> Config:
    config = Config.from_env({}, MacaTarget.options)
    return config.with_options({"maca_path": str(folder), **options}, vendor=MacaTarget.options)


@pytest.fixture
def driver(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleDriver:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *index: "MetaX C500")
    monkeypatch.setattr(torch_private, "current_stream", lambda device: 77)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return open_driver(*driver_api(config_with(toolkit)))


@pytest.fixture(autouse=True)
def repaired(toolkit: Path) -> Iterator[None]:
    """What one test breaks in the toolkit works in the next."""
    yield
    for name in ("load_result", "function_result", "launch_result"):
        set_result(toolkit, name, 0)
    (toolkit / "fail").unlink(missing_ok=True)


def set_result(toolkit: Path, name: str, value: int) -> None:
    library = ctypes.CDLL(str(toolkit / "lib" / "libmcruntime.so"))
    ctypes.c_int.in_dll(library, name).value = value


def plan_of(fn: Callable[..., Any], *inputs: Any, **options: Any) -> Plan:
    target = record(fn, *inputs, target=MacaRecorder(), **options)
    (program,) = target.programs
    return Plan(program.serialized, program.kernel_texts, 0)


def sizes_of(plan: Plan) -> dict[str, int]:
    return dict(zip(plan.program["symbols"], (40, 25), strict=False))


def segment_of(plan: Plan, toolkit: Path, cache: Path, driver: ModuleDriver) -> Any:
    config = config_with(toolkit, cache_dir=cache)
    device = Device(plan, Builder(Cache.open(config), config), driver, 0)
    table = (ctypes.c_void_p * len(plan.buffers))()
    for k in range(len(plan.buffers)):
        table[k] = 0x7F00_0000_1000 + 4096 * k
    sizes = sizes_of(plan)
    steps = [s for s in plan.program["steps"] if "kernel" in s]
    return device.segment(steps, sizes, table, None), steps


def test_a_kernel_is_compiled_and_launched_with_addresses_and_sizes(
    toolkit: Path, tmp_path: Path, driver: ModuleDriver
) -> None:
    plan = plan_of(lambda x: torch.relu(x) + 1, torch.ones(40, 25), dynamic=True)
    segment, (step,) = segment_of(plan, toolkit, tmp_path, driver)
    assert segment.run() == 0
    command = (toolkit / "commands").read_text().splitlines()[-1]
    for flag in (
        "-x maca", "--fatbin", "--offload-arch=native", "-O3", "-fPIC", "-std=c++17",
        "-ffp-contract=off", "-fno-strict-aliasing", "-DD_NARROW",
    ):  # fmt: skip
        assert flag in command
    library = ctypes.CDLL(str(toolkit / "lib" / "libmcruntime.so"))
    seen = list((ctypes.c_ulong * 8).in_dll(library, "seen"))
    block, warps = step["launch"]["axes"]["x"]["block"], step["launch"]["warps"]
    assert seen[:5] == [0x1234_5678_9ABC, -(-1000 // block), MIN_WAVE * warps, 0, 77]
    size = evaluate_size(step["symbols"][0], sizes_of(plan))
    assert seen[5:] == [*(0x7F00_0000_1000 + 4096 * slot for slot in step["args"]), size]


def test_a_launch_in_a_thread_without_a_context_is_repeated_with_the_devices(
    toolkit: Path, tmp_path: Path, driver: ModuleDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []

    def synchronize(device: int) -> None:
        entered.append(device)
        set_result(toolkit, "launch_result", 0)

    segment, _ = segment_of(plan_of(torch.relu, torch.ones(40, 25)), toolkit, tmp_path, driver)
    assert segment.run() == 0
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    set_result(toolkit, "launch_result", 201)
    assert segment.run() == 0
    assert entered == [0]


def test_kernels_are_loaded_during_a_capture_without_waiting_for_the_device(
    toolkit: Path, tmp_path: Path, driver: ModuleDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To wait ends a capture, and the program to capture loads its kernels then."""
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for capturing in (False, True):
        monkeypatch.setattr(torch_private, "capturing", lambda now=capturing: now)
        segment, _ = segment_of(plan_of(torch.relu, torch.ones(40, 25)), toolkit, tmp_path, driver)
        assert segment.run() == 0
        assert waited == [0]


def test_large_tensors_get_kernels_with_wide_indices(toolkit: Path, tmp_path: Path) -> None:
    plan = plan_of(lambda x: torch.relu(x) + 1, torch.ones(40, 25), dynamic=True)
    step = next(s for s in plan.program["steps"] if "kernel" in s)
    config = config_with(toolkit, cache_dir=tmp_path)
    names = list(plan.program["symbols"])
    for sizes, narrow in (((40, 25), True), ((1 << 20, 1 << 12), False)):
        variant = plan.variant(step, dict(zip(names, sizes, strict=True)))
        Builder(Cache.open(config), config).build([plan.job(step, variant)])
        command = (toolkit / "commands").read_text().splitlines()[-1]
        assert ("-DD_NARROW" in command) == narrow


def test_kernels_test_addresses_only_where_a_launch_has_unaligned_tensors(
    toolkit: Path, tmp_path: Path
) -> None:
    plan = plan_of(lambda x: torch.relu(x) + 1, torch.ones(40, 24), dynamic=False)
    step = next(s for s in plan.program["steps"] if "kernel" in s)
    config = config_with(toolkit, cache_dir=tmp_path)
    for misaligned in (frozenset(), frozenset(step["args"][:1])):
        job = plan.job(step, plan.variant(step, {}, misaligned))
        Builder(Cache.open(config), config).build([job])
        command = (toolkit / "commands").read_text().splitlines()[-1]
        assert ("-DD_ALIGNED" in command) == (not misaligned)


def test_a_refused_launch_names_kernel_grid_and_status(
    toolkit: Path, tmp_path: Path, driver: ModuleDriver
) -> None:
    plan = plan_of(lambda x: torch.relu(x) + 1, torch.ones(40, 25), dynamic=True)
    segment, (step,) = segment_of(plan, toolkit, tmp_path, driver)
    set_result(toolkit, "launch_result", 719)
    blocks = -(-1000 // step["launch"]["axes"]["x"]["block"])
    shape = f"{blocks} blocks of {MIN_WAVE * step['launch']['warps']} threads and 0 bytes"
    wanted = rf"(?s){step['kernel']}.*mcErrorLaunchFailure \(719\), with {shape}.*aten.relu"
    with pytest.raises(LaunchError, match=wanted):
        segment.run()


def test_a_refused_kernel_is_an_error_with_the_status(
    toolkit: Path, tmp_path: Path, driver: ModuleDriver
) -> None:
    segment, _ = segment_of(plan_of(torch.relu, torch.ones(40, 25)), toolkit, tmp_path, driver)
    set_result(toolkit, "function_result", 719)
    with pytest.raises(ToolchainError, match=r"mcErrorLaunchFailure \(719\)"):
        segment.run()


def test_code_for_another_chip_names_both(
    toolkit: Path, tmp_path: Path, driver: ModuleDriver
) -> None:
    segment, _ = segment_of(plan_of(torch.relu, torch.ones(40, 25)), toolkit, tmp_path, driver)
    set_result(toolkit, "load_result", 209)
    with pytest.raises(ToolchainError, match=r"--offload-arch=native.*MetaX C500"):
        segment.run()


def test_the_compilers_first_error_names_the_users_line(toolkit: Path, tmp_path: Path) -> None:
    plan = plan_of(lambda x: torch.relu(x) + 3, torch.ones(40, 25))
    config = config_with(toolkit, cache_dir=tmp_path)
    (toolkit / "fail").touch()
    wanted = r"(?s)no such type.*aten\.relu.*test_maca_device\.py:\d+"
    with pytest.raises(CompilerError, match=wanted):
        Builder(Cache.open(config), config).build(plan.jobs())


def test_the_kernel_that_the_compiler_refuses_is_named(toolkit: Path, tmp_path: Path) -> None:
    plan = plan_of(lambda x, y: (torch.relu(x), y.exp()), torch.ones(40, 25), torch.ones(7))
    config = config_with(toolkit, cache_dir=tmp_path)
    relu, exp = sorted(plan.texts, key=lambda name: "exp" in name)
    (toolkit / "fail").write_text("d_exp(")
    with pytest.raises(CompilerError, match=rf"(?s)kernel {exp}.*aten\.exp") as caught:
        Builder(Cache.open(config), config).build(plan.jobs())
    assert relu not in str(caught.value) and "aten.relu" not in str(caught.value)


def test_kernels_are_compiled_once_for_a_compiler_and_an_architecture(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(torch.relu, torch.ones(40, 25))
    compiler = toolkit / "mxgpu_llvm" / "bin" / "mxcc"

    def compilations(**options: Any) -> int:
        commands = toolkit / "commands"
        before = len(commands.read_text().splitlines()) if commands.exists() else 0
        config = config_with(toolkit, cache_dir=tmp_path, **options)
        Builder(Cache.open(config), config).build(plan.jobs())
        new = commands.read_text().splitlines()[before:]
        return sum("--fatbin" in command for command in new)

    assert [compilations(), compilations()] == [1, 0]
    other = "--offload-arch=xcore1500"
    assert [compilations(maca_flags=other), compilations(maca_flags=other)] == [1, 0]
    before = compiler.read_text()
    compiler.write_text(before.replace("stand-in 1.0", "stand-in 1.1"))
    assert [compilations(), compilations()] == [1, 0]
    compiler.write_text(before)
    assert compilations() == 0
    for chips in (["C500"], ["C600"], ["C500", "C600"]):  # native is another architecture
        monkeypatch.setattr(torch.cuda, "device_count", lambda names=chips: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda k=0, names=chips: names[k])
        assert [compilations(), compilations()] == [1, 0]


def test_a_missing_runtime_library_is_named_with_its_paths(toolkit: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "mxgpu_llvm" / "bin" / "mxcc"
    compiler.parent.mkdir(parents=True)
    shutil.copy(toolkit / "mxgpu_llvm" / "bin" / "mxcc", compiler)
    backend = Backend("maca", cache=False, runs_on="device", maca_path=str(tmp_path))
    wanted = rf"{tmp_path}/lib/libmcruntime\.so.*MACA_PATH"
    with pytest.raises(BackendCompilerFailed, match=wanted):
        torch.compile(torch.relu, backend=backend)(torch.ones(3))


def test_tensors_on_the_host_are_refused_where_the_device_is_asked_for(toolkit: Path) -> None:
    backend = Backend("maca", cache=False, runs_on="device", maca_path=str(toolkit))
    with pytest.raises(BackendCompilerFailed, match="Move the model and its inputs.*'cuda'"):
        torch.compile(torch.relu, backend=backend)(torch.ones(3))


def test_a_missing_toolkit_is_named_with_its_path(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    wanted = rf"{missing}/mxgpu_llvm/bin/mxcc.*MACA_PATH"
    with pytest.raises(ToolchainError, match=wanted):
        find_mxcc(config_with(Path(missing)))
    backend = Backend("maca", cache_dir=tmp_path, runs_on="device", maca_path=missing)
    with pytest.raises(BackendCompilerFailed, match=wanted):
        torch.compile(torch.relu, backend=backend)(torch.ones(3))
    api, _, lanes, arch = driver_api(config_with(Path(missing)))
    with pytest.raises(ToolchainError, match=rf"{missing}/lib/libmcruntime\.so.*MACA_PATH"):
        open_driver(api, (f"{missing}/lib",), lanes, arch)


def test_a_library_without_a_function_of_the_runtime_is_not_taken(tmp_path: Path) -> None:
    source = tmp_path / "empty.c"
    source.write_text("int mcModuleLoadData(void) { return 0; }")
    built = tmp_path / "libmcruntime.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    api, _, lanes, arch = driver_api(config_with(tmp_path))
    with pytest.raises(ToolchainError, match=rf"{built}.*mcModuleLaunchKernel and the others"):
        open_driver(api, (str(tmp_path),), lanes, arch)


def test_metax_builds_of_pytorch_prefer_this_target(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MacaTarget().priority < TritonTarget().priority
    monkeypatch.setattr(torch, "__version__", "2.6.0+metax3.2")
    assert MacaTarget().priority > TritonTarget().priority


def test_doctor_reports_compiler_library_and_chip(
    toolkit: Path, driver: ModuleDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checks = MacaTarget().doctor(config_with(toolkit))
    assert {c.name: c.detail for c in checks} == {
        "mxcc": "mxcc stand-in 1.0", "runtime library": "mcModuleLaunchKernel",
        "device": "MetaX C500",
    }  # fmt: skip
    assert all(c.ok for c in checks)


def test_the_emulation_needs_no_toolkit_beside_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = {runs_on: config_with(tmp_path, runs_on=runs_on) for runs_on in ("auto", "simulator")}
    keys = {runs_on: MacaTarget().fingerprint(config) for runs_on, config in asked.items()}
    assert keys["auto"] != keys["simulator"] == MacaTarget().fingerprint(asked["simulator"])
    assert MacaTarget().simulated(asked["simulator"]) and not MacaTarget().simulated(asked["auto"])
    checks = {c.name: c.ok for c in MacaTarget().doctor(asked["simulator"])}
    assert checks == {"mxcc": True, "runtime library": True, "simulator": True, "build": True}


def test_doctor_reports_the_compiler_for_an_nvidia_gpu(tmp_path: Path) -> None:
    checks = {c.name: c for c in MacaTarget().doctor(config_with(tmp_path, maca_nvidia=90))}
    assert checks["NVRTC"].ok and re.fullmatch(r"nvrtc \d+\.\d+", checks["NVRTC"].detail)
    assert "mxcc" not in checks
    assert re.search(r"libcuda\.so|^cuLaunchKernel$", checks["runtime library"].detail)


def test_dynamo_knows_both_names() -> None:
    assert {"macagraph", "maca"} <= set(torch.compiler.list_backends())


@pytest.mark.parametrize(("version", "chosen"), [("2.6.0+metax3.2", "maca"), ("2.6.0", "triton")])
def test_the_automatic_backend_takes_the_target_of_pytorchs_build(
    version: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(find_target("maca"), "priority", MacaTarget().priority)
    assert target_for_devices({"cuda"}).name == chosen


def test_the_same_operators_are_compiled_as_for_other_gpus() -> None:
    assert MacaTarget.rules is TritonTarget.rules
    assert MacaTarget.facts == TritonTarget.facts
    assert MacaTarget.lowering.atomic_dtypes == TritonTarget.lowering.atomic_dtypes
    for decision in ("decide", "decide_on", "unsupported", "rules_for"):
        assert getattr(MacaTarget, decision) is getattr(TritonTarget, decision)
