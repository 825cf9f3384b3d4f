"""`import ditorch`: a CUDA program runs on the device of this machine, unchanged.

The device is the one of DITORCH_DEVICE or DIPU_DEVICE, else that of an installed plugin of PyTorch,
else CUDA, else the project's eager device. Where CUDA is real, or DITORCH_DISABLE_MOCK=1, nothing
is replaced. `undo` puts everything back.
"""

from __future__ import annotations

from dicp.config import SwitchSettings
from dicp.switch.switch import Switched, switch

switched: Switched = switch(SwitchSettings.from_env())
framework = switched.framework
arch = switched.arch
undo = switched.undo

__all__ = ["arch", "framework", "switched", "undo"]
