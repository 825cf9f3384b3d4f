"""One number on the host among tensors of the GPU, as an optimizer's count of steps is.

PyTorch's operators take a tensor without dimensions from the host as they take a number. A
generated kernel reads it from the GPU's memory, so it is copied there first, once per graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dicp.gpu.library import OWN_RULES


def scalars_to_device(gm: fx.GraphModule, device: torch.device) -> None:
    """Gives generated operators of `device` copies of the scalars of the host that they read."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(gm.graph.nodes):
        entry = OWN_RULES.get(node.target) if node.op == "call_function" else None
        if entry is None or entry.kind != "compiled" or not _is_on(node.meta.get("val"), device):
            continue
        for source in node.all_input_nodes:
            if _is_host_scalar(source.meta.get("val")):
                if source not in copies:
                    copies[source] = _copied(gm.graph, source, node, device)
                node.replace_input_with(source, copies[source])


def _is_on(value: Any, device: torch.device) -> bool:
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(v, torch.Tensor) and v.device == device for v in values)


def _is_host_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() == 0


def _copied(graph: fx.Graph, source: fx.Node, reader: fx.Node, device: torch.device) -> fx.Node:
    """A copy of `source` on the device, in front of its first reader and with that one's line."""
    with graph.inserting_before(reader):
        # What the graph itself made cannot change under a copy that nobody waits for; the
        # caller's number could.
        options = {"device": device, "non_blocking": source.op != "placeholder"}
        copy = graph.call_function(torch.ops.aten._to_copy.default, (source,), options)
    value = source.meta["val"]
    copy.meta = {k: v for k, v in reader.meta.items() if k != "val"}
    with value.fake_mode:
        copy.meta["val"] = value.to(device)
    return copy
