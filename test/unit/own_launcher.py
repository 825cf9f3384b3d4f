"""Triton's own driver module launches compiled kernels into the stand-in for NVIDIA's library.

Run by a test: `own_launcher.py LIBRARY STREAM`, tasks as JSON on the input; prints the launches.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from cuda_stub import MOST, Record
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dicp.vendor.triton import worker

Nvidia = importlib.import_module("triton.backends.nvidia.driver")


class OneDevice(Nvidia.CudaDriver):  # type: ignore[misc, name-defined]
    """Triton's driver without a framework that would ask for a device."""

    def get_current_device(self) -> int:
        return 0


def compiled(request: dict[str, Any], folder: Path) -> Any:
    """The kernel as the compile worker builds it, in Triton's own form."""
    maker = worker.Worker(folder)
    function = maker.kernel(request["name"], request["body"])
    constants = {k: worker.TYPES.get(str(v), v) for k, v in request["constants"].items()}
    aligned = {(k,): [["tt.divisibility", 16]] for k in request["aligned"]}
    source = ASTSource(function, request["signature"], constants, aligned)
    target = GPUTarget(*request["target"])
    known = worker._options_of(target).__dataclass_fields__
    options = {k: v for k, v in request["options"].items() if k in known}
    return triton.compile(source, target=target, options=options), source


def launch(task: dict[str, Any], stub: Any, stream: int, folder: Path) -> dict[str, Any]:
    driver: Any = triton.runtime.driver.active
    kernel, source = compiled(task["request"], folder)
    metadata = kernel.metadata
    loaded = driver.utils.load_binary(metadata.name, kernel.asm["cubin"], metadata.shared, 0)
    function, widths = loaded[1], task["widths"]
    stub.stub_expect(function, len(widths), (ctypes.c_uint32 * len(widths))(*widths))
    constants = [None] * len(task["request"]["constants"])
    run = driver.launcher_cls(source, metadata)
    run(task["grid"], 1, 1, stream, function, kernel.packed_metadata, None, None, None,
        *task["arguments"], *constants)  # fmt: skip
    count = ctypes.c_uint32.in_dll(stub, "stub_launch_count").value
    record = (Record * MOST).in_dll(stub, "stub_launches")[count - 1]
    return {"grid": list(record.grid), "block": list(record.block), "shared": record.shared,
            "stream": record.stream, "values": list(record.values)[: record.count]}  # fmt: skip


def main() -> None:
    stub = ctypes.CDLL(sys.argv[1])
    stub.stub_expect.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p]
    stub.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    stub.cuCtxSetCurrent(1)
    triton.runtime.driver.set_active(OneDevice())
    tasks = json.loads(sys.stdin.read())
    with tempfile.TemporaryDirectory() as folder:
        found = [launch(t, stub, int(sys.argv[2]), Path(folder)) for t in tasks]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
