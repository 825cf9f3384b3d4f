"""The JSON records of a dump: each graph's report, and each program's outline and texts.

`dicp.report` reads it. Every record has FORMAT, which changes with its fields.
"""

from __future__ import annotations

import json
import linecache
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import fx

from dicp.config import Config
from dicp.dynamo_bridge.flops import count_flops
from dicp.errors import DumpFolderError
from dicp.outline import OutlineStep
from dicp.private_files import reason_of
from dicp.target import Program, Source, Target
from dicp.torch_private import GraphBreak, first_sizes

FORMAT = 1
REPORT, PROGRAM, TIMES, BREAKS = "report.json", "program.json", "times.json", "breaks_{pid}.json"
"""Names of the files; those of a graph's folder have a number in front."""


def program_record(
    target: Target, program: Program, source: Source, gm: fx.GraphModule, config: Config
) -> dict[str, Any]:
    """A program's outline for the sizes of the first call, with operation counts and texts."""
    sizes = first_sizes(gm)
    named = {str(symbol): size for symbol, size in sizes.items()}
    record = {
        "format": FORMAT, "target": target.name, "sizes": named, "steps": [], "tensors": [],
        "workspace": 0, "obstacle": "", "untimed": target.untimed(program, config),
        "programs": {kernel.name: kernel.text for kernel in program.kernels()},
        "sources": dict(source.texts),
    }  # fmt: skip
    try:
        outline = target.outline(program, named)
    except NameError as error:
        return record | {"obstacle": f"a size is known only at run time: {error}"}
    if outline is None:
        return record | {"obstacle": f"target {target.name!r} gives no outline of its programs"}
    flops = count_flops(gm, sizes)
    shared = Counter(origin.node for step in outline.steps for origin in step.origins)
    steps = [asdict(step) | {"flops": _sum(step, flops, shared)} for step in outline.steps]
    for origin in (origin for step in steps for origin in step["origins"]):
        del origin["trace"]  # the report shows lines alone
    tensors = [asdict(tensor) for tensor in outline.tensors]
    lines = source_lines(o.user_line for step in outline.steps for o in step.origins)
    return record | {
        "steps": steps, "tensors": tensors, "workspace": outline.workspace, "lines": lines,
    }  # fmt: skip


def _sum(step: OutlineStep, flops: Mapping[str, int], steps_of: Mapping[str, int]) -> int | None:
    """The operations of a step's nodes; None where a node's count is unknown, or where several
    operators of a vendor's graph compute the node together."""
    nodes = dict.fromkeys(origin.node for origin in step.origins)
    if step.kind == "operator" and any(steps_of[node] > 1 for node in nodes):
        return None
    counts = [flops.get(node) for node in nodes]
    return None if None in counts else sum(count or 0 for count in counts)


def breaks_record(breaks: Sequence[GraphBreak]) -> dict[str, Any]:
    """What Dynamo left to Python."""
    return {"format": FORMAT, "breaks": [asdict(each) for each in breaks],
            "lines": source_lines(each.place for each in breaks)}  # fmt: skip


def source_lines(places: Iterable[str]) -> dict[str, str]:
    """The text of each `file:line`."""
    found = {}
    for place in dict.fromkeys(filter(None, places)):
        file, _, line = place.rpartition(":")
        text = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
        if text:
            found[place] = text
    return found


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(record))


def write_text(path: Path, text: str) -> None:
    """Write a file of a dump. Raises DumpFolderError."""
    try:
        path.write_text(text)
    except OSError as error:
        raise DumpFolderError(path.parent, reason_of(error)) from error
