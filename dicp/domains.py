"""Valid ranges of number arguments, for operators whose eager kernels check them.

A call is compiled where its relations in `DOMAINS` are proved; else eager runs it and raises its
own error. Operators that check in their meta functions need no row: tracing runs these checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

aten = torch.ops.aten
Relations = Callable[..., Sequence[Any]]


def _dropout(x: Any, p: Any, train: Any = True) -> Sequence[Any]:
    return (p >= 0, p <= 1) if train else ()


def _has_dimension(x: Any, dim: Any, *_: Any) -> Sequence[Any]:
    rank = max(x.ndim, 1)
    return dim >= -rank, dim < rank


DOMAINS: Final[dict[Any, Relations]] = {
    aten.bernoulli.p: lambda x, p=0.5, **_: (p >= 0, p <= 1),
    aten.native_dropout.default: _dropout,
    aten._softmax.default: _has_dimension,
    aten._safe_softmax.default: _has_dimension,
    aten._log_softmax.default: _has_dimension,
    aten.uniform.default: lambda x, low=0.0, high=1.0, **_: (low <= high,),
    aten.exponential.default: lambda x, rate=1.0, **_: (rate > 0,),
    aten.geometric.default: lambda x, p, **_: (p > 0, p < 1),
    aten.cauchy.default: lambda x, median=0.0, sigma=1.0, **_: (sigma > 0,),
    aten.log_normal.default: lambda x, mean=1.0, std=2.0, **_: (std > 0,),
    aten.randint.default: lambda high, *_, **__: (high > 0,),
    aten.randint.low: lambda low, high, *_, **__: (low < high,),
    aten.randint_like.default: lambda x, high, **_: (high > 0,),
    aten.randint_like.low_dtype: lambda x, low, high, **_: (low < high,),
}
"""Relations between an operator's arguments, which may be symbolic."""


def outside_domain(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], proves: Callable[[Any], bool]
) -> bool:
    """Whether eager might reject the arguments; `proves` tells if a relation always holds."""
    relations = DOMAINS.get(op)
    return relations is not None and not all(map(proves, relations(*args, **kwargs)))
