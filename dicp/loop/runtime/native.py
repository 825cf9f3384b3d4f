"""Shared objects of generated code: loaded once, unloaded with their last executable."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import threading
import weakref
from collections.abc import Callable

_OPENMP = ("libgomp.so.1", "libomp.so", "libomp.so.5", "libiomp5.so")
"""Runtimes to keep loaded: their idle threads still run their code after the kernels unload."""
_KEEP_LOADED = os.RTLD_NOW | getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_NODELETE", 0)


class NativeLibrary:
    """A loaded shared object. Addresses from it are valid while this object lives."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        _keep_openmp()
        # Not at exit: threads may still be running its code.
        weakref.finalize(self, _ctypes.dlclose, self._library._handle).atexit = False

    def address(self, name: str) -> int:
        """The address of a symbol; raises AttributeError if the object does not define it."""
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        assert address is not None
        return address


class Libraries:
    """The loaded shared objects by key, held weakly: each stays loaded while its users live."""

    def __init__(self) -> None:
        self._loaded: weakref.WeakValueDictionary[str, NativeLibrary] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def find(self, key: str) -> NativeLibrary | None:
        return self._loaded.get(key)

    def load(self, key: str, open_library: Callable[[], ctypes.CDLL]) -> NativeLibrary:
        """The object of `key`, opened unless it is loaded already."""
        with self._lock:
            found = self._loaded.get(key)
            if found is None:
                found = self._loaded[key] = NativeLibrary(open_library())
            return found


def _keep_openmp() -> None:
    if not hasattr(os, "RTLD_NOLOAD"):
        return
    for name in _OPENMP:
        try:
            ctypes.CDLL(name, mode=_KEEP_LOADED)
        except OSError:
            continue  # not in this process
