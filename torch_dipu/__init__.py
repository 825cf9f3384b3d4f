"""The eager device under its public name: see `dicp.device.active`, whose objects these are."""

from dicp.device.active import DeviceProperties, Event, Stream, dipu, mock

__all__ = ["DeviceProperties", "Event", "Stream", "dipu", "mock"]
