"""PyTorch's operator database, OpInfo. Importing it takes seconds and needs `expecttest`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def leave_seeds_to_the_caller() -> None:
    """Random operators of the database no longer seed themselves, which Dynamo does not compile."""
    common_methods_invocations.wrapper_set_seed = _unseeded
