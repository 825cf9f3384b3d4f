"""`torch.distributed` backend `dicl`: collectives of device tensors by gloo, on host views."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as distributed

from dicp.device.dispatcher import DEVICE_TYPE

NAME = "dicl"


class ProcessGroupDICL(distributed.ProcessGroupGloo):
    """Collectives of device tensors."""


def register_backend(native: Any) -> None:
    """Register `dicl` for device and host tensors; the native part hands collectives to it."""
    native.register_collectives()
    distributed.Backend.register_backend(NAME, _create, devices=["cpu", DEVICE_TYPE])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return ProcessGroupDICL(store, rank, size, timeout)
