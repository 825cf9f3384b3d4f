"""A scheduled graph, serialized: buffers, steps, kernel sources. It is what is stored and run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sympy
import torch

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.graph import Call, Requirement
from dicp.loop.ir.index import Size
from dicp.loop.ir.kernel import Kernel
from dicp.loop.schedule.kernels import Schedule
from dicp.origin import Origin
from dicp.serialize import encode_argument, encode_constant, encode_operator, encode_size
from dicp.target import KernelReport, NodeReport
from dicp.torch_private import HOST, python_size


@dataclass(frozen=True, eq=False)
class RenderedKernel:
    """A kernel's generated source and launch arguments; equal names mean equal source."""

    name: str
    body: str
    args: Sequence[Ref]
    symbols: Sequence[Size]
    """Sizes passed as arguments at every launch."""
    kernel: Kernel
    sites: Sequence[tuple[str, Origin | None]]
    """Operator and origin of each runtime check in the code, for error messages."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further launch parameters of the target, as JSON values."""


@dataclass
class LoopProgram:
    """Kernels, library calls and the buffers between them.

    `serialized` holds JSON values and Origins. `objects` holds what cannot be serialized (a
    higher-order operator's subgraph, a large constant): a program with objects is not stored.
    """

    serialized: dict[str, Any]
    kernel_texts: dict[str, str]
    nodes: Sequence[NodeReport] = ()
    reports: Sequence[KernelReport] = ()
    objects: list[Any] = field(default_factory=list)

    def kernels(self) -> Sequence[KernelReport]:
        return self.reports

    def text(self) -> str:
        lines = [
            f"{b['name']}: {b['role']} {b['dtype']}{b['shape']} strides {b['strides']}"
            for b in self.serialized["buffers"]
        ]
        for step in self.serialized["steps"]:
            if "kernel" in step:
                args = ", ".join(self.serialized["buffers"][i]["name"] for i in step["args"])
                lines.append(f"run {step['kernel']}({args})  # {join(step['origins'])}")
            else:
                lines.append(f"call {step['call']} {step['args']}  # {join(step['origins'])}")
        for report in self.reports:
            lines += ["", report.name, report.text]
        return "\n".join(lines) + "\n"


