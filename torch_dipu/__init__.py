"""The eager device under its public name: see `dicp.device`, whose objects these are."""

from dicp.device import DeviceProperties, Event, Stream, dipu, mock

__all__ = ["DeviceProperties", "Event", "Stream", "dipu", "mock"]
