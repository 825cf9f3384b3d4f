"""Stored sizes and arguments: what may be evaluated, and nothing else."""

from __future__ import annotations

import pytest
import torch

from dicp.serialize import decode_argument, evaluate, evaluate_size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0*s77 + 3", 17),
        ("max(1, s0 // 2) % 5", 1),
        ("-(-s77 // 4)", 2),
        ("math.floor(s77 / 2)", 3),
        ("math.ceil(s77 / 2)", 4),
        ("math.trunc(-s77 / 2)", -3),
        ("torch.sym_int(torch.sym_float(s0) * 1.5)", 3),
        ("abs(int(-2.5)) if s0 == 2 and not_one > 1 or False else float(0)", 2),
        ("2**s0", 4),
        ("s0 << 3 >> 1", 8),
        ("float(s0) ** 2 + 8 * s0**-1", 8),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert evaluate(text, {"s0": 2, "s77": 7, "not_one": 3}) == value
    assert evaluate_size(text, {"s0": 2, "s77": 7, "not_one": 3}) == value


@pytest.mark.parametrize(
    "text",
    [
        "''.__class__.__base__.__subclasses__()",
        "s0.__class__",
        "s0.real",
        "math.__class__",
        "math",
        "torch.load",
        "torch.load('x')",
        "math.exp(1)",
        "max.__self__",
        "max(s0, key=s0)",
        "max(*[s0])",
        "(lambda: 1)()",
        "[1][0]",
        "{}",
        "s0()",
        "int('9' * 9)",
        "'text'",
        "__builtins__",
        "__import__('os')",
        "f'{s0}'",
        "(s0 := 3)",
        "[x for x in s0]",
        "s0 @ s0",
        "1j",
        "...",
        "None",
        "",
        "s0; s0",
        "import os",
        "1 +",
        "s0\0",
        "\ud800",
        "(" * 300 + "1" + ")" * 300,
        "-" * 50000 + "1",
        "abs(max)",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises((ValueError, NameError)):
        evaluate(text, {"s0": 2})


@pytest.mark.parametrize("text", ["9**9**9", "(9**999)**9**9", "1 << 10**9", "s0 << (s0 << 40)"])
def test_numbers_without_bounds(text: str) -> None:
    """They end at once, instead of after minutes or with all memory."""
    with pytest.raises(OverflowError):
        evaluate(text, {"s0": 2})


def test_names_of_functions_are_no_numbers() -> None:
    with pytest.raises(ValueError):
        evaluate("max", {})
    with pytest.raises(NameError):
        evaluate("s1 + 1", {"s0": 2})


@pytest.mark.parametrize("name", ["load", "ops", "__name__", "nothing", "Tensor"])
def test_arguments_name_types_and_layouts_alone(name: str) -> None:
    for known in ("float32", "strided", "channels_last"):
        found = decode_argument({"torch": known}, int, int, [])
        assert found is getattr(torch, known)
    with pytest.raises(ValueError, match="no argument of a stored call"):
        decode_argument({"torch": name}, int, int, [])
