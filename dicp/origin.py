"""The origin of program parts in the user's code, for comments, reports and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, TypeVar

import torch
from torch import fx

from dicp.errors import UnsupportedOperatorError
from dicp.torch_private import HigherOrderOperator, OpOverload

T = TypeVar("T")
Frame = tuple[str, int, str]
"""File, line and function."""
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)(?:, in (.+))?', re.MULTILINE)
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
    trace: str = field(default="", compare=False)
    """The user's stack as PyTorch recorded it, innermost frame last."""

    def __str__(self) -> str:
        return f"{self.op} ({self.node})" + (f" at {self.user_line}" if self.user_line else "")

    def __repr__(self) -> str:
        return repr(str(self))


def merged_origins(*parts: Sequence[Origin]) -> tuple[Origin, ...]:
    """The origins of several parts that become one, each node once."""
    return tuple({origin.node: origin for part in parts for origin in part}.values())


def origin_of(node: fx.Node) -> Origin:
    location = location_of(node)
    line_of = node.meta.get(LINE_OF, "")
    return Origin(node.name, operator_of(node), location.line, line_of, location.trace)


def operator_of(node: fx.Node) -> str:
    """The operator that a node calls; of one that calls others, such as with_effects, these too."""
    called = [str(a) for a in node.args if isinstance(a, (HigherOrderOperator, OpOverload))]
    return f"{node.target}({', '.join(called)})" if called else str(node.target)


def mark_lines(gm: fx.GraphModule) -> None:
    """Set LINE_OF of every captured node to its own name; nodes derived from it inherit it."""
    for node in gm.graph.nodes:
        if node.meta.get("stack_trace"):
            node.meta[LINE_OF] = node.name


@dataclass(frozen=True)
class SourceLocation:
    """Where the user's code called an operator: its line, and the stack as PyTorch recorded it."""

    line: str = ""
    trace: str = ""


def user_locations(gm: fx.GraphModule) -> dict[str, SourceLocation]:
    """The location in the user's code of every node that has one."""
    return {node.name: location for node in gm.graph.nodes if (location := location_of(node)).line}


def location_of(node: fx.Node) -> SourceLocation:
    trace = node.meta.get("stack_trace") or ""
    lines = (line.strip() for line in trace.splitlines())
    frames = [line for line in lines if line.startswith("File ") and _TOOLS not in line]
    found = _FRAME.match(frames[-1]) if frames else None
    return SourceLocation(f"{found[1]}:{found[2]}", trace) if found else SourceLocation()


def user_line(node: fx.Node) -> str:
    """`file:line` of the innermost frame of the user's stack that the node came from."""
    return location_of(node).line


def lines_of(origins: Sequence[Origin]) -> str:
    """The user's lines of all origins, each once."""
    return "; ".join(filter(None, dict.fromkeys(origin.user_line for origin in origins)))


def profiled_name(kernel: str, origins: Sequence[Origin]) -> str:
    """A kernel's name in a profile, after that of its operators where it does not say them."""
    operators = dict.fromkeys(o.op.removeprefix("aten.").partition(".")[0] for o in origins)
    if not operators or any(name.strip("_") in kernel for name in operators):
        return f"dicp::{kernel}"
    return f"dicp::{'_'.join(operators)}.{kernel}"


def frames_of(trace: str) -> list[Frame]:
    """The user's frames of a recorded stack, outermost first."""
    found = _FRAME.findall(trace)
    return [(file, int(line), name) for file, line, name in found if _TOOLS not in file]


def in_user_frames(
    origins: Sequence[Origin], context: AbstractContextManager[Any], run: Callable[[], T]
) -> T:
    """Run a part of a program in `context` under frames of the user's code, which tools see.

    They are the frames of all its origins, outermost first and each once.
    """
    frames = list(dict.fromkeys(f for origin in origins for f in frames_of(origin.trace)))
    if not frames:
        return _call_within(run, context)
    run = partial(_function_at(frames.pop(), within=True), run, context)
    for frame in reversed(frames):
        run = partial(_function_at(frame), run)
    return run()


def _call_within(run: Callable[[], T], context: AbstractContextManager[Any]) -> T:
    with context:
        return run()


def _call(run: Callable[[], T]) -> T:
    return run()


@lru_cache(maxsize=4096)
def _function_at(frame: Frame, within: bool = False) -> Callable[..., Any]:
    """A function that calls its argument, with the file, line and name of `frame`."""
    file, line, name = frame
    code = (_call_within if within else _call).__code__
    placed = code.replace(co_filename=file, co_firstlineno=line, co_name=name)
    return FunctionType(placed, {})


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
    """The description of a call in an error: its operator, operands and the user's line."""
    vals = [a.meta.get("val") for a in node.all_input_nodes]
    tensors = [v for v in vals if isinstance(v, torch.Tensor)]
    return {
        "op": str(node.target),
        "dtypes": [str(t.dtype) for t in tensors],
        "shapes": [tuple(t.shape) for t in tensors],
        "user_line": user_line(node),
    }
