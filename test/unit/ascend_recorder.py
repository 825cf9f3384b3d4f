"""An Ascend target that lowers and renders, and builds nothing: graphs run operator by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.compile_fx import compile_fx
from dicp.dynamo_bridge.observe import GraphReport
from dicp.graphop.program import GraphProgram, Node
from dicp.target import Artifact, Executable, LowerContext
from dicp.vendor.ascend import AscendTarget


class Recorder(AscendTarget):
    """Lowers and renders as the target does; graphs then run operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[GraphProgram] = []
        self.reports: list[GraphReport] = []
        self._graphs: list[fx.GraphModule] = []

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> GraphProgram:
        program = super().lower(gm, context)
        self.programs.append(program)
        self._graphs.append(gm)
        return program

    def build(self, program: GraphProgram, cache: Cache, config: Config) -> Artifact:
        return Artifact(self.name, {}, {}, objects=(self._graphs[-1],))

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        (gm,) = artifact.objects
        gm.recompile()
        return lambda inputs: list(gm(*inputs))

    def fingerprint(self, config: Config) -> str:
        return "recorder"

    def sources(self) -> list[str]:
        return [t for p in self.programs for t in self.render(p, Config()).files.values()]

    def operators(self) -> Iterator[Node]:
        """GE operators of all graphs."""
        return (n for p in self.programs for g in p.graphs for n in g.operators)

    def kinds(self) -> Counter[str]:
        """How many GE operators of each kind all graphs have."""
        return Counter(node.kind for node in self.operators())


def record(fn: Callable[..., Any], *inputs: Any, dynamic: bool = False, **options: Any) -> Recorder:
    """Compile `fn` for `inputs` (backward too, where an input requires a gradient)."""
    target = Recorder()
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
