"""The start of programs that list which operators enter Python on the device."""

from __future__ import annotations

LIST_ENTRIES = """
import torch, torch_dipu
import torch.nn.functional as F
from dicp.device.active import registered

native, dispatcher, entered = registered.native, registered.dispatcher, []
def handler(op, args, kwargs):
    entered.append(str(op))
    return dispatcher(op, args, kwargs)
native.set_handler(handler)
"""
"""The operators are in `entered`."""
