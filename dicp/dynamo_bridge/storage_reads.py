"""Graphs that address the storage of their inputs, where that is more than the inputs' elements.

`as_strided` reaches whatever lies in a tensor's storage, counted from its start. What a traced
graph writes, and the gradient of what it reads, lies in other storages, which hold the elements of
the traced input alone; nothing guards where an input begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.values import is_dense
from dicp.effects import op_name
from dicp.torch_private import hint_of

SCATTERS = ("as_strided_scatter", "diagonal_scatter", "select_scatter", "slice_scatter")
"""Operators that write into a copy of a whole storage."""


class StorageReads:
    """The inputs of a graph of Dynamo's, traced with inputs `traced`, of which compiled code knows
    the elements alone. `writes`: the graph writes to inputs."""

    def __init__(self, gm: fx.GraphModule, traced: Sequence[Any], writes: bool) -> None:
        graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
        names = {op_name(node.target) for graph in graphs for node in graph.nodes}
        addressed = any(name.startswith("as_strided") for name in names)
        changed = writes or not names.isdisjoint(SCATTERS)
        self.positions = [
            k
            for k, value in enumerate(traced)
            if addressed and isinstance(value, torch.Tensor) and (changed or value.requires_grad)
        ]
        self.never = not all(_fills_its_storage(traced[k]) for k in self.positions)

    def __bool__(self) -> bool:
        return bool(self.positions)

    def reach_beyond(self, inputs: Sequence[Any]) -> bool:
        """Whether a call has to run in eager."""
        return self.never or not all(_fills_its_storage(inputs[k]) for k in self.positions)


def _fills_its_storage(value: torch.Tensor) -> bool:
    """Whether a tensor has all of its storage; symbolic sizes are those of the traced call."""
    if value.layout != torch.strided:
        return True
    length = hint_of(value.untyped_storage().nbytes())
    begins = hint_of(value.storage_offset()) == 0
    return begins and hint_of(value.numel()) * value.itemsize == length and is_dense(value)
