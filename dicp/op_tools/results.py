"""The records of a tool: printed as a table and appended to a CSV file, many at a time."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from dicp.config import tool_variable
from dicp.errors import ToolVariableError
from dicp.op_tools.frame import Feature
from dicp.op_tools.records import logger, timestamp
from dicp.op_tools.tables import table

FOLDER = Path("op_tools_results")
_Record = TypeVar("_Record")
Rows = Sequence[Sequence[object]]


class FeatureWithRecords(Feature, Generic[_Record]):
    """A tool with one record per call. `results` holds them."""

    result_folder: ClassVar[str]
    file_name: ClassVar[str]
    """How the name of the CSV file begins."""
    described: ClassVar[str]
    """What messages call the contents of the file."""
    columns: ClassVar[tuple[str, ...]]
    printed_columns: ClassVar[tuple[str, ...]]
    """The first of `columns`, which the printed table has."""
    most_waiting: ClassVar[int]

    def __init__(
        self, ops: Sequence[str] | None = None, *, folder: str | Path = FOLDER, **options: Any
    ) -> None:
        super().__init__(ops, **options)
        self.folder = Path(folder)
        self.results: list[_Record] = []
        self._waiting: dict[int, _Record] = {}
        self._file: Path | None = None

    def rows(self, record: _Record) -> Rows:
        raise NotImplementedError

    def keep(self, record: _Record) -> None:
        """Add a record, also of what ran elsewhere, such as a kernel of a compiled graph."""
        self.results.append(record)
        self._wait(record)

    def complete(self, record: _Record, later: _Record) -> None:
        """What came to be known of a record: if that is saved already, `later` becomes rows of its
        own, as of a call whose backward follows thousands of other calls."""
        if id(record) not in self._waiting:
            self._wait(later)

    def _wait(self, record: _Record) -> None:
        most = cache_size(self.most_waiting)
        with self._lock:
            if self.silent:
                return
            self._waiting[id(record)] = record
            full = len(self._waiting) >= most
        if full:
            self.flush()

    def flush(self) -> None:
        """Print the records that wait as one table, and append them to the CSV file."""
        with self._lock:
            records, self._waiting = self._waiting, {}
        rows = [row for record in records.values() for row in self.rows(record)]
        if not rows:
            return
        printed = self.printed_columns
        self.say(table(printed, [row[: len(printed)] for row in rows]))
        if self._file is None:
            self._file = new_file(self.folder, self.result_folder, self.file_name)
        save_rows(self._file, self.columns, rows, self.described)

    def forget(self) -> None:
        self._file, self._waiting, self.results = None, {}, []


def new_file(folder: Path, result_folder: str, name: str) -> Path:
    """A path that no other process writes."""
    return folder / result_folder / f"{name}_pid{os.getpid()}_{timestamp()}.csv"


def save_rows(
    path: Path, columns: Sequence[str], rows: Rows, described: str,
    say: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Append rows, and say where they are or why they are not saved: by `say` or the logger."""
    try:
        append_csv(path, columns, rows)
    except OSError as error:
        (say or logger().warning)(f"{described} is not saved: {error}")
        return
    (say or logger().info)(f"{described} saved to {path}")


def append_csv(path: Path, columns: Sequence[str], rows: Rows) -> None:
    """Add rows to a CSV file; a new file gets the names of its columns first. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(columns)
        writer.writerows(rows)


def cache_size(default: int) -> int:
    """How many records wait before a flush. Raises ToolVariableError."""
    text = tool_variable("OP_TOOLS_MAX_CACHE_SIZE")
    if not text:
        return default
    if not text.isdigit() or int(text) == 0:
        raise ToolVariableError("OP_TOOLS_MAX_CACHE_SIZE", text, "a whole number above 0")
    return int(text)
