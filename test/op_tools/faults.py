"""Faults planted in a target: rules that convert an operator wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from dicp.operator_choice import kept_eager
from dicp.rules import RuleTable
from dicp.target import find_target

aten = torch.ops.aten
Change = Callable[[Callable[[Any], Callable[..., Any]], Any], Callable[..., Any]]


def as_if(other: Any) -> Change:
    """The operator is converted as if it were another one."""
    return lambda rule_of, own: lambda b, *args, **kwargs: rule_of(other)(b, *args, **kwargs)


def with_args(change: Callable[..., tuple[Any, ...]]) -> Change:
    """The operator is converted with other arguments."""
    return lambda rule_of, own: lambda b, *args, **kwargs: own(b, *change(*args), **kwargs)


@contextmanager
def planted(faults: Mapping[Any, Change]) -> Iterator[None]:
    """Within, targets convert these operators wrongly. Nothing compiled before or within stays."""
    right = RuleTable.get
    torch._dynamo.reset()

    def get(self: RuleTable, op: Any) -> Any:
        entry = right(self, op)
        if entry is None or op not in faults:
            return entry

        def rule_of(other: Any) -> Callable[..., Any]:
            found = right(self, other)
            assert found is not None, other
            return found.function

        return replace(entry, function=faults[op](rule_of, entry.function))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RuleTable, "get", get)
        patch.setenv("DICP_CACHE", "0")
        yield
    torch._dynamo.reset()


def lines_of(function: Callable[..., Any]) -> dict[str, int]:
    """Mark -> line of each line of the function's source that ends in `# mark`."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return {
        line.rpartition("# ")[2].strip(): first + k for k, line in enumerate(lines) if "# " in line
    }


def of_integers(rule_of: Callable[[Any], Any], own: Any) -> Callable[..., Any]:
    """The operator's result passes through an integer dtype on its way: its fractions are lost."""
    return lambda b, *args, **kwargs: rule_of(aten.trunc.default)(b, own(b, *args, **kwargs))


def of_doubled(rule_of: Callable[[Any], Any], own: Any) -> Callable[..., Any]:
    """The operator is converted with twice its operand: an exponential overflows in half."""
    return lambda b, x, **kwargs: own(b, rule_of(aten.add.Tensor)(b, x, x), **kwargs)


@contextmanager
def overwriting(target: str, op: Any) -> Iterator[None]:
    """Within, graphs of a target with the operator overwrite the graph input that it reads."""
    kind: Any = type(find_target(target))
    lower, load = kind.lower, kind.load
    places: list[int | None] = [None]
    torch._dynamo.reset()

    def noting(self: Any, gm: torch.fx.GraphModule, context: Any) -> Any:
        inputs = gm.graph.find_nodes(op="placeholder")
        calls = gm.graph.find_nodes(op="call_function", target=op)
        read = (n for node in calls if not kept_eager(node)
                for n in node.all_input_nodes if n in inputs)  # fmt: skip
        places[0] = next((inputs.index(n) for n in read), None)
        return lower(self, gm, context)

    def spoiling(self: Any, *parts: Any) -> Any:
        run, place = load(self, *parts), places[0]
        if place is None:
            return run

        def spoiled(inputs: list[Any]) -> Any:
            written = inputs[place]
            outputs = run(inputs)
            written.view(-1)[0] += 1
            return outputs

        return spoiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "lower", noting)
        patch.setattr(kind, "load", spoiling)
        patch.setenv("DICP_CACHE", "0")
        yield
    torch._dynamo.reset()


@contextmanager
def last_of_equal(shift: int = 0) -> Iterator[None]:
    """Within, `kthvalue` of float32 gives the last position of equal elements, or one `shift`
    before it, and that of float64 the first."""
    library = torch.library.Library("aten", "IMPL")

    def kthvalue(
        x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        value = torch.sort(x, dim).values.select(dim, k - 1).unsqueeze(dim)
        equal = (x == value).int()
        if x.dtype == torch.float64:
            return value.squeeze(dim), equal.argmax(dim)
        return value.squeeze(dim), x.shape[dim] - 1 - shift - equal.flip(dim).argmax(dim)

    library.impl("kthvalue", kthvalue, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


KINDS: dict[str, dict[Any, Change]] = {
    "wrong rule": {aten.sin.default: as_if(aten.cos.default)},
    "lost dtype": {aten.atan.default: of_integers},
    "strides": {aten.cumsum.default: with_args(lambda x, dim, **more: (x, 1 - dim))},
    "overflow": {aten.exp.default: of_doubled},
}
"""A fault of each kind that rules can have; a write to an input: `overwriting`."""
