"""Sizes that depend on data and that the program promises: a broken promise is an error."""

from __future__ import annotations

import pytest
import torch

from dicp.errors import ResultMismatchError


def _four(x: torch.Tensor) -> torch.Tensor:
    found = x.nonzero()
    torch._check(found.size(0) == 4)
    return found + 3


@pytest.mark.parametrize("target", ["cpugraph", "ascendgraph"])
def test_a_promised_size_is_checked(target: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(_four, backend=target, fullgraph=True)
        good = torch.tensor([0, 1, 3, 4, 2, 0, 0])
        assert torch.equal(compiled(good), _four(good))
        for other in (torch.zeros(7, dtype=torch.int64), torch.ones(7, dtype=torch.int64)):
            with pytest.raises(ResultMismatchError, match="promise"):
                compiled(other)
