"""Which operators of core ATen the operator cases exercise."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from support.cases import Op

OP_TESTS = Path(__file__).resolve().parent.parent / "op"


class SeenOverloads(TorchDispatchMode):
    """Collects every ATen overload that runs below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def core_overloads() -> set[str]:
    """Every overload tagged core, by name: `aten.relu.default`."""
    names = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
    }
    found = set()
    for name in names:
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        for overload_name in packet.overloads() if packet is not None else ():
            overload = getattr(packet, overload_name)
            if torch.Tag.core in overload.tags:
                found.add(str(overload))
    return found


def all_cases() -> list[Op]:
    """The CASES of every file in test/op."""
    cases: list[Op] = []
    for file in sorted(OP_TESTS.glob("test_*.py")):
        module = importlib.import_module(file.stem)
        cases += getattr(module, "CASES", [])
    return cases


def overloads_of(cases: Iterable[Op]) -> set[str]:
    """The overloads that the cases reach below autograd, forward and backward."""
    seen = SeenOverloads()
    for case in cases:
        variant = case.variants()[0]
        arguments = case.build(variant, {})
        flags = iter(case.grad_flags())
        for value in pytree.tree_leaves(arguments):
            if isinstance(value, torch.Tensor) and next(flags) and value.is_floating_point():
                value.requires_grad_(True)
        with seen:
            outputs = pytree.tree_leaves(case.fn(*arguments))
            roots = [v for v in outputs if isinstance(v, torch.Tensor) and v.requires_grad]
            if roots:
                total = sum(r.real.sum() for r in roots)
                torch.autograd.grad(
                    total,  # type: ignore[arg-type]
                    [
                        v
                        for v in pytree.tree_leaves(arguments)
                        if isinstance(v, torch.Tensor) and v.requires_grad
                    ],
                    allow_unused=True,
                )
    return seen.seen
