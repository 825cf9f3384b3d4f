"""Operators of the eager device as small graphs: what a failed compilation leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dicp.config import Config
from dicp.device import compile as device_compile
from dicp.device.call import Call, NotCompiled
from dicp.device.compile import OperatorCompiler
from dicp.target import find_target

ADD = torch.ops.aten.add.Tensor


def add_of(*shape: int) -> Call:
    return Call(ADD, (torch.ones(shape), torch.ones(shape)), {})


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Errors that the next compilations raise, the last one first."""
    errors: list[Exception] = []
    compile_aten = device_compile.compile_aten

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return compile_aten(*args, **kwargs)

    monkeypatch.setattr(device_compile, "compile_aten", compiled)
    return errors


def test_a_transient_failure_is_tried_again(failing: list[Exception]) -> None:
    compiler = OperatorCompiler(find_target("cpu"), Config())
    failing += [OSError(28, "No space left on device")] * 2
    for _ in range(2):
        with pytest.raises(NotCompiled, match="No space left"):
            compiler.compiled(add_of(4, 5))
    for rows in range(4, 16):
        operator, _ = compiler.compiled(add_of(rows, 5))
        assert operator.sizes is None, "one form for all sizes"


def test_other_failures_are_kept_as_the_reason(failing: list[Exception]) -> None:
    compiler = OperatorCompiler(find_target("cpu"), Config())
    failing += [ValueError("no such operator")] * 2  # with symbolic sizes, and with fixed ones
    for _ in range(2):
        with pytest.raises(NotCompiled, match="no such operator"):
            compiler.compiled(add_of(4, 5))
    assert not failing
