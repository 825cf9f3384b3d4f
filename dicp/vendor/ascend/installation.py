"""An installed CANN: its place, its version, its headers, which devices answer."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dicp.config import vendor_variable
from dicp.errors import ToolchainError

OLDEST_CANN = (7, 0)
DEFAULT_ROOTS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann",
                 "/usr/local/Ascend/latest")  # fmt: skip
OPERATOR_FOLDERS = (
    "opp/built-in/op_graph/inc", "opp/built-in/op_proto/inc", "include/op_graph",
    "include/op_proto", "include/ops",
)  # fmt: skip
"""Where operators are declared: the newer, merged headers first."""
RUNTIME_LIBRARIES = (("ascendcl",), ("acl_rt", "acl_mdl"))
"""What ACL's library is called, and what it is going to be called."""
BUILD_LIBRARIES = ("ge_compiler", "ge_runner", "graph")
REPEATED_INITIALIZATION = 100002


@dataclass(frozen=True)
class Cann:
    """A CANN installation."""

    root: Path
    version: str

    @property
    def platform_folder(self) -> Path:
        """Where newer versions keep what depends on the processor."""
        return self.root / f"{platform.machine()}-linux"

    @property
    def includes(self) -> tuple[Path, ...]:
        folders = (self.root / "include", self.platform_folder / "include")
        return tuple(folder for folder in folders if folder.is_dir())

    @property
    def libraries(self) -> Path:
        folders = (self.root / "lib64", self.platform_folder / "lib64")
        return next((folder for folder in folders if folder.is_dir()), folders[0])

    @property
    def linked(self) -> tuple[str, ...]:
        """Names of the libraries that built objects are linked with."""
        there = (
            names for names in RUNTIME_LIBRARIES
            if all((self.libraries / f"lib{name}.so").exists() for name in names)
        )  # fmt: skip
        return (*BUILD_LIBRARIES, *next(there, RUNTIME_LIBRARIES[0]))

    @property
    def headers(self) -> list[Path]:
        """The headers that declare operators, the newer, merged ones first."""
        folders = [root / name for name in OPERATOR_FOLDERS
                   for root in (self.root, self.platform_folder)]  # fmt: skip
        return [file for folder in folders for file in sorted(folder.rglob("*.h"))]

    @property
    def types_header(self) -> Path | None:
        """The header that defines the groups of dtypes which declarations of operators name."""
        files = (folder / "graph" / "types.h" for folder in self.includes)
        return next((file for file in files if file.is_file()), None)


def locate_cann() -> Cann | None:
    """The installation that CANN's own variable names, else one in a usual place; or None. Its
    version is not known yet."""
    named = vendor_variable("ASCEND_HOME_PATH") or vendor_variable("ASCEND_TOOLKIT_HOME")
    roots = [Path(named)] if named else [Path(root) for root in DEFAULT_ROOTS]
    found = (Cann(root, "") for root in roots)
    return next((cann for cann in found if cann.includes), None)


def checked(cann: Cann) -> Cann:
    """The installation with its version.

    Raises ToolchainError for one that is incomplete or too old.
    """
    version = _version(cann)
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_CANN:
        wanted = ".".join(map(str, OLDEST_CANN))
        raise ToolchainError(
            "ascend", f"CANN {wanted} or newer", f"{cann.root} holds version {version}",
            f"Install CANN {wanted} or newer, or set runs_on='simulator'.",
        )  # fmt: skip
    return Cann(cann.root, version)


_VERSION_LINES = (
    r"(?:toolkit|runtime|compiler)_running_version\s*=.*?([^\[\]:=\s]+)\]?\s*$",
    r"(?:toolkit|runtime|compiler)_installed_version\s*=.*?([^\[\]:=\s]+)\]?\s*$",
    r"\w+_running_version\s*=.*?([^\[\]:=\s]+)\]?\s*$",
    r"version_dir\s*=\s*(\S+)",
    r"version\s*=\s*\[?(?:[^\]\s]*:)?([^\]\s]+)",
)
"""How files tell the version of the package, the best first: the last number of a line such as
`runtime_running_version=[7.6.0.1.220:8.1.RC1]`, which begins with a build's own. Lines that begin
with # are about the file."""


def version_in(text: str) -> str | None:
    """The version of CANN that the text of one of its version files tells."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for pattern in _VERSION_LINES:
        for line in lines:
            found = re.match(pattern, line.strip(), re.IGNORECASE)
            if found and re.match(r"\d+\.", found[1]):
                return found[1]
    return None


def _version(cann: Cann) -> str:
    names = ("version.cfg", "ascend_toolkit_install.info", "version.info", "compiler/version.info")
    for folder in (cann.root, cann.platform_folder):
        for name in names:
            file = folder / name
            version = version_in(file.read_text(errors="replace")) if file.is_file() else None
            if version is not None:
                return version
    raise ToolchainError(
        "ascend", "CANN", f"{cann.root} has no file that tells its version",
        "Reinstall CANN, or set runs_on='simulator'.",
    )  # fmt: skip


# ---- devices -------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def device_count(cann: Cann) -> int | str:
    """How many devices answer, or why none can be asked."""
    for names in RUNTIME_LIBRARIES:
        path = cann.libraries / f"lib{names[0]}.so"
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            status = library.aclInit(None)
            count = ctypes.c_uint32()
            if status in (0, REPEATED_INITIALIZATION):
                status = library.aclrtGetDeviceCount(ctypes.byref(count))
        except (OSError, AttributeError) as error:
            return f"{path.name} cannot be loaded: {error}"
        return count.value if status == 0 else f"aclrtGetDeviceCount gives status {status}"
    return f"{cann.libraries} has no libascendcl.so"


def driver_version() -> str | None:
    """The version of the kernel's driver, where one is installed."""
    for file in (Path("/usr/local/Ascend/driver/version.info"), Path("/etc/ascend_driver.info")):
        if file.is_file():
            return version_in(file.read_text(errors="replace")) or "of unknown version"
    return None


def has_torch_npu() -> bool:
    """Whether PyTorch's extension for the device is installed."""
    return importlib.util.find_spec("torch_npu") is not None
