"""Constants that decide by a size stand in `thresholds.py` of their room, each with a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
from test_architecture import MODULES, Module

ROOMS = frozenset({"loop", "codegen", "gpu", "graphop", "vendor"})
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
LARGEST_PLAIN = 4
"""Numbers up to this one may stand in a comparison: ranks, counts of operands, signs."""
# What is compared and is no tuned constant, by module or by module and name.
EXCEPTIONS = {
    "gpu/index_width NARROW_LIMIT": "the largest 32-bit index, less a block",
    "gpu/random_groups UNIT": "bits of a uniform number, a property of float32",
    "graphop/program 80": "columns of a dumped line",
    "graphop/rules/shape 2 ** 62": "what PyTorch writes for the end of a slice",
    "loop/ir/kernel _NAME_LENGTH": "characters of a kernel's name",
    "vendor/ascend/codegen 94": "columns of a line of source",
    "vendor/ascend/rules/attention MAX_HEADS": "what GE's operator takes",
    "vendor/ascend/rules/attention WIDEST_HEAD": "what GE's operator takes",
    "vendor/ascend/semantics/nn 255": "what GE's operator takes",
    "vendor/ascend/semantics/nn 63": "what GE's operator takes",
    "vendor/maca/facts MIN_WAVE": "a property of the hardware",
    "vendor/triton/device 10.0": "where a series for digamma converges",
    "vendor/triton/driver SHARED_WITHOUT_ASKING": "a property of the hardware",
}


def is_number(node: ast.AST) -> bool:
    """Whether an expression consists of literal numbers."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    parts = list(ast.iter_child_nodes(node))
    kind = isinstance(node, ast.UnaryOp | ast.BinOp)
    return kind and all(is_number(n) for n in parts if isinstance(n, ast.expr))


def constants(module: Module) -> Iterator[tuple[str, ast.stmt]]:
    """The names in capitals that a module gives to numbers."""
    for node in module.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            targets: Any = target.elts if several else [target]  # type: ignore[attr-defined]
            values: Any = node.value.elts if several else [node.value]  # type: ignore[attr-defined]
            for name, value in zip(targets, values, strict=True):
                if isinstance(name, ast.Name) and name.id.isupper() and is_number(value):
                    yield name.id, node


def compared(module: Module) -> Iterator[ast.expr]:
    """The expressions that a module orders: operands of < and >, arguments of min and max."""
    for node in module.nodes:
        if isinstance(node, ast.Compare) and any(isinstance(op, ORDERED) for op in node.ops):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("min", "max"):
            yield from node.args


def ordered_names(modules: list[Module]) -> set[tuple[str, str]]:
    """(room, name) of everything that occurs in what the room's modules order."""
    return {
        (module.room, node.id)
        for module in modules
        for part in compared(module)
        for node in ast.walk(part)
        if isinstance(node, ast.Name)
    }


def misplaced(modules: list[Module]) -> Iterator[str]:
    """Constants and plain numbers that decide by a size, outside of `thresholds.py`."""
    modules = [m for m in modules if m.room in ROOMS and m.name[-1] != "thresholds"]
    ordered = ordered_names(modules)
    for module in modules:
        at = "/".join(module.name)
        yield from (f"{at} {n}" for n, _ in constants(module) if (module.room, n) in ordered)
        for node in module.nodes:
            if isinstance(node, ast.Compare) and any(isinstance(op, ORDERED) for op in node.ops):
                for part in (node.left, *node.comparators):
                    if is_number(part) and abs(_number(part)) > LARGEST_PLAIN:
                        yield f"{at} {ast.unparse(part)}"


def _number(node: ast.expr) -> float:
    return float(eval(compile(ast.Expression(node), "", "eval")))  # literals alone


def test_constants_that_decide_by_a_size_stand_in_thresholds() -> None:
    found = set(misplaced(MODULES))
    assert found - EXCEPTIONS.keys() == set(), "move them to thresholds.py of their room"
    assert EXCEPTIONS.keys() - found == set(), "these exceptions are no longer needed"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("LIMIT = 64\ndef f(n):\n    return n <= LIMIT", "LIMIT"),
        ("A, B = 1 << 16, 'x'\ndef f(n):\n    return min(n, A * 2)", "A"),
        ("_MOST: int = 3\ndef f(n):\n    return _MOST > n", "_MOST"),
        ("def f(n):\n    return n >= 100", "100"),
        ("def f(n):\n    return 2**10 < n", "2 ** 10"),
    ],
)
def test_misplaced_constants_are_found(text: str, name: str) -> None:
    assert list(misplaced([Module(("loop", "x"), text)])) == [f"loop/x {name}"]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("loop/thresholds", "LIMIT = 64\ndef f(n):\n    return n <= LIMIT"),
        ("loop/x", "WIDTH = 64\ndef f(n):\n    return n == WIDTH and n > 1"),
        ("cli", "LIMIT = 64\ndef f(n):\n    return n <= LIMIT"),
    ],
)
def test_other_constants_are_not(place: str, text: str) -> None:
    assert list(misplaced([Module(tuple(place.split("/")), text)])) == []


def test_every_threshold_states_its_reason_and_every_table_its_machine() -> None:
    tables = [m for m in MODULES if m.name[-1] == "thresholds"]
    assert len(tables) >= 8
    for module in tables:
        assert re.search(r"[Ff]ound|tuned on|machine", ast.get_docstring(module.tree) or ""), module
        body = module.tree.body
        for name, node in constants(module):
            after = body[body.index(node) + 1 :][:1]
            reason = after and isinstance(after[0], ast.Expr) and ast.unparse(after[0])
            assert reason and len(reason) > 20, f"{'/'.join(module.name)}: {name} has no reason"
