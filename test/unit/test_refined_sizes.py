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


@pytest.mark.parametrize("target", ["cpugraph", "topsgraph", "ascendgraph"])
def test_sizes_that_are_foreseen_wrongly_and_read_by_no_kernel_are_no_error(target: str) -> None:
    """PyTorch's shape function of a bag of 16-bit floats is wrong about what backward is handed."""
    weight = torch.randn(10, 4, dtype=torch.bfloat16, requires_grad=True)
    indices, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1])

    def bag(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding_bag(indices, weight, offsets, mode="sum")

    results = []
    for run in (bag, torch.compile(bag, backend=target)):
        out = run(indices, weight)
        (grad,) = torch.autograd.grad(out.float().sum(), weight)
        results += [out, grad]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
