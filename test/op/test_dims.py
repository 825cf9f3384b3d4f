"""Operators whose `dim` changes between calls, from the front and from the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import TorchRuntimeError

from dicp.compare import Rule, check_tensor
from dicp.torch_private import release_of

X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
PLACES = torch.tensor([2, 0, 1])
DIMS = (0, -1, 1, -3)
BEYOND = (3, -4)
# Dynamo of PyTorch 2.11 wraps errors of eager, or of its inference, in one of its own.
WRAPPED = (TorchRuntimeError,) if release_of(torch.__version__) == (2, 11) else ()

Operator = Callable[[torch.Tensor, int], Any]
OPERATORS: dict[str, dict[str, Operator]] = {
    "sums": {
        "sum": lambda x, d: x.sum(d),
        "sum_kept": lambda x, d: x.sum(d, keepdim=True),
        "mean": lambda x, d: x.mean((d,)),
        "prod": lambda x, d: x.prod(d),
        "var": lambda x, d: x.var(d),
        "std": lambda x, d: x.std(d, keepdim=True),
        "norm": lambda x, d: torch.linalg.vector_norm(x, 2, d),
        "logsumexp": lambda x, d: x.logsumexp(d),
        "count_nonzero": lambda x, d: x.relu().count_nonzero(d),
        "nansum": lambda x, d: x.nansum(d),
    },
    "extrema": {
        "amax": lambda x, d: x.amax(d),
        "max": lambda x, d: x.max(d),
        "min": lambda x, d: x.min(d, keepdim=True),
        "argmax": lambda x, d: x.argmax(d),
        "aminmax": lambda x, d: x.aminmax(dim=d),
        "all": lambda x, d: (x > -2).all(d),
        "any": lambda x, d: (x > 2).any(d),
        "median": lambda x, d: x.median(d)[0],
        "kthvalue": lambda x, d: x.kthvalue(2, d)[0],
        "topk": lambda x, d: x.topk(2, d),
        "sort": lambda x, d: x.sort(d),
    },
    "scans": {
        "cumsum": lambda x, d: x.cumsum(d),
        "cumprod": lambda x, d: x.cumprod(d),
        "cummax": lambda x, d: x.cummax(d),
        "logcumsumexp": lambda x, d: x.logcumsumexp(d),
        "softmax": lambda x, d: F.softmax(x, d),
        "log_softmax": lambda x, d: F.log_softmax(x, d),
        "normalize": lambda x, d: F.normalize(x, dim=d),
        "diff": lambda x, d: x.diff(dim=d),
        "glu": lambda x, d: F.glu(torch.cat([x, x], d), d),
    },
    "views": {
        "unsqueeze": lambda x, d: x.unsqueeze(d) * 2,
        "squeeze": lambda x, d: x.unsqueeze(d).squeeze(d) * 2,
        "select": lambda x, d: x.select(d, -1) * 2,
        "narrow": lambda x, d: x.narrow(d, 1, 2) * 2,
        "transpose": lambda x, d: x.transpose(d, 1) * 2,
        "movedim": lambda x, d: x.movedim(d, 1) * 2,
        "flip": lambda x, d: x.flip(d),
        "roll": lambda x, d: x.roll(1, d),
        "unbind": lambda x, d: x.unbind(d)[0] * 2,
        "chunk": lambda x, d: x.chunk(2, d)[-1] * 2,
        "split": lambda x, d: x.split(2, d)[0] * 2,
        "unfold": lambda x, d: x.unfold(d, 2, 1) * 2,
        "flatten": lambda x, d: x.flatten(d) * 2,
    },
    "joins": {
        "cat": lambda x, d: torch.cat([x, x * 2], d),
        "stack": lambda x, d: torch.stack([x, x * 2], d),
        "repeat_interleave": lambda x, d: x.repeat_interleave(2, d),
        "index_select": lambda x, d: x.index_select(d, PLACES),
        "index_add": lambda x, d: x.index_add(d, PLACES, x.index_select(d, PLACES)),
        "index_fill": lambda x, d: x.index_fill(d, PLACES, 7),
        "gather": lambda x, d: x.gather(d, x.argsort(d)),
        "scatter": lambda x, d: x.scatter(d, x.argsort(d), x),
        "select_scatter": lambda x, d: x.select_scatter(x.select(d, 0) * 2, d, 1),
        "slice_scatter": lambda x, d: x.slice_scatter(x.narrow(d, 0, 2) * 2, d, 1, 3),
        "diagonal_scatter": lambda x, d: x.diagonal_scatter(
            x.diagonal(0, d, (d + 1) % 3) * 2, 0, d, (d + 1) % 3
        ),
        "index_reduce": lambda x, d: x.index_reduce(d, PLACES, x.narrow(d, 0, 3), "amax"),
        "take_along_dim": lambda x, d: x.take_along_dim(x.argsort(d), d),
    },
}


def together(kind: str) -> Callable[[torch.Tensor, int], list[Any]]:
    def function(x: torch.Tensor, dim: int) -> list[Any]:
        return [operator(x, dim) for operator in OPERATORS[kind].values()]

    return function


@pytest.mark.sweep
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("kind", OPERATORS)
def test_a_changing_dim_gives_what_eager_gives(
    kind: str, symbolic: bool, backend_name: str
) -> None:
    function = together(kind)
    run = torch.compile(function, backend=backend_name, dynamic=symbolic or None)
    for dim in DIMS:
        expected, exact, got = function(X, dim), function(X.double(), dim), run(X, dim)
        for name, *three in zip(OPERATORS[kind], got, expected, exact, strict=True):
            parts = ([each] if isinstance(each, torch.Tensor) else each for each in three)
            for mine, theirs, real in zip(*parts, strict=True):
                problems = check_tensor(mine, theirs, real, Rule())
                assert not problems, f"{name}, dim {dim}: {problems[0]}"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        "sum",
        "amax",
        "cumsum",
        "softmax",
        "sort",
        "select",
        "select_scatter",
        "slice_scatter",
        "diagonal_scatter",
        "index_reduce",
        "cat",
        "gather",
    ],
)
def test_a_dim_that_is_not_there_is_eager_error(name: str, backend_name: str) -> None:
    operator = next(each[name] for each in OPERATORS.values() if name in each)
    run = torch.compile(lambda x, dim: operator(x, dim), backend=backend_name, dynamic=True)
    torch.testing.assert_close(run(X, 1), operator(X, 1))
    for dim in BEYOND:
        with pytest.raises((IndexError, *WRAPPED), match="out of range|out of bounds"):
            run(X, dim)
