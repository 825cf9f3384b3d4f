"""The results of earlier runs in an SQLite file, and what changed since the last one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from dicp.conformance.rows import Row, differences
from dicp.errors import ResultsFileError

URL: Final = "sqlite:///"
DEFAULT: Final = f"{URL}./cache/diopi_testrecord.db"
_TABLES: Final = """
create table if not exists run (id integer primary key, time text, title text);
create table if not exists result (
    run integer references run (id), operator text, "case" text, result text, reason text,
    seconds real, max_error real
);
"""


def path_of(url: str) -> Path:
    """The file of `sqlite:///PATH`, or of a plain path. Raises ValueError for other databases."""
    if "://" in url and not url.startswith(URL):
        raise ValueError(f"{url!r} is no SQLite file: {URL}PATH")
    return Path(url.removeprefix(URL))


def kept(path: Path, title: str, rows: Sequence[Row]) -> list[str] | None:
    """Keep the results of a run of the title, in a file that is made if need be.

    Returns a line for each result that differs from the last run's, of the cases that ran now; None
    if there was no run. Raises ResultsFileError.
    """
    now = [replace(row, file="") for row in rows]
    ran = {row.name for row in now}
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path) as database:
        before = [row for row in _last_run(database, title) if row.name in ran]
        _add_run(database, title, now)
    return list(differences(now, before)) if before else None


def _last_run(database: sqlite3.Connection, title: str) -> list[Row]:
    found = database.execute(
        'select operator, "case", result, reason, seconds from result where run = '
        "(select max(id) from run where title = ?)",
        (title,),
    )
    return [Row("", *values) for values in found]


def _add_run(database: sqlite3.Connection, title: str, rows: Sequence[Row]) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    run = database.execute("insert into run (time, title) values (?, ?)", (now, title))
    database.executemany(
        "insert into result values (?, ?, ?, ?, ?, ?, ?)",
        [
            (run.lastrowid, row.cls, row.test, row.result, row.reason, row.seconds,
             row.details.get("max_error"))
            for row in rows
        ],
    )  # fmt: skip


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(path)) as database, database:
            database.executescript(_TABLES)
            yield database
    except sqlite3.Error as error:
        raise ResultsFileError(path, str(error), "run_test --use_db") from error
