"""A compile worker: reads jobs as JSON lines, answers with the compiled kernel or the error.

Runs as a script in a separate process that is never forked, so that it imports Triton and nothing
else (PyTorch alone takes longer to import than most kernels to compile). It ends when its input
does.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DEVICE_FUNCTIONS = Path(__file__).parent / "device.py"
TYPES = {"int32": triton.language.int32, "int64": triton.language.int64}


def load(name: str, path: Path) -> ModuleType:
    """The module in the file `path`, under the name `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Worker:
    """Compiles one kernel at a time; sources and Triton's own files go to `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device = load("dicp_device", DEVICE_FUNCTIONS)

    def kernel(self, name: str, body: str) -> Any:
        """The kernel as a function in a file, since Triton reads the function's source file."""
        path = self.folder / f"{name}.py"
        head = "import triton\nimport triton.language as tl\nimport dicp_device as d\n"
        path.write_text(f"{head}\n\n@triton.jit\ndef {name}{body}\n")
        sys.modules["dicp_device"] = self.device
        return getattr(load(name, path), name)

    def compile(self, job: dict[str, Any]) -> dict[str, Any]:
        function = self.kernel(job["name"], job["body"])
        constants = {k: TYPES.get(str(v), v) for k, v in job["constants"].items()}
        aligned = {(k,): [["tt.divisibility", 16]] for k in job["aligned"]}
        source = ASTSource(function, job["signature"], constants, aligned)
        kind, arch, warp = job["target"]
        target = GPUTarget(kind, arch, warp)
        known = {f.name for f in dataclasses.fields(_options_of(target))}
        options = {k: v for k, v in job["options"].items() if k in known}
        compiled = triton.compile(source, target=target, options=options)
        metadata = compiled.metadata
        return {
            "binary": base64.b64encode(compiled.asm["cubin"]).decode(),
            "ptx": compiled.asm["ptx"],
            "entry": metadata.name,
            "shared": metadata.shared,
            "warps": metadata.num_warps,
            "scratch": sum(
                getattr(metadata, f"{kind}_scratch_size", 0) or 0 for kind in ("global", "profile")
            ),
        }


def _options_of(target: GPUTarget) -> Any:
    """The class of the target's compile options, whose fields differ between Triton releases."""
    return type(triton.compiler.make_backend(target).parse_options({}))


def serve(folder: Path, jobs: IO[str], answers: IO[str]) -> None:
    """Compiles jobs, a line of JSON each, and answers each with a line, until there are no more."""
    try:
        triton.knobs.cache.dir = str(folder)
        worker = Worker(folder)
        for line in jobs:
            job = json.loads(line)
            try:
                answer = worker.compile(job)
            except Exception as error:  # any error of the compiler is this job's answer
                answer = {"error": f"{type(error).__name__}: {error}",
                          "trace": traceback.format_exc()}  # fmt: skip
            answers.write(json.dumps({"name": job["name"], **answer}) + "\n")
            answers.flush()
    finally:  # the process that made the folder may be gone
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    # The compiler's own prints must not mix with the answers.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Path(sys.argv[1]), sys.stdin, channel)
