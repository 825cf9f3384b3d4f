"""The native part of the device: compiled once by the project's toolchain, kept in its cache."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dicp.cache import Cache, Entry, key_of
from dicp.config import Config
from dicp.toolchain import OUTPUT, compile_file, compile_shared, find_compiler, load_library

FOLDER = Path(__file__).parent / "native"
MODULE = "dicp_device_native"
USER = "the eager device"
_SIMULATOR = ("simulator.cpp", "runtime.h")
_MODULE_FILES = (
    "binding.cpp", "operators.cpp", "device.cpp", "memory.cpp", "operator_library.cpp",
    "visible.cpp", "operators.h", "device.h", "memory.h", "operator_library.h", "visible.h",
    "runtime.h",
)  # fmt: skip


def load_simulator(config: Config) -> CDLL:
    """The simulated chip's runtime. Raises ToolchainError and CompilerError."""
    command, version = find_compiler(USER, config.cxx)
    arguments = [*command, "-std=c++17", "-O2", "-fPIC", "-pthread"]
    symbols = ["dicp_rt_device_count"]
    entry = _built(config, _SIMULATOR, arguments, version, symbols)
    return load_library(USER, entry, symbols)


def load_module(config: Config) -> ModuleType:
    """The Python module that registers allocator, guard, hooks and operators when it is loaded.

    Raises ToolchainError and CompilerError.
    """
    command, version = find_compiler(USER, config.cxx)
    root = Path(torch.__file__).parent
    include = root / "include"
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    arguments = [
        *command, "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread",
        "-DAT_PER_OPERATOR_HEADERS",  # headers of PyTorch include the operators they use, not all
        *(f"-I{folder}" for folder in folders),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]  # fmt: skip
    libraries = [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    symbols = [f"PyInit_{MODULE}"]
    entry = _built(config, _MODULE_FILES, arguments, version, symbols, libraries)
    return _imported(entry.path(OUTPUT))


def _built(
    config: Config,
    names: tuple[str, ...],
    compiler: Sequence[str],
    version: str,
    symbols: Sequence[str],
    libraries: Sequence[str] = (),
) -> Entry:
    files = {name: (FOLDER / name).read_text() for name in names}
    key = key_of(files, list(compiler), list(libraries), version, torch.__version__)
    build = partial(_compile, config.jobs, compiler, files, symbols, libraries)
    return Cache.open(config).get_or_build("device", key, build)


def _compile(
    jobs: int,
    compiler: Sequence[str],
    files: Mapping[str, str],
    symbols: Sequence[str],
    libraries: Sequence[str],
) -> Mapping[str, bytes]:
    """The shared object of the sources, which are compiled `jobs` at a time."""
    sources = [name for name in files if name.endswith(".cpp")]

    def compiled(source: str) -> bytes:
        return compile_file(USER, [*compiler, "-c", source, "-o", OUTPUT], files)

    with ThreadPoolExecutor(jobs) as pool:
        made = list(pool.map(compiled, sources))
    objects = {f"{name}.o": content for name, content in zip(sources, made, strict=True)}
    link = [*compiler, "-shared", *objects, *libraries, "-o", OUTPUT]
    return {OUTPUT: compile_shared(USER, link, objects, symbols)}


def _imported(path: Path) -> ModuleType:
    loader: Any = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_loader(MODULE, loader, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
