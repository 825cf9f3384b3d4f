"""topsgraph on an installed TopsRider: a stand-in of its headers and library, made of the
simulator's, under the newer prefix of its headers. What is tested is the way to the device."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend
from dicp.graphop.simulator import with_header
from dicp.vendor.tops import TopsTarget, toolchain
from dicp.vendor.tops.simulator.device import Simulator

NEWER, OLDER = "gcu", "dtu"


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with headers and a library."""
    root = tmp_path_factory.mktemp("topsrider")
    for source in toolchain.INCLUDES.rglob("*.h"):
        name = source.relative_to(toolchain.INCLUDES)
        parts = [NEWER if part == OLDER else part for part in name.parts]
        header = root.joinpath("include", *parts)
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(source.read_text().replace(f'"{OLDER}/', f'"{NEWER}/'))
    sources = [toolchain.FOLDER / "simulator" / name for name in ("hlir.cpp", "runtime.cpp")]
    (root / "sdk.cpp").write_text(with_header(*sources).replace(f'"{OLDER}/', f'"{NEWER}/'))
    (root / "lib").mkdir()
    library = root / "lib" / f"lib{toolchain.LIBRARY}.so"
    flags = ["-std=c++17", "-O0", "-w", "-fPIC", "-shared", f"-I{root / 'include'}"]
    subprocess.run(["g++", *flags, str(root / "sdk.cpp"), "-o", str(library)], check=True)
    return root


@pytest.fixture
def device(sdk: Path, monkeypatch: pytest.MonkeyPatch) -> Simulator:
    """What runs the graphs that the library is given."""
    monkeypatch.setenv("TOPS_HOME", str(sdk))
    path = sdk / "lib" / f"lib{toolchain.LIBRARY}.so"
    return Simulator(ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL))


def test_graphs_are_built_for_and_run_by_the_installation(device: Simulator, recwarn: Any) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU()), torch.randn(3, 4)
    torch._dynamo.reset()
    backend = Backend("tops", cache=False, runs_on="device")
    for _ in range(2):  # host tensors, copied to the device and back
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert device.counts["launches"] == 2 and device.options[0] == "-arch=gcu200"
    assert not any("SimulatorWarning" in str(w.category) for w in recwarn)


def test_host_tensors_stay_on_the_host_unless_the_device_is_asked_for(device: Simulator) -> None:
    torch._dynamo.reset()
    backend = Backend("tops", cache=False)
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(torch.relu, backend=backend)(x), x.relu())
    (node,) = [node for report in backend.reports for node in report.nodes]
    assert node.decision == "eager" and "a tensor of the host" in node.reason
    assert device.counts["launches"] == 0


def test_doctor_names_the_installation(device: Simulator, sdk: Path) -> None:
    checks = {check.name: check for check in TopsTarget().doctor(Config())}
    assert checks["TopsRider"].detail == f"{sdk}, headers {NEWER}/"
    assert checks["devices"].ok and checks["devices"].detail == "1"
