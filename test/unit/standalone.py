"""A program's kernels in an executable of their own, for compilers and processors PyTorch has not.

Inputs are read from standard input and results written to standard output, as they lie in memory.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from recorder import record
from torch import Tensor

from dicp.config import Config
from dicp.vendor.cpu.units import header_texts

_MAIN = """
#include <cstdio>
%(buffers)s
int main() {
  int64_t status[2] = {0, 0};
  %(reads)s
  %(calls)s
  %(writes)s
  return 0;
}
"""


class Standalone:
    """The kernels of one graph, all of whose sizes are known and all of whose steps are kernels."""

    def __init__(self, fn: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        target = record(fn, *inputs)
        (self.program,) = target.programs
        self.kernels = target.render(self.program, Config()).files["kernels.cpp"]
        self.inputs = [x.contiguous() for x in inputs]
        self.buffers = self.program.serialized["buffers"]

    def run(self, folder: Path, command: Sequence[str], runner: Sequence[str] = ()) -> list[Tensor]:
        """The results of the executable that `command` builds and `runner` runs."""
        files = {"kernels.cpp": self.kernels + self._main(), **header_texts()}
        for name, text in files.items():
            (folder / name).write_text(text)
        build = [*command, "kernels.cpp", "-o", "kernels", "-lm"]
        subprocess.run(build, cwd=folder, check=True, timeout=300)
        given = b"".join(x.view(torch.uint8).numpy().tobytes() for x in self.inputs)
        done = subprocess.run(
            [*runner, "./kernels"], cwd=folder, input=given, stdout=subprocess.PIPE, check=True,
            timeout=300,
        )  # fmt: skip
        return self._results(done.stdout)

    def _main(self) -> str:
        plain = self.program.serialized
        size = {k: self._bytes(k) for k, b in enumerate(self.buffers) if b["base"] is None}
        calls = []
        for step in plain["steps"]:
            places = ", ".join(map(self._place, step["args"]))
            calls.append(
                f"{{ void* args[] = {{{places}}}; {step['kernel']}(args, nullptr, status);"
            )
            calls.append("  if (status[0]) return 1; }")
        reads = [f"if (fread(b{k}, 1, {size[k]}, stdin) != {size[k]}) return 2;"
                 for k in plain["inputs"]]  # fmt: skip
        outs = [out["ref"] for out in plain["outputs"]]
        return _MAIN % {
            "buffers": "\n".join(f"alignas(64) char b{k}[{n + 64}];" for k, n in size.items()),
            "reads": "\n  ".join(reads),
            "calls": "\n  ".join(calls),
            "writes": "\n  ".join(f"fwrite({self._place(k)}, 1, {self._bytes(k)}, stdout);"
                                  for k in outs),
        }  # fmt: skip

    def _place(self, k: int) -> str:
        buffer, offset = self.buffers[k], 0
        itemsize = getattr(torch, buffer["dtype"]).itemsize
        while buffer["base"] is not None:
            offset += buffer["offset"] * itemsize
            k, buffer = buffer["base"], self.buffers[buffer["base"]]
        return f"b{k} + {offset}"

    def _bytes(self, k: int) -> int:
        buffer = self.buffers[k]
        return math.prod(buffer["shape"]) * getattr(torch, buffer["dtype"]).itemsize

    def _results(self, written: bytes) -> list[Tensor]:
        found: list[Tensor] = []
        at = 0
        for out in self.program.serialized["outputs"]:
            buffer, count = self.buffers[out["ref"]], self._bytes(out["ref"])
            part = torch.frombuffer(bytearray(written[at : at + count]), dtype=torch.uint8)
            value = part.view(getattr(torch, buffer["dtype"]))
            found.append(value.as_strided(buffer["shape"], buffer["strides"]))
            at += count
        return found
