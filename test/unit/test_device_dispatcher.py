"""The dispatcher of the eager device, beside native parts that record what they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dicp.config import Config, DeviceSettings
from dicp.device.dispatcher import Dispatcher


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
