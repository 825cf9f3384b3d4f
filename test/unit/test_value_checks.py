"""What a program checks of a value while it runs is checked by compiled programs, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dicp  # noqa: F401


def is_true(x: Tensor) -> Tensor:
    torch._check((x.sum() == 4).item())
    return x + 1


def is_number(x: Tensor) -> Tensor:
    count = x.sum().to(torch.int64).item()
    torch._check(count == 4)
    return x + count + torch.arange(count)


def is_in_range(x: Tensor) -> Tensor:
    count = x.sum().to(torch.int64).item()
    torch._check(count < 5)
    return x + count


@pytest.mark.parametrize("backend", ["cpugraph", "ascendgraph"])
@pytest.mark.parametrize("checked", [is_true, is_number, is_in_range])
@pytest.mark.parametrize("trains", [False, True])
def test_a_check_raises(checked: Callable[[Tensor], Tensor], backend: str, trains: bool) -> None:
    """A check may make the number known when the graph is compiled; it has to read it still."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(checked, backend=backend, fullgraph=True)
        x = torch.ones(4, requires_grad=trains)
        torch.testing.assert_close(compiled(x), checked(x))
        with pytest.raises(RuntimeError, match="assertion failed"):
            compiled(torch.full((4,), 2.0, requires_grad=trains))
