"""Targets of packages that `new-vendor` writes, one of each family, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp import discovery
from dicp import target as target_module
from dicp.dynamo_bridge import backend
from dicp.dynamo_bridge.backend import Backend
from dicp.new_vendor import new_vendor
from dicp.target import find_target

NAMES = {"loop": "faultyloop", "graph": "faultygraphs"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("packages")
    for family, name in NAMES.items():
        new_vendor(name, family, made / name)  # type: ignore[arg-type]
    return made


@pytest.fixture(params=NAMES)
def target(
    folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A generated target of each family, for tests that break it."""
    name = NAMES[request.param]
    monkeypatch.syspath_prepend(folder / name)
    points = {name: EntryPoint(name, f"{name}_dicp:{name.capitalize()}Target", "dicp.targets")}
    for module in (discovery, target_module, backend):
        monkeypatch.setattr(module, "discover", lambda: points)
    find_target.cache_clear()
    torch.compiler.reset()
    yield find_target(name)
    find_target.cache_clear()


def compiled(target: Any, fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend=Backend(target.name, cache=False, **options))
