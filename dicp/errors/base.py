"""The base class of all errors."""

from __future__ import annotations

from typing import Any

__all__ = ["DicpError"]


class DicpError(RuntimeError):
    """Base of all errors raised by dicp. The eager model stays usable after any of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default rebuilds from the constructor's arguments, which are fields here and not the
        # message; errors have to survive the way back from a worker process.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(cls: type[DicpError], args: tuple[Any, ...], fields: dict[str, Any]) -> DicpError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(fields)
    return error
