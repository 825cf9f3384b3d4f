"""Faults planted in a target: rules that convert an operator wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from dicp.rules import RuleTable

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
    """Within, targets convert these operators wrongly."""
    right = RuleTable.get

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
        yield


def lines_of(function: Callable[..., Any]) -> dict[str, int]:
    """Mark -> line of each line of the function's source that ends in `# mark`."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return {
        line.rpartition("# ")[2].strip(): first + k for k, line in enumerate(lines) if "# " in line
    }
