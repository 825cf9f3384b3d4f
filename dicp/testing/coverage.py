"""Which operators of core ATen the operator cases exercise."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dicp.testing.cases import Op
from dicp.torch_private import TorchDispatchMode, pytree

OPERATORS = "dicp.testing.operators"
OP_TESTS = Path(__file__).parent / "operators"


class SeenOverloads(TorchDispatchMode):
    """Collects every ATen overload that runs below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def all_cases() -> list[Op]:
    """The CASES of every file of operator tests."""
    cases: list[Op] = []
    for file in sorted(OP_TESTS.glob("test_*.py")):
        module = importlib.import_module(f"{OPERATORS}.{file.stem}")
        cases += getattr(module, "CASES", [])
    return cases


def overloads_reached(cases: Iterable[Op]) -> set[str]:
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
