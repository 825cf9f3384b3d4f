"""Kernels built ahead of time, for chips that need not be there.

    python -m dicp.vendor.triton.aot [FOLDER] [--arch 80 --arch 90]

Builds every kernel of the programs in a cache folder for the given chips, and lists failures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dicp.cache import Cache
from dicp.config import Config
from dicp.errors import CompilerError
from dicp.vendor.triton.builder import Builder, Job, Plan, Workers

ARCHITECTURES = (80, 90)


def stored_programs(cache: Cache) -> Iterator[Mapping[str, Any]]:
    """The serialized programs of this target in a cache."""
    for key in cache.keys("graph"):
        entry = cache.get("graph", key)
        if entry is not None:
            stored = json.loads(entry.read("artifact.json"))
            if stored["target"] == "triton":
                yield stored["program"]


def jobs_of(programs: Iterator[Mapping[str, Any]], archs: Sequence[int]) -> list[Job]:
    """Every kernel of `programs` for every chip, each once."""
    found: dict[tuple[str, object], Job] = {}
    for program in programs:
        for arch in archs:
            for job in Plan(program["program"], program["texts"], arch).jobs():
                found.setdefault((job.name, job.variant), job)
    return list(found.values())


def build_all(jobs: Sequence[Job], builder: Builder) -> list[CompilerError]:
    """Builds `jobs`; returns the errors of those that do not compile."""
    return [r for r in builder.attempt(jobs) if isinstance(r, CompilerError)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds the kernels of stored programs; returns the exit status, 1 if not all are built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="cache folder (DICP_CACHE_DIR)")
    parser.add_argument("--arch", type=int, action="append", help="compute capability, as 90")
    options = parser.parse_args(arguments)
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"there is no folder {str(options.folder)!r}")
    config = Config.from_env()
    if options.folder is not None:
        config = config.with_options({"cache_dir": options.folder})
    cache, workers = Cache.open(config), Workers()
    jobs = jobs_of(stored_programs(cache), options.arch or ARCHITECTURES)
    try:
        failures = build_all(jobs, Builder(cache, workers, config.jobs))
    finally:
        workers.close()
    for failure in failures:
        sys.stdout.write(f"{failure}\n\n")
    sys.stdout.write(f"{len(jobs) - len(failures)} of {len(jobs)} kernels built\n")
    return 1 if failures or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
