"""Targets that lower, schedule and render as the real ones do, and build nothing.

Graphs run operator by operator instead, so that forward and backward of any function can be looked
at without a compiler.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.compile_fx import compile_fx
from dicp.dynamo_bridge.observe import GraphReport
from dicp.loop.lowering import RuleTable
from dicp.target import Artifact, Executable, LowerContext, Source, Target
from dicp.template import render_template
from dicp.vendor.cpu import CpuTarget
from dicp.vendor.cpu.target import LIBRARY_RULES
from dicp.vendor.maca import MacaTarget
from dicp.vendor.triton import TritonTarget


class Recording(Target):
    """Keeps the program of every graph it is given; put before a target."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[Any] = []
        self.reports: list[GraphReport] = []
        self._graphs: list[fx.GraphModule] = []

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> Any:
        program = super().lower(gm, context)
        self.programs.append(program)
        self._graphs.append(copy.copy(gm))
        return program

    def build(self, program: Any, source: Source, cache: Cache, config: Config) -> Artifact:
        return Artifact(self.name, {}, {}, objects=(self._graphs[-1],))

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        (gm,) = artifact.objects
        gm.recompile()
        return lambda inputs: list(gm(*inputs))

    def fingerprint(self, config: Config) -> str:
        return "recorder"


class Recorder(Recording, CpuTarget):
    """The host's programs."""

    def rules_for(self, gm: fx.GraphModule, config: Config) -> RuleTable:
        return LIBRARY_RULES  # whatever library is fastest on this machine


class TritonRecorder(Recording, TritonTarget):
    """The GPU's programs."""


class MacaRecorder(Recording, MacaTarget):
    """The programs of a GPU that is programmed thread by thread."""


def record(
    fn: Callable[..., Any],
    *inputs: Any,
    dynamic: bool = False,
    target: Recording | None = None,
    **options: Any,
) -> Recording:
    """Compile `fn` for `inputs` (backward too, where an input requires a gradient)."""
    target = target or Recorder()
    config = Config(cache=False, **options)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_fx(gm, example_inputs, target, config, target.reports.append)

    torch._dynamo.reset()
    result = torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    leaves = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]
    wanted = [x for x in leaves if x.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(x) for x in wanted])
    return target


def kernels(target: Recording) -> list[int]:
    """Kernels per graph."""
    return [sum("kernel" in step for step in p.serialized["steps"]) for p in target.programs]


def calls(target: Recording) -> list[str]:
    """Names of the library and eager calls of all graphs."""
    return [
        str(step["call"])
        for p in target.programs
        for step in p.serialized["steps"]
        if "call" in step
    ]


def prelude(template: Path, **values: Any) -> str:
    """What a source has between its first line and its function; `values` ask for all of it."""
    return render_template(template, **values).partition("\n")[2].partition('extern "C"')[0]


def after(prelude: str, source: str) -> str:
    """`source` without its prelude, but with the numbers of the paragraphs that it lacks."""
    title, _, rest = source.partition("\n")
    own, _, function = rest.partition('extern "C"')
    paragraphs, left = prelude.split("\n\n"), own.split("\n\n")
    assert left == [p for p in paragraphs if p in left], own
    lacking = [k for k, paragraph in enumerate(paragraphs) if paragraph not in left]
    return f'{title}\n// prelude.txt without {lacking}\nextern "C"{function}'


def portable(text: str) -> str:
    """`text` without folders, line numbers and the digests, which depend on both, in names."""
    text = re.sub(r"(?<= at )\S*/([^/:\s]+):\d+", r"\1", text)
    digests = dict.fromkeys(re.findall(r"(?<=_)[0-9a-f]{12}\b", text))
    for number, digest in enumerate(digests):
        text = text.replace(digest, str(number))
    return text
