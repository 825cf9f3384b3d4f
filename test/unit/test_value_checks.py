"""What a program checks of a value while it runs is checked by compiled programs, too."""

from __future__ import annotations

import pytest
import torch

import dicp  # noqa: F401


def test_a_check_of_a_value_raises_on_a_graph_compiler() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch._check((x.sum() == 4).item())
        return x + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(checked, backend="ascendgraph", fullgraph=True)
        assert compiled(torch.ones(4)).tolist() == [2.0] * 4
        with pytest.raises(RuntimeError, match="assertion failed"):
            compiled(torch.zeros(4))
