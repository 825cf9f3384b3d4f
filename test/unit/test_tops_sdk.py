"""topsgraph on an installed TopsRider, in a process of its own.

The installation's library defines the functions of the simulator's driver, and a process that has
loaded one of them calls it from graphs that are built for the other.
"""

from __future__ import annotations

from pathlib import Path

from support.forked import COMPILER, server

CASES = Path(__file__).with_name("tops_sdk_cases.py")


def test_an_installation() -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", CASES]
    done = server(*COMPILER).run(command)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout[-3000:]
