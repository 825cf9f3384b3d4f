"""What a run of `torch-tests` runs: processes, each with a group of operators or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dicp.config import tool_variable
from dicp.conformance.configuration import Configuration
from dicp.conformance.names import OPERATOR_DATABASE, OperatorNames
from dicp.errors import TestFileError

SOURCE_TREE = "TORCH_SOURCE_PATH"


@dataclass(frozen=True)
class Unit:
    """What one process runs: a file of a source tree, or operators of the database."""

    file: str
    path: str
    device: str
    backend: str
    config: str
    names: tuple[str, ...]
    """Of all operators of the database."""
    operators: tuple[str, ...] = ()
    worker: ClassVar[str] = "dicp.conformance.torch_tests.worker"


@dataclass(frozen=True)
class Plan:
    """The processes of a run."""

    title: str
    names: OperatorNames
    units: tuple[Unit, ...]


def plan_of(
    device: str, backend: str, settings: Configuration, files: Sequence[str], group: int
) -> Plan:
    """Groups of operators of the database, then the files.

    Raises TestFileError and ConformanceConfigError.
    """
    from dicp.conformance.torch_tests.op_tests import full_name  # these two take seconds
    from dicp.torch_private import op_db

    names = OperatorNames(tuple(full_name(op) for op in op_db))
    settings.check_operators(names)
    config = str(settings.path.resolve()) if settings.path else ""
    wanted = [name for name in names.names if settings.may_run(name)]
    known = tuple(names.names)
    own_tests = str(Path(__file__).with_name("op_tests.py"))
    units = [
        Unit(OPERATOR_DATABASE, own_tests, device, backend, config, known,
             tuple(wanted[k : k + group]))
        for k in range(0, len(wanted), group)
    ]  # fmt: skip
    units += [Unit(file, str(_path(file)), device, backend, config, known) for file in files]
    what = f"{f'compiled by {backend}, ' if backend else ''}on {device}"
    return Plan(f"PyTorch's tests {what}", names, tuple(units))


def _path(file: str) -> Path:
    """The path of a file of the source tree's tests."""
    tree = tool_variable(SOURCE_TREE)
    path = Path(tree).resolve() / "test" / file
    if not tree or not path.is_file():
        raise TestFileError(file, tree)
    return path
