"""The dispatcher of the eager device, beside native parts that record what they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dicp.config import Config, DeviceSettings
from dicp.device.dispatcher import Dispatcher
from dicp.errors import FallbackWarning


def dispatcher(**native: Any) -> Dispatcher:
    return Dispatcher(SimpleNamespace(**native), Config.from_env(), DeviceSettings.from_env())


def test_calls_are_watched_until_the_last_forced_operator_ends() -> None:
    watched: list[bool] = []
    device = dispatcher(set_watching=watched.append)
    first, second = device.forcing(), device.forcing()
    with first:
        with second:
            assert watched[-1]
        assert watched[-1], "the outer operator's other parts"
        device.update_watching()  # a tool stops
        assert watched[-1]
    assert not watched[-1]


def test_a_decomposition_with_an_error_of_types_is_named_in_the_warning() -> None:
    device = dispatcher(host_call=lambda name, overload, args, kwargs: "of the host")

    def wrong(x: torch.Tensor) -> torch.Tensor:
        raise TypeError("no number")

    device.decomposition = lambda op: wrong  # type: ignore[method-assign]
    op, x = torch.ops.aten.silu.default, torch.ones(2)
    with pytest.warns(FallbackWarning, match=r"its decomposition raised TypeError\('no number'\)"):
        found = device._decomposed_or_on_cpu(op, "silu", (x,), {}, "the target has no rule for it")
    assert found == "of the host" and "no number" in device.counts.reasons["silu"]