class ProgramBuilder:
    """Numbers the buffers of a schedule and serializes its steps."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.buffers: list[dict[str, Any]] = []
        self.numbers: dict[Ref, int] = {}
        self.objects: list[Any] = []

    def build(
        self, rendered: Mapping[int, RenderedKernel], nodes: Sequence[NodeReport],
        device: str = HOST,
    ) -> LoopProgram:  # fmt: skip
        graph = self.schedule.graph
        inputs = [
            None if k in graph.sizes else self.number(ref) for k, ref in enumerate(graph.inputs)
        ]
        steps = [
            self._call(step) if isinstance(step, Call) else self._launch(rendered[k])
            for k, step in enumerate(self.schedule.steps)
        ]
        routines = {
            step.routine: step for step in self.schedule.steps
            if isinstance(step, Call) and step.routine is not None
        }  # fmt: skip
        serialized = {
            "device": device,
            "inputs": inputs,
            "symbols": self._symbols(),
            "outputs": [self.encode(o) for o in graph.outputs],
            "steps": steps,
            "requirements": [self._requirement(r) for r in graph.requirements],
            "constants": {},
            "buffers": self.buffers,
        }
        for name, tensor in graph.constants.items():
            serialized["constants"][name] = self._constant(tensor)  # type: ignore[index]
        texts = {r.name: r.body for r in rendered.values()}
        texts |= {r.name: r.body for r in routines}
        reports = [KernelReport(r.name, r.kernel.origins, r.kernel.text) for r in rendered.values()]
        reports += [
            KernelReport(r.name, call.origins, partial(str, r.body)) for r, call in routines.items()
        ]
        return LoopProgram(serialized, texts, nodes, reports, self.objects)

    def _requirement(self, requirement: Requirement) -> dict[str, Any]:
        return {
            "kind": requirement.kind,
            "sizes": [encode_size(requirement.left), encode_size(requirement.right)],
            "detail": requirement.detail,
            "origin": str(requirement.origin),
        }

    def release(self) -> None:
        """Drop the buffers' producers: reports keep the kernels alive, and not the whole graph."""
        for ref in self.numbers:
            ref.producer = None

    def _symbols(self) -> dict[str, list[Any]]:
        """Symbol -> the source of its value: [input position] or [input position, axis]."""
        graph = self.schedule.graph
        found: dict[str, list[Any]] = {}
        for position, expr in graph.sizes.items():
            if isinstance(expr, sympy.Symbol):
                found.setdefault(str(expr), [position])
        for position, ref in enumerate(graph.inputs):
            for axis, size in enumerate(ref.shape):
                if isinstance(size, sympy.Symbol):
                    found.setdefault(str(size), [position, axis])
        return found

    def number(self, ref: Ref) -> int:
        known = self.numbers.get(ref)
        if known is not None:
            return known
        base = None if ref.base is None else self.number(ref.base)
        self.numbers[ref] = len(self.buffers)
        self.buffers.append(
            {
                "name": ref.name,
                "role": ref.role,
                "dtype": str(ref.dtype).removeprefix("torch."),
                "shape": [encode_size(s) for s in ref.shape],
                "strides": [encode_size(s) for s in ref.strides],
                "offset": encode_size(ref.offset),
                "base": base,
            }
        )
        return self.numbers[ref]

    def _launch(self, kernel: RenderedKernel) -> dict[str, Any]:
        stored = kernel.kernel.written_buffers()
        return {
            "kernel": kernel.name,
            "args": [self.number(r) for r in kernel.args],
            "symbols": [encode_size(s) for s in kernel.symbols],
            "writes": [self.number(r) for r in kernel.args if r.root in stored],
            "origins": list(kernel.kernel.origins),
            "sites": [list(site) for site in kernel.sites],
            **kernel.extra,
        }

    def _call(self, call: Call) -> dict[str, Any]:
        if call.routine is not None:
            return {
                "kernel": call.routine.name,
                "args": [self.number(r) for r in (*call.args, *call.outs)],
                "symbols": [encode_size(s) for s in call.routine.sizes],
                "writes": [self.number(r) for r in call.outs],
                "origins": list(call.origins),
                "sites": [],
            }
        use_out = call.out_variant is not None
        op = call.out_variant if use_out else call.op
        return {
            "call": encode_operator(op, self._object),
            "kind": call.kind,
            "args": [self.encode(a) for a in call.args],
            "kwargs": {k: self.encode(v) for k, v in call.kwargs.items()},
            "outs": [self.number(r) for r in call.outs],
            "into": use_out,
            "origins": list(call.origins),
        }

    def _object(self, value: Any) -> dict[str, int]:
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def encode(self, value: Any) -> Any:
        return encode_argument(value, self._leaf, self._object)

    def _leaf(self, value: Any) -> dict[str, Any] | None:
        if isinstance(value, Ref):
            return {"ref": self.number(value)}
        if isinstance(value, sympy.Basic):
            return {"size": python_size(value)}
        return None

    def _constant(self, tensor: torch.Tensor) -> Any:
        plain = encode_constant(tensor)
        return self._object(tensor) if plain is None else plain


def join(origins: Iterable[Origin]) -> str:
    """Origins as one line of text."""
    return "; ".join(map(str, origins))


def sources_of(serialized: Mapping[str, Any]) -> dict[str, list[str]]:
    """Kernel name -> its origins as text: operator, graph node, user line."""
    steps = [step for step in reversed(serialized["steps"]) if "kernel" in step]
    return {step["kernel"]: list(map(str, step["origins"])) for step in steps}
