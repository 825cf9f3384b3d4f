"""What `python -m dicp doctor` says of Ascend: what is there, what is missing, how to fix it."""

from __future__ import annotations

from collections.abc import Callable

from dicp.cache import Cache
from dicp.errors import DicpError, ToolchainError
from dicp.target import Check
from dicp.vendor.ascend.installation import (
    Cann,
    checked,
    device_count,
    driver_version,
    has_torch_npu,
)
from dicp.vendor.ascend.probe import probed
from dicp.vendor.ascend.prototypes import PROTOTYPES

NO_DRIVER = "Install the Ascend HDK driver for the chip (npu-smi info tells whether it works)."
NO_DEVICE = (
    "See that the driver's libraries are on LD_LIBRARY_PATH (source set_env.sh), that the devices "
    "are visible (ASCEND_RT_VISIBLE_DEVICES, a container's --device) and yours (group HwHiAiUser)."
)
NO_EXTENSION = (
    "pip install torch_npu, of the release for your torch. Without it there are no npu tensors: "
    "those of the host are copied to the device and back in every run."
)


def checks(cann: Cann, cache: Cache, soc: Callable[[], str]) -> list[Check]:
    """Of an installation: its operators, the driver, the devices, the chip, torch_npu."""
    try:
        cann = checked(cann)
    except ToolchainError as error:
        return [Check("CANN", False, str(error), error.fix)]
    usable = probed(cann, cache).kinds
    missing = sorted(set(PROTOTYPES) - usable)
    operators = f"{len(usable)} of {len(PROTOTYPES)} operators"
    composed = f"; without {', '.join(missing)}" if missing else ""
    driver, count = driver_version(), device_count(cann)
    lines = [
        Check("CANN", True, f"{cann.version} in {cann.root}, {operators}{composed}"),
        Check("driver", driver is not None, driver or "not found", "" if driver else NO_DRIVER),
    ]
    if not isinstance(count, int) or count == 0:
        detail = "none answers" if count == 0 else str(count)
        lines.append(Check("devices", False, f"{detail}: the simulator runs", NO_DEVICE))
    else:
        lines += [Check("devices", True, str(count)), _chip(soc)]
    extension = has_torch_npu()
    there = "installed" if extension else "not installed"
    return [*lines, Check("torch_npu", extension, there, "" if extension else NO_EXTENSION)]


def _chip(soc: Callable[[], str]) -> Check:
    try:
        return Check("SoC", True, soc())
    except DicpError as error:
        return Check("SoC", False, str(error), getattr(error, "fix", ""))
