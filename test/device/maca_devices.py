"""macagraph on two devices: `python maca_devices.py CHECK` runs a function that follows `Runtime`.

The simulated chip carries the devices, with PyTorch's tensors, streams and contexts: nothing else
has two of them without hardware. `Runtime` plays libmcruntime on it and runs the emulation's code
of the kernels.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from support.nvidia import kernels_of
from torch import Tensor
from torch.testing import assert_close

from dicp import Backend, torch_private
from dicp.cache import key_of
from dicp.config import Config
from dicp.device.active import dipu
from dicp.device.build import load_simulator
from dicp.gpu.module_driver import DriverApi, ModuleDriver
from dicp.vendor.maca import MacaTarget, builder, target
from dicp.vendor.maca.simulator import host_compiler

REFUSED, ILLEGAL_ADDRESS = 400, 700
CHIP = load_simulator(Config.from_env())
COMPILED: list[str] = []
"""Kernels that the stand-in of mxcc has compiled."""


# ---- MetaX's toolkit over the simulated chip -----------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    """Plays mxcc: an image is what the emulation's kernels take, a line of JSON, and their code."""

    config: Config
    defines: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        return key_of("stand-in", *self.defines)

    def compile(self, text: str, names: Sequence[str]) -> bytes:
        COMPILED.extend(names)
        heads = {name: body.partition(") {")[0] for name, body in kernels_of(text).items()}
        counts = {n: (h.count("d_global<"), h.count("const d_index")) for n, h in heads.items()}
        about = {"narrow": "-DD_NARROW" in self.defines, "counts": counts}
        code = host_compiler(self.config).compile(text, names)
        return json.dumps(about).encode() + b"\n" + code


@dataclass(frozen=True)
class Loaded:
    """A module on a device."""

    device: int
    library: ctypes.CDLL
    about: dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """Where a kernel was launched."""

    device: int
    stream: int
    thread: int


class Runtime:
    """Modules, kernels, streams and memory are a device's: a thread that uses them while another
    device is current is refused."""

    def __init__(self) -> None:
        self.handles = count(1)
        self.modules: dict[int, Loaded] = {}
        self.functions: dict[int, tuple[Loaded, str]] = {}
        self.launches: list[Launch] = []
        self.unloaded: list[int] = []
        self.folder = tempfile.TemporaryDirectory()
        # Functions of their own: the driver sets ctypes' attributes on them.
        self.mcModuleLoadData = partial(self._load)
        self.mcModuleUnload = partial(self._unload)
        self.mcModuleGetFunction = partial(self._function)
        self.mcModuleLaunchKernel = partial(self._launch)
        self.mcGetErrorName = partial(lambda status: f"status {status}".encode())

    def _load(self, module: Any, image: bytes) -> int:
        about, _, code = image.partition(b"\n")
        handle = next(self.handles)
        path = Path(self.folder.name, f"{handle}.so")
        path.write_bytes(code)
        device = dipu.current_device()
        self.modules[handle] = Loaded(device, ctypes.CDLL(str(path)), json.loads(about))
        module._obj.value = handle
        return 0

    def _unload(self, module: int) -> int:
        if self.modules[module].device != dipu.current_device():
            return REFUSED
        self.unloaded.append(self.modules.pop(module).device)
        return 0

    def _function(self, function: Any, module: int, name: bytes) -> int:
        if self.modules[module].device != dipu.current_device():
            return REFUSED
        handle = next(self.handles)
        self.functions[handle] = self.modules[module], name.decode()
        function._obj.value = handle
        return 0

    def _launch(self, function: int, *rest: Any) -> int:
        module, name = self.functions[function]
        stream, parameters = rest[7], rest[8]
        current = dipu.current_stream()
        if (module.device, stream) != (current.device_index, current.stream_id):
            return REFUSED
        pointers, sizes = module.about["counts"][name]
        width = ctypes.c_int32 if module.about["narrow"] else ctypes.c_int64
        args = (ctypes.c_void_p * pointers)(*_values(parameters[:pointers], ctypes.c_void_p))
        numbers = _values(parameters[pointers : pointers + sizes], width)
        if any(_device_of(address) != module.device for address in args):
            return ILLEGAL_ADDRESS
        current.synchronize()
        own = (ctypes.c_long * 4)()
        module.library[f"{name}_run"](args, (ctypes.c_long * (sizes + 1))(*numbers), own)
        self.launches.append(Launch(module.device, stream, threading.get_ident()))
        return own[0]

    def devices(self) -> list[int]:
        """The devices of the launches since the last call."""
        found = [launch.device for launch in self.launches]
        self.launches.clear()
        return found


