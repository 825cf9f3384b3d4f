"""Passes over the FX graph: what a pass is, and how a list of them is run and observed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from dicp.dynamo_bridge.analysis.inference import Inference
from dicp.dynamo_bridge.analysis.values import difference
from dicp.errors import InferenceMismatchError
from dicp.torch_private import depends_on_data

if TYPE_CHECKING:
    from dicp.adaptor import Adaptor
    from dicp.config import Config
    from dicp.target import Facts


@dataclass(frozen=True, eq=False)
class PassContext:
    """What a pass may read besides the graph.

    `kind` is "forward", "backward", "inference" or "joint"; `static_inputs` are the indices of the
    placeholders that hold parameters and buffers (the same storage on every call).
    """

    facts: Facts
    config: Config
    kind: str
    infer: Inference
    static_inputs: frozenset[int] = frozenset()
    adaptor: Adaptor | None = None
    compiles: Callable[[fx.Node], bool] = lambda node: True
    """Whether the target compiles a call of these operands, rather than leave it to eager."""


@dataclass(frozen=True, eq=False)
class Pass:
    """A named graph rewrite: valid graph in, valid graph out, true if anything changed."""

    name: str
    run: Callable[[fx.GraphModule, PassContext], bool]


AfterPass = Callable[[str, fx.GraphModule, float, bool], None]
"""Called after each pass with its name, the graph, its seconds and whether it changed anything."""


def run_passes(
    gm: fx.GraphModule,
    passes: Sequence[Pass],
    context: PassContext,
    after_pass: AfterPass | None = None,
    *,
    verify: bool = False,
) -> bool:
    """Run `passes` in order over `gm.graph`; true if any of them changed it.

    Later stages read only the graph: code that calls `gm` itself must call `gm.recompile()` first.
    `verify` checks the graph and the inferred value of every node after each pass that changed it.
    """
    any_changed = False
    for step in passes:
        start = time.perf_counter()
        changed = step.run(gm, context)
        seconds = time.perf_counter() - start
        any_changed |= changed
        if verify and changed:
            verify_graph(gm, context.infer)
        if after_pass is not None:
            after_pass(step.name, gm, seconds, changed)
    return any_changed


def verify_graph(gm: fx.GraphModule, infer: Inference) -> None:
    """Lint the graph and compare every node's recorded value with a fresh inference.

    Raises InferenceMismatchError for the first node whose shape, dtype, device or strides differ.
    Nodes whose result depends on data are not run again (their sizes would get new symbols).
    """
    gm.graph.lint()
    for node in gm.graph.nodes:
        if (
            node.op != "call_function"
            or "val" not in node.meta
            or depends_on_data(node.meta["val"])
        ):
            continue
        got = infer.compute(node.target, node.args, node.kwargs)
        found = difference(node.meta["val"], got)
        if found is not None:
            raise InferenceMismatchError(str(node.format_node() or node), *found)
