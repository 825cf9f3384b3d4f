"""Copies to the GPU the host scalars that its kernels read, as an optimizer's step count.

PyTorch's GPU operators accept a zero-dimensional CPU tensor like a Python number. A generated
kernel reads it from the GPU's memory, so it is copied there first, once per graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dicp.gpu.library import OWN_RULES
from dicp.torch_private import HOST


def scalars_to_device(gm: fx.GraphModule, device: torch.device) -> None:
    """Replaces the host scalars that generated operators on `device` read by copies on it."""
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
    return isinstance(value, torch.Tensor) and value.device.type == HOST and value.dim() == 0


def _copied(graph: fx.Graph, source: fx.Node, reader: fx.Node, device: torch.device) -> fx.Node:
    """Inserts a copy of `source` on the device before its first reader, with that node's meta."""
    with graph.inserting_before(reader):
        # A result of the graph itself cannot change during a non-blocking copy; the caller
        # could change an input.
        options = {"device": device, "non_blocking": source.op != "placeholder"}
        copy = graph.call_function(torch.ops.aten._to_copy.default, (source,), options)
    value = source.meta["val"]
    copy.meta = {k: v for k, v in reader.meta.items() if k != "val"}
    with value.fake_mode:
        copy.meta["val"] = value.to(device)
    return copy