def _values(addresses: Sequence[int], kind: Any) -> list[int]:
    return [kind.from_address(address).value for address in addresses]


def _device_of(address: int) -> int:
    found = ctypes.c_int(-1)
    CHIP.dicp_rt_address_device(ctypes.c_void_p(address), ctypes.byref(found))
    return found.value


# ---- the checks ----------------------------------------------------------------------------------


def two_kernels(x: Tensor) -> Tensor:
    """Kernels with a workspace between them."""
    return torch.softmax(x, 1).sum(0) * 2


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """The same tensor on the host, and on each device."""
    x = torch.randn(40, 96)
    return x, x.to("dipu:0"), x.to("dipu:1")


def same(found: Tensor, wanted: Tensor, device: int) -> None:
    assert found.device == torch.device("dipu", device), found.device
    assert_close(found.cpu(), wanted)


def a_function_on_one_device_and_then_on_the_other(runtime: Runtime, backend: Backend) -> None:
    """Kernels are compiled once and loaded once on each device, whichever device is current."""
    x, *on_device = inputs()
    wanted = two_kernels(x)
    compiled = torch.compile(two_kernels, backend=backend, dynamic=False)
    for current in (0, 1):
        with dipu.device(current):
            for device in (0, 1, 0):
                same(compiled(on_device[device]), wanted, device)
                assert runtime.devices() == [device, device]
            assert dipu.current_device() == current
    assert len(COMPILED) == len(set(COMPILED)) and len(backend.reports) == 2
    loaded = [module.device for module in runtime.modules.values()]
    assert sorted(loaded) == [0, 1]
    torch.compiler.reset()  # the graphs of both devices are in the cache
    for device in (1, 0):
        same(compiled(on_device[device]), wanted, device)
        assert set(runtime.devices()) == {device}
    assert len(COMPILED) == len(set(COMPILED))


def kernels_run_on_the_current_stream_of_their_device(runtime: Runtime, backend: Backend) -> None:
    x, zero, one = inputs()
    compiled = torch.compile(two_kernels, backend=backend, dynamic=False)
    side = dipu.Stream(device="dipu:1")
    assert side.stream_id != 0
    with dipu.stream(side), dipu.device(0):
        same(compiled(one), two_kernels(x), 1)
        same(compiled(zero), two_kernels(x), 0)
    same(compiled(one), two_kernels(x), 1)
    found = {(launch.device, launch.stream) for launch in runtime.launches}
    assert found == {(1, side.stream_id), (0, 0), (1, 0)}


def tensors_made_under_a_default_device(runtime: Runtime, backend: Backend) -> None:
    def made() -> Tensor:
        return torch.softmax(torch.ones(40, 96).cumsum(1), 1) + 1

    compiled = torch.compile(made, backend=backend, dynamic=False)
    for device in (1, 0):
        with torch.device(device):
            found = compiled()
        same(found, made(), device)
        assert set(runtime.devices()) == {device}


