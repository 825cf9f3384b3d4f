"""Values that are compiled per set of sizes, when the sizes first occur: a limited cache."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from dicp.errors import SpecializationWarning

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class Specializations(Generic[Key, Made]):
    """The values for `limit` sets of the sizes `symbols`, with `each` values in a set.

    The least recently used are dropped beyond the limit, with one SpecializationWarning.
    """

    def __init__(self, limit: int, symbols: Iterable[str], each: int = 1) -> None:
        self._limit = limit
        self._symbols = sorted(symbols)
        self._most = limit * each
        self._kept: OrderedDict[Key, Made] = OrderedDict()
        self._lock = threading.Lock()
        self._warned = False

    def find(self, key: Key, make: Callable[[], Made]) -> Made:
        """The value for `key`, created by `make` if it is missing."""
        with self._lock:
            if key not in self._kept:
                self.keep(key, make())
            self._kept.move_to_end(key)
            return self._kept[key]

    def keep(self, key: Key, made: Made) -> None:
        """Use `made` for `key`."""
        self._kept[key] = made
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
            if not self._warned:
                self._warned = True
                warnings.warn(SpecializationWarning(self._limit, self._symbols), stacklevel=2)
