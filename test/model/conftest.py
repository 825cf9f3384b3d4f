"""Fixtures of the model tests: the comparison with eager, and folders of real weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fp64 import AgainstEager


def define_torchvision_operators() -> None:
    """Let torchvision import beside a torch build that its own library does not load into."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except OSError:
        torch.library.define(
            "torchvision::nms", "(Tensor dets, Tensor scores, float iou) -> Tensor"
        )
        torch.library.define(
            "torchvision::qnms", "(Tensor dets, Tensor scores, float iou) -> Tensor"
        )


define_torchvision_operators()


@pytest.fixture
def against_eager(backend: Any, dynamic: bool) -> AgainstEager:
    """The comparison for `--backend NAME --dynamic true|false`."""
    torch.manual_seed(0)
    return AgainstEager(backend.inner, dynamic)


@pytest.fixture
def weights() -> Callable[[str], Path]:
    """The folder named by an environment variable; the test is skipped where it is not set."""

    def folder(variable: str) -> Path:
        value = os.environ.get(variable, "")
        if not value:
            pytest.skip(f"set {variable} to a folder of weights to run this test")
        return Path(value)

    return folder
