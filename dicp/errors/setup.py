"""What a user sets up: options, targets, tools, folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dicp.errors.base import DicpError
from dicp.errors.text import did_you_mean, nearest, sentence

__all__ = [
    "AdaptorFileError", "CacheFolderError", "ConfigValueError", "DeviceRegistrationError",
    "DumpFolderError", "InvalidTargetError", "NewVendorError", "OperatorLibraryError",
    "RuntimeLibraryError", "SimulatorForbiddenError", "TargetNotFoundError", "ToolchainError",
    "UnknownOptionError", "VendorNotFoundError",
]  # fmt: skip


class UnknownOptionError(DicpError):
    """An option name that no config field has."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        self.nearest = nearest(name, known)
        super().__init__(
            f"unknown option {name!r}.{did_you_mean(self.nearest)} "
            f"Valid options: {', '.join(sorted(known))}. "
            "`python -m dicp config` describes each."
        )


class ConfigValueError(DicpError, ValueError):
    """A known option with an invalid value. `source` names where the value came from."""

    def __init__(self, source: str, given: object, expected: str, fix: str) -> None:
        self.source = source
        self.given = given
        self.expected = expected
        self.fix = fix
        super().__init__(f"{source} is {given!r}; expected {expected}. {fix}")


class TargetNotFoundError(DicpError):
    """No installed target has this name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        self.nearest = nearest(name, known)
        installed = ", ".join(sorted(known)) if known else "none"
        super().__init__(
            f"no target named {name!r} is installed.{did_you_mean(self.nearest)} "
            f"Installed targets: {installed}. A target is registered by an entry point in the "
            "group 'dicp.targets'; install the package that brings it, or choose another backend."
        )


class InvalidTargetError(DicpError):
    """An installed target that breaks the contract of `dicp.target.Target`."""

    def __init__(self, name: str, place: str, problems: Sequence[str]) -> None:
        self.name = name
        self.problems = tuple(problems)
        listed = "; ".join(problems)
        super().__init__(
            f"target {name!r} ({place}) cannot be used: {listed}. Fix the package that registers "
            "it under the entry points `dicp.targets`, or uninstall it."
        )


class ToolchainError(DicpError):
    """A tool the target needs is missing, too old or does not work."""

    def __init__(self, target: str, tool: str, detail: str, fix: str) -> None:
        self.target = target
        self.tool = tool
        self.detail = detail
        self.fix = fix
        super().__init__(
            f"target {target!r} needs {tool}: {detail}. {sentence(fix)} "
            "`python -m dicp doctor` checks the whole toolchain; "
            "on_compile_error='eager' runs the model uncompiled meanwhile."
        )


class SimulatorForbiddenError(DicpError):
    """runs_on='device' and there is no device."""

    def __init__(self, target: str, fix: str) -> None:
        self.target = target
        self.fix = fix
        super().__init__(
            f"target {target!r} has no device here and runs_on='device' forbids its simulator. "
            f"{sentence(fix)} Or set runs_on='auto' or 'simulator' (DICP_RUNS_ON)."
        )


class NewVendorError(DicpError):
    """`new-vendor` cannot write a package of this name, or there."""

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        self.problem = problem
        super().__init__(
            f"vendor {name!r} {problem}. For example: "
            "python -m dicp new-vendor mychip --family loop --package mychip"
        )


class CacheFolderError(DicpError):
    """The cache folder cannot be used, and there is no alternative."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path = Path(path)
        self.reason = reason
        super().__init__(
            f"cache folder {str(path)!r}: {reason}. Point DICP_CACHE_DIR (option cache_dir) at a "
            "folder that belongs to you and that nobody else can write."
        )


class DumpFolderError(DicpError):
    """The folder for dumps cannot be written."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path = Path(path)
        self.reason = reason
        super().__init__(
            f"dump folder {str(path)!r} cannot be written: {reason}. Point DICP_DUMP (option dump) "
            "at a folder that you can write, with space left, or unset it."
        )


class DeviceRegistrationError(DicpError):
    """The eager device cannot be registered in this process."""

    def __init__(self, problem: str, fix: str) -> None:
        self.problem = problem
        super().__init__(f"the eager device cannot be registered: {problem}. {sentence(fix)}")


class RuntimeLibraryError(DicpError):
    """A vendor's runtime library lacks functions of the interface."""

    def __init__(self, path: str, missing: Sequence[str]) -> None:
        self.path = path
        self.missing = tuple(missing)
        super().__init__(
            f"{path} lacks functions of the device runtime interface: {', '.join(missing)}. "
            "dicp/device/native/runtime.h declares them, the collectives as all or none; "
            "`python -m dicp device check` tests a library against it."
        )


class OperatorLibraryError(DicpError):
    """A vendor's operator library cannot be loaded, or one of its functions failed."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(
            f"The operator library {path}: {reason}. DIPU_WITH_DIOPI_LIBRARY=DISABLE runs without "
            "it; dicp/device/native/operator_library.h declares what such a library is given."
        )


class VendorNotFoundError(DicpError):
    """DITORCH_DEVICE or DIPU_DEVICE names a vendor whose runtime is not installed."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        listed = ", ".join(sorted(known)) if known else "none"
        super().__init__(
            f"The device asked for (DITORCH_DEVICE, DIPU_DEVICE) is {name!r}, and no installed "
            f"package registers a runtime of that name.{did_you_mean(nearest(name, known))} "
            f"Installed: {listed}. A runtime is registered "
            "by an entry point in the group 'dicp.devices'; unset the variable for the simulated "
            "chip."
        )


class AdaptorFileError(DicpError):
    """A vendor's adaptor file (`convert_config.yaml`) with an entry that has no meaning."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        self.path = path
        self.line = line
        self.problem = problem
        place = f"{path}:{line}" if line else str(path)
        super().__init__(
            f"{place}: {problem}. docs/adding_a_vendor.md describes the file; "
            "DICP_CONVERT_CONFIG (option convert_config) names another one."
        )
