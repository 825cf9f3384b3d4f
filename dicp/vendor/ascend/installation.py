"""An installed CANN: its place, its version, what its headers declare, which devices answer."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from dicp.config import vendor_variable
from dicp.errors import ToolchainError
from dicp.graphop.prototype import Prototype
from dicp.vendor.ascend.prototypes import DTYPES, PROTOTYPES

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
        """The headers that declare operators."""
        folders = (self.root / name for name in OPERATOR_FOLDERS)
        return [file for folder in folders for file in sorted(folder.rglob("*.h"))]


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


# ---- operators -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declared:
    """An operator as a header declares it: names with how often each may stand."""

    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    attrs: frozenset[str]
    dtypes: Mapping[str, frozenset[torch.dtype]]
    """By input, where the declaration lists them one by one."""


@dataclass(frozen=True)
class Installed:
    """Which operators of the prototype table can be used, and what their ports are called."""

    kinds: frozenset[str]
    ports: Mapping[tuple[str, str], str]
    dtypes: Mapping[tuple[str, str], frozenset[torch.dtype]]
    """By operator and input: what it takes, where that is known."""


EVERY_OPERATOR = Installed(frozenset(PROTOTYPES), {}, {})

_ARITIES = {"INPUT": "one", "OPTIONAL_INPUT": "optional", "DYNAMIC_INPUT": "many",
            "OUTPUT": "one", "DYNAMIC_OUTPUT": "many"}  # fmt: skip
_REGISTRATION = re.compile(r"\bREG_OP\s*\(\s*(\w+)\s*\)(.*?)\.?\s*OP_END_FACTORY_REG", re.DOTALL)
_PART = re.compile(
    r"\.\s*(INPUT|OPTIONAL_INPUT|DYNAMIC_INPUT|OUTPUT|DYNAMIC_OUTPUT|ATTR|REQUIRED_ATTR)"
    r"\s*\(\s*(\w+)\s*,"
)
_LISTED = re.compile(
    r"\.\s*(?:OPTIONAL_|DYNAMIC_)?INPUT\s*\(\s*(\w+)\s*,\s*TensorType\s*\(\s*\{([^{}()]*)\}\s*\)"
)
_BY_NAME = {name: dtype for dtype, (name, _) in DTYPES.items()}
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def declared_operators(texts: Iterable[str]) -> dict[str, Declared]:
    """The operators that headers register; of several registrations the first counts."""
    found: dict[str, Declared] = {}
    for text in texts:
        for kind, body in _REGISTRATION.findall(_COMMENT.sub("", text)):
            parts = _PART.findall(body)
            ports = [(what, (name, _ARITIES[what])) for what, name in parts if what in _ARITIES]
            declared = Declared(
                tuple(port for what, port in ports if "INPUT" in what),
                tuple(port for what, port in ports if "OUTPUT" in what),
                frozenset(name for what, name in parts if what not in _ARITIES),
                dict(_listed_dtypes(body)),
            )
            found.setdefault(kind, declared)
    return found


def _listed_dtypes(body: str) -> Iterator[tuple[str, frozenset[torch.dtype]]]:
    for port, text in _LISTED.findall(body):
        names = [name.strip().removeprefix("ge::") for name in text.split(",")]
        if all(name.startswith("DT_") for name in names):
            yield port, frozenset(_BY_NAME[name] for name in names if name in _BY_NAME)


def usable_operators(declared: Mapping[str, Declared]) -> Installed:
    """The operators of the prototype table that are declared with the ports and attributes that it
    lists; a port may have another name."""
    kinds: set[str] = set()
    ports: dict[tuple[str, str], str] = {}
    dtypes: dict[tuple[str, str], frozenset[torch.dtype]] = {}
    for kind, prototype in PROTOTYPES.items():
        given = declared.get(kind)
        names = None if given is None else _port_names(prototype, given)
        if given is not None and names is not None:
            kinds.add(kind)
            dtypes |= {
                (kind, name): given.dtypes[called] for name, called in names.items()
                if called in given.dtypes
            }  # fmt: skip
            ports |= {(kind, name): called for name, called in names.items() if name != called}
    return Installed(frozenset(kinds), ports, dtypes)


def _port_names(prototype: Prototype, declared: Declared) -> dict[str, str] | None:
    """What the declaration calls each port; None where the operator is another one."""
    names: dict[str, str] = {}
    for ports, given in (
        (prototype.inputs, declared.inputs),
        (prototype.outputs, declared.outputs),
    ):
        known = {name for name, _ in given}
        free = [name for name, _ in given if name not in {port.name for port in ports}]
        for port in ports:
            if port.name in known:
                names[port.name] = port.name
            elif free and len(given) == len(ports):
                names[port.name] = free.pop(0)
            elif port.arity != "optional":
                return None
    required = {attr.name for attr in prototype.attrs if attr.default is None}
    return names if required <= declared.attrs else None


@lru_cache(maxsize=8)
def operators_of(cann: Cann | None) -> Installed:
    """What can be used of an installation's operators; all that are known, for the simulator."""
    if cann is None:
        return EVERY_OPERATOR
    declared = declared_operators(file.read_text(errors="replace") for file in cann.headers)
    if not declared:  # no headers of operators are installed: nothing is known against any
        return EVERY_OPERATOR
    return usable_operators(declared)


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
