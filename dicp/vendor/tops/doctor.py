"""What `python -m dicp doctor` says of Tops: what is there, what is missing, how to fix it."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from dicp.config import Config
from dicp.errors import DicpError, SimulatorForbiddenError, ToolchainError
from dicp.target import Check
from dicp.vendor.tops.toolchain import find_toolchain

NO_DEVICE = "See that the driver is loaded and that the devices are visible and yours."


def checks(config: Config, devices: Callable[[Config], int]) -> list[Check]:
    """One line per part; what is missing fails only where a TopsRider is installed or asked for."""
    try:
        toolchain = find_toolchain(config)
    except (ToolchainError, SimulatorForbiddenError) as error:
        return [Check("toolchain", False, str(error), getattr(error, "fix", ""))]
    compiler = f"{shlex.join(toolchain.compiler)}: {toolchain.version}"
    lines = [Check("compiler", True, compiler)]
    if toolchain.sdk is None:
        return [*lines, Check("TopsRider", True, "none"),
                Check("simulator", True, "graphs run in it")]  # fmt: skip
    lines.append(Check("TopsRider", True, f"{toolchain.sdk.root}, headers {toolchain.sdk.prefix}/"))
    try:
        count = devices(config)
    except DicpError as error:
        return [*lines, Check("devices", False, str(error), NO_DEVICE)]
    return [*lines, Check("devices", count > 0, str(count), "" if count else NO_DEVICE)]
