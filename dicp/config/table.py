"""A table of settings: dataclass fields that carry their variables, kinds and meanings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from dicp.config.kinds import Invalid, Kind
from dicp.errors import ConfigValueError

__all__ = ["Option", "vendor_option"]


@dataclass(frozen=True)
class Option:
    """One row of the table of settings."""

    name: str
    kind: Kind
    environment: tuple[str, ...]
    default: Any
    meaning: str
    changes_code: bool

    def parse(self, value: object, source: str) -> Any:
        """`value` as this option's type. Raises ConfigValueError naming `source`."""
        try:
            return self.kind.parse(value)
        except Invalid:
            raise ConfigValueError(source, value, self.kind.expected, self.kind.fix) from None


def setting(
    kind: Kind,
    environment: str,
    meaning: str,
    *,
    default: object = MISSING,
    factory: Callable[[], Any] | None = None,
    default_text: str = "",
    changes_code: bool = False,
) -> Any:
    metadata = {
        "kind": kind,
        "environment": tuple(environment.split()),
        "meaning": meaning,
        "default_text": default_text or _as_text(default),
        "changes_code": changes_code,
    }
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "" if value in (None, (), MISSING) else str(value)


def _option(setting: Field[Any]) -> Option:
    metadata = setting.metadata
    return Option(
        setting.name,
        metadata["kind"],
        metadata["environment"],
        metadata["default_text"],
        metadata["meaning"],
        metadata["changes_code"],
    )


def vendor_option(
    name: str,
    kind: Kind,
    environment: str,
    meaning: str,
    *,
    default: Any,
    changes_code: bool = True,
) -> Option:
    """An option that a target adds to the table: `Target.options` lists them.

    `environment` names its variables, separated by spaces; `default` is a value of its kind.
    """
    return Option(name, kind, tuple(environment.split()), default, meaning, changes_code)


def read(options: Sequence[Option], environ: Mapping[str, str]) -> dict[str, Any]:
    """The values of those `options` that the environment sets."""
    values: dict[str, Any] = {}
    for option in options:
        variable = next((name for name in option.environment if environ.get(name)), None)
        if variable is not None:
            source = f"environment variable {variable}"
            values[option.name] = option.parse(environ[variable], source)
    return values


def options_of(table: type) -> tuple[Option, ...]:
    """The options that the fields of a dataclass state."""
    return tuple(_option(f) for f in fields(table) if f.metadata)
