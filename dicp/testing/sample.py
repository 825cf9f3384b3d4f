"""A rotating part of the selected tests, with the tests of what changed: `--sample PARTS`.

`--sample 10` takes a tenth, another one every eight hours, so that a server that runs all day gets
through all of them in less than four days and one that runs daily in ten. `--sample 10:3` takes the
fourth of the ten parts whenever it is run. Tests are put into parts by folder, so that every part
has its share of the (slow) models.

`--sweeps 10` takes a tenth of the tests marked `sweep`, others eight hours later, so that 80 hours
have all of them: tests of many arguments, and slow ones of what quick tests cover in parts. Any
other test of static and of dynamic shapes runs with one of the two, and an operator's case with its
first dtype and a fifth of its other dtypes and layouts: ten turns have each with both shapes.
"""

from __future__ import annotations

import re
import subprocess
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

HOURS = 8
MAX_CHANGED = 80
"""How many tests are run for what changed: about a minute's work for two processes."""
MAX_CHANGED_OF_SAMPLE = 20
"""The same of a part of a slow backend's tests, which take several times as long."""
FORM = re.compile(r"(?<=[\[-])(static|dynamic)(?=[]-])")
"""The shapes of a test, in its id."""
TESTED_BY = {
    "elementwise": "pointwise", "special": "pointwise", "nn": "convolution", "bags": "embedding",
    "resample": "upsample", "fused": "attention", "distance": "core_aten", "inplace": "indexing",
}  # fmt: skip
"""The test file of a source file where their names differ."""


def part(text: str, now: float | None = None) -> tuple[int, int]:
    """The part that an option's text names and the number of parts."""
    count, _, number = text.partition(":")
    turn = int((time.time() if now is None else now) // (HOURS * 3600))
    return (int(number) if number else turn) % int(count), int(count)


def changed_files(root: Path) -> list[str]:
    """Files that differ from the commit before the last; empty where git cannot tell."""
    command = ["git", "diff", "--name-only", "HEAD~1"]
    try:
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return []
    return result.stdout.split() if result.returncode == 0 else []


def test_files(changed: Collection[str], files: Collection[str]) -> set[str]:
    """Those of the test files that changed, or whose names tell that they test what changed."""
    stems = {Path(name).stem for name in changed if name.endswith(".py")}
    wanted = {TESTED_BY.get(stem, stem) for stem in stems}
    named = {
        file for file in files for stem in wanted
        if Path(file).stem.removeprefix("test_").startswith(stem)
    }  # fmt: skip
    return named | (set(changed) & set(files))


def sample(tests: Sequence[str], number: int, parts: int, changed: Collection[str]) -> set[str]:
    """The ids of the tests to run: one part of all, and what the changed files concern."""
    folders: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        folders[str(Path(file_of(test)).parent)].append(test)
    chosen: set[str] = set()
    for members in folders.values():
        chosen |= set(sorted(members, key=_shuffled)[number::parts])
    return chosen | _concerned(tests, number, changed, MAX_CHANGED_OF_SAMPLE)


def sweeps(
    tests: Sequence[str], marked: Collection[str], number: int, parts: int, changed: Collection[str]
) -> set[str]:
    """The ids of the tests to run: a part of each sweep, all others, and what the changes concern.

    A sweep is a test of static and dynamic shapes, the `marked` tests of one function, or those of
    one file that take no arguments.
    """
    functions: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        if test not in marked:
            name = FORM.sub("*", test)
        else:
            name = test.partition("[")[0] if "[" in test else file_of(test)
        functions[name].append(test)
    chosen: set[str] = set()
    for name, members in functions.items():
        turn = number + zlib.crc32(name.encode())  # else turn 0 would have the first of all groups
        if members[0] in marked:
            chosen |= set(sorted(members, key=_shuffled)[turn % parts :: parts])
        else:
            chosen.add(members[turn % len(members)])
    return chosen | _concerned(tests, number, changed, MAX_CHANGED)


def variants(number: int, parts: int) -> tuple[int, int]:
    """Which part of an operator's variants, of how many, goes with a part of the sweeps.

    The number's parity chooses static or dynamic shapes, the rest of it the variants.
    """
    return number // 2, (parts + 1) // 2


def _concerned(tests: Sequence[str], number: int, changed: Collection[str], most: int) -> set[str]:
    files = test_files(changed, {file_of(test) for test in tests})
    concerned = sorted((t for t in tests if file_of(t) in files), key=_shuffled)
    start = number * most % max(len(concerned), 1)
    return set((concerned[start:] + concerned[:start])[:most])


def file_of(test: str) -> str:
    """The file of a test's id."""
    return test.partition("::")[0]


def _shuffled(test: str) -> tuple[int, str]:
    return zlib.crc32(test.encode()), test
