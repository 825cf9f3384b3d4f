"""Numbers that eager refuses and tracing takes are known to `dicp.domains`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dicp.domains import outside_domain
from dicp.rules import RuleTable
from dicp.target import find_target
from dicp.torch_private import FakeTensorMode, schema_of

BEYOND = 7
X, PLACES = torch.rand(3, 4, 5), torch.tensor([0, 1, 2])
GIVEN: dict[str, Any] = {
    "Tensor": X, "List[Tensor]": [X, X], "int": 1, "number": 1, "float": 1.0, "bool": False,
    "List[int]": [1], "str": "amax", "Optional[bool]": False,
}  # fmt: skip


def with_dim(op: Any, dim: int) -> tuple[list[Any], dict[str, Any]] | None:
    """Arguments with this number for each dimension; None for an operator that has none."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    schema = schema_of(op).arguments
    for each in schema:
        kind = str(each.type)
        if each.name in ("dim", "dim0", "dim1", "dims", "axis"):
            value: Any = [dim] if "List" in kind else dim
        elif each.has_default_value():
            value = each.default_value
        else:
            value = PLACES if each.name == "index" else GIVEN.get(kind)
        if each.kwarg_only:
            kwargs[each.name] = value
        else:
            args.append(value)
    names = {each.name for each in schema}
    return (args, kwargs) if names & {"dim", "dim0", "dim1", "dims", "axis"} else None


def raised(op: Any, args: list[Any], kwargs: dict[str, Any]) -> Exception | None:
    try:
        op(*args, **kwargs)
    except Exception as error:
        return error
    return None


def rules() -> RuleTable:
    """Those of all targets."""
    tables = [find_target(name).rules for name in ("cpu", "triton", "maca", "ascend", "tops")]  # type: ignore[attr-defined]
    return tables[0].merged(*tables[1:])


@pytest.mark.filterwarnings("ignore")
def test_a_dimension_that_tracing_takes_and_eager_refuses_is_outside_the_domain() -> None:
    refused = 0
    for op in sorted(rules().ops(), key=str):
        given = with_dim(op, BEYOND)
        if given is None or not isinstance(raised(op, *given), IndexError):
            continue
        refused += 1
        mode = FakeTensorMode()
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
        with mode:
            if raised(op, args, kwargs) is None:
                assert outside_domain(op, args, kwargs, bool), op
    assert refused > 60


EXTREMA: dict[str, Any] = {
    "max": lambda x: x.max(), "min": lambda x: x.min(), "max_dim": lambda x: x.max(0),
    "min_dim": lambda x: x.min(0), "median_dim": lambda x: x.median(0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:ascendgraph runs CPU tensors")
@pytest.mark.parametrize("backend", ["cpugraph", "ascendgraph"])
@pytest.mark.parametrize("name", EXTREMA)
def test_an_extremum_of_no_element_raises_eagers_error(name: str, backend: str) -> None:
    x, fn = torch.empty(0, 4), EXTREMA[name]
    torch.compiler.reset()
    found, expected = raised(torch.compile(fn, backend=backend), [x], {}), raised(fn, [x], {})
    assert type(found) is type(expected) and str(found) == str(expected)
