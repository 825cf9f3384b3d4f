"""What operator tests in the form of an earlier suite import: `from ..common.utils import ...`.

    args = parse_args()
    compiled_model = compile_model(OpModule(), args.backend, args.dynamic)

    @pytest.mark.parametrize("sizes", [Size((5,), (5, 3))])
    @pytest.mark.parametrize("compiled_model", compiled_model)
    def test_op(self, sizes, compiled_model): ...

The backend, device and shapes are those of pytest's options `--backend`, `--device`, `--dynamic`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dicp.testing.backends import BackendUnderTest, name_of
from dicp.testing.common.arguments import Arguments, parse_args
from dicp.torch_private import dynamo_config
from dicp.torch_private import dynamo_module as dynamo

__all__ = [
    "CompiledModel",
    "Size",
    "Arguments",
    "compile_model",
    "dynamo",
    "get_device",
    "parse_args",
    "torch",
    "update_dynamo_config",
]


@dataclass(frozen=True)
class Size:
    """The sizes of one case: `static` with static shapes, `dynamic` with dynamic ones."""

    static: tuple[int, ...]
    dynamic: tuple[int, ...]


@dataclass(frozen=True)
class CompiledModel:
    """A compiled module; `dynamic` says which of its sizes a test takes."""

    model: Any
    dynamic: bool


def compile_model(model: Any, backend: str, dynamic: bool) -> list[CompiledModel]:
    """`model` compiled by `backend`, as a list of one to parametrize a test with."""
    under_test = BackendUnderTest(name_of(backend), parse_args().device)
    return [CompiledModel(torch.compile(model, backend=under_test, dynamic=dynamic), dynamic)]


def get_device() -> str:
    """The device under test with an index: "cpu", "cuda:0"."""
    device = parse_args().device
    return device if device == "cpu" or ":" in device else f"{device}:0"


def update_dynamo_config(dynamic: bool = False) -> None:
    """Whether sizes are symbolic where `torch.compile` is not told."""
    dynamo_config.assume_static_by_default = not dynamic
