"""The origin of program parts in the user's code, for comments, reports and errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx

from dicp.errors import UnsupportedOperatorError

_TOOLS = str(Path(__file__).with_name("op_tools"))
"""Where a tool is active, its own frame is the innermost one of a traced call."""

LINE_OF = "dicp_line_of"
"""Key in `node.meta`: the name of the captured node whose `stack_trace` the node has."""


@dataclass(frozen=True, repr=False)
class Origin:
    """The origin of a program part: graph node, ATen operator, user's source line."""

    node: str
    op: str
    user_line: str
    line_of: str = ""
    """The captured graph's node whose line this is; stored programs keep it instead of the line."""

    def __str__(self) -> str:
        return f"{self.op} ({self.node})" + (f" at {self.user_line}" if self.user_line else "")

    def __repr__(self) -> str:
        return repr(str(self))


def origin_of(node: fx.Node) -> Origin:
    return Origin(node.name, str(node.target), user_line(node), node.meta.get(LINE_OF, ""))


def mark_lines(gm: fx.GraphModule) -> None:
    """Set LINE_OF of every captured node to its own name; nodes derived from it inherit it."""
    for node in gm.graph.nodes:
        if node.meta.get("stack_trace"):
            node.meta[LINE_OF] = node.name


def user_lines(gm: fx.GraphModule) -> dict[str, str]:
    """The user's source line of every node that has one."""
    return {node.name: line for node in gm.graph.nodes if (line := user_line(node))}


def user_line(node: fx.Node) -> str:
    """`file:line` of the innermost frame of the user's stack that the node came from."""
    trace = node.meta.get("stack_trace") or ""
    lines = (line.strip() for line in trace.splitlines())
    frames = [line for line in lines if line.startswith("File ") and _TOOLS not in line]
    if not frames:
        return ""
    parts = frames[-1].split('"')
    number = frames[-1].partition(", line ")[2].partition(",")[0]
    return f"{parts[1]}:{number}" if len(parts) > 1 else ""


def unsupported(
    node: fx.Node,
    target: str,
    reason: str,
    forbidden_by: Literal["fallback", "native_ops"] = "fallback",
) -> UnsupportedOperatorError:
    """The error for a node that would stay eager where an option forbids it."""
    return UnsupportedOperatorError(
        **call_of(node), target=target, problem=reason, forbidden_by=forbidden_by
    )


def call_of(node: fx.Node) -> dict[str, Any]:
    """What an error says of a call: its operator, operands and the user's line."""
    vals = [a.meta.get("val") for a in node.all_input_nodes]
    tensors = [v for v in vals if isinstance(v, torch.Tensor)]
    return {
        "op": str(node.target),
        "dtypes": [str(t.dtype) for t in tensors],
        "shapes": [tuple(t.shape) for t in tensors],
        "user_line": user_line(node),
    }
