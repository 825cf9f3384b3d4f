"""`python -m dicp new-vendor`: a working package for a new vendor, written from templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from dicp.discovery import discover
from dicp.errors import NewVendorError
from dicp.template import render_template

Family = Literal["loop", "graph"]
TEMPLATES = Path(__file__).parent / "templates"
COMMON = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "test/static.ini": "static.ini",
    "test/dynamic.ini": "dynamic.ini",
    "test/run_test_ops.sh": "run_test_ops.sh",
    "test/run_test_models.sh": "run_test_models.sh",
    "test/test_{package}.py": "test_package.py",
    "{package}/__init__.py": "init.py",
    "{package}/device_config.toml": "device_config.toml",
    "{package}/convert_config.yaml": "convert_config.yaml",
}
"""File of the package -> its template in `common`."""
RESERVED = frozenset({"dicp"})
"""Names whose backend exists without a target."""


def new_vendor(name: str, family: Family, folder: Path) -> list[Path]:
    """Write the package of a vendor called `name` into `folder`; returns the files.

    Raises NewVendorError, before anything is written, for a name that is no lower-case identifier
    or is taken, and for a folder that has files; and for one that cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.endswith("graph"):
        raise NewVendorError(name, "is not a lower-case identifier without 'graph' at its end")
    taken = sorted({*discover(), *RESERVED})
    if name in taken:
        raise NewVendorError(name, f"is taken; taken names are {', '.join(taken)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NewVendorError(name, f"needs an empty folder, and {str(folder)!r} is not empty")
    package = f"{name}_dicp"
    texts = {file.format(package=package): TEMPLATES / "common" / f"{template}.jinja"
             for file, template in COMMON.items()}  # fmt: skip
    for template in sorted((TEMPLATES / family).glob("*.jinja")):
        texts[f"{package}/{_file_name(template)}"] = template
    words = {"name": name, "class": _class_name(name), "package": package, "family": family}
    try:
        return [_written(folder / f, render_template(t, **words)) for f, t in texts.items()]
    except OSError as error:
        problem = f"cannot be written to {str(folder)!r}: {error.strerror}"
        raise NewVendorError(name, problem) from error


def _file_name(template: Path) -> str:
    """`target.py` for `target.py.jinja`; a template of the package's own keeps its ending."""
    name = template.name.removesuffix(".jinja")
    return name if name.endswith(".py") else template.name


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if path.suffix == ".sh":
        path.chmod(0o755)
    return path
