"""The eager device of this process: importing this module registers it on PrivateUse1.

`dipu` is its Python module, which follows `torch.cuda`. With DIPU_MOCK_CUDA (the default) CUDA's
names mean this device.
"""

from __future__ import annotations

from dicp.config import Config, DeviceSettings
from dicp.device.mock import mock_if_wanted
from dicp.device.module import DeviceProperties, Event, Stream
from dicp.device.registration import register

registered = register(DeviceSettings.from_env(), Config.from_env())
dipu = registered.module
mock = mock_if_wanted(
    registered.native, dipu, registered.settings.mock, registered.settings.shows_as_mocked
)

__all__ = ["DeviceProperties", "Event", "Stream", "dipu", "mock", "registered"]