def threads_on_both_devices(runtime: Runtime, backend: Backend) -> None:
    """Two on each, of one function: a new thread's current device is the first."""
    x, *on_device = inputs()
    wanted = two_kernels(x)
    compiled = torch.compile(two_kernels, backend=backend, dynamic=False)
    for device in (0, 1):
        compiled(on_device[device])
    runtime.launches.clear()
    start = threading.Barrier(4)

    def runs(device: int) -> int:
        start.wait(60)
        for _ in range(8):
            same(compiled(on_device[device]), wanted, device)
            assert dipu.current_device() == 0
        return threading.get_ident()

    devices = (0, 1, 0, 1)
    with ThreadPoolExecutor(4) as pool:
        threads = list(pool.map(runs, devices))
    assert len(set(threads)) == 4
    found = {(launch.device, launch.thread) for launch in runtime.launches}
    assert found == set(zip(devices, threads, strict=True))


def training_on_the_device_that_is_not_current(runtime: Runtime, backend: Backend) -> None:
    """The backward graph runs in a thread of autograd's."""
    x, _, one = inputs()
    compiled = torch.compile(lambda x: two_kernels(x).exp(), backend=backend, dynamic=False)
    grads = []
    for run, leaf in ((compiled, one), (lambda x: two_kernels(x).exp(), x)):
        leaf.requires_grad_()
        run(leaf).sum().backward()
        grads.append(leaf.grad)
    same(grads[0], grads[1], 1)
    assert len({launch.thread for launch in runtime.launches}) == 2
    assert set(runtime.devices()) == {1}
    assert len(backend.reports) == 2


def tensors_of_two_devices_in_one_call(runtime: Runtime, backend: Backend) -> None:
    """What lies on the second device runs eagerly there, as on every target."""

    def apart(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows, z = torch.softmax(x, 1) + 1, y * 3
        return rows, z, z.to(x.device) + x

    x, zero, one = inputs()
    compiled = torch.compile(apart, backend=backend, dynamic=False)
    for current in (0, 1):
        with dipu.device(current):
            found = compiled(zero, one)
            for value, wanted, device in zip(found, apart(x, x), (0, 1, 0), strict=True):
                same(value, wanted, device)
            assert set(runtime.devices()) == {0}
    (report,) = backend.reports
    reasons = {n.op: n.reason for n in report.nodes if n.decision == "eager"}
    assert reasons["aten.mul.Tensor"] == "tensor on dipu:1 in a graph on dipu:0", reasons


def one_operator_of_tensors_on_two_devices(runtime: Runtime, backend: Backend) -> None:
    _, zero, one = inputs()
    try:
        torch.compile(torch.add, backend=backend)(zero, one)
    except RuntimeError as error:
        text = str(error)
        assert "add" in text and "dipu:0" in text and "dipu:1" in text, text
    else:
        raise AssertionError("they were added")
    assert not runtime.launches


def modules_are_unloaded_on_their_device(runtime: Runtime, backend: Backend) -> None:
    _, *on_device = inputs()
    for device in (0, 1):
        torch.compile(two_kernels, backend=backend, dynamic=False)(on_device[device])
    torch.compiler.reset()
    backend.reports.clear()
    gc.collect()
    torch.compile(torch.exp, backend=backend)(on_device[0])  # the next load unloads
    assert sorted(runtime.unloaded) == [0, 1]


def main(check: Callable[[Runtime, Backend], None]) -> None:
    torch.manual_seed(0)
    runtime = Runtime()
    MacaTarget.device_type = "dipu"
    builder.device_compiler = Compiler
    torch_private.current_stream = lambda device: int(dipu.current_stream(device).stream_id)

    def open_driver(api: DriverApi, folders: tuple[str, ...], lanes: int, arch: str) -> Any:
        return ModuleDriver(replace(api, device_type="dipu"), runtime, lanes, arch)

    target.open_driver = open_driver
    with tempfile.TemporaryDirectory() as folder:
        check(runtime, Backend("maca", cache_dir=folder))


if __name__ == "__main__":
    main(globals()[sys.argv[1]])
