"""What the page shows, as JSON values: graphs with boxes, edges, times and memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dicp.report.dump import Dump, Graph, Program, Record
from dicp.report.memory import memory_over_run
from dicp.report.roofline import Roofline
from dicp.report.tool_results import ToolResults

View = dict[str, Any]
_DIGEST = re.compile(r"_[0-9a-f]{8,12}$")


def view_of(dump: Dump, roofline: Roofline, tools: ToolResults) -> View:
    """Everything that the page shows of a compilation."""
    graphs = [
        _program_view(graph, number, program, roofline, tools)
        for graph in dump.graphs for number, program in enumerate(graph.programs)
    ]  # fmt: skip
    return {
        "graphs": graphs,
        "compilations": [_compilation(graph) for graph in dump.graphs],
        "left": [row for graph in dump.graphs for row in _left_to_eager(graph)],
        "breaks": [_break(each) for each in dump.breaks],
        "lines": dict(dump.lines),
        "roofline": _roofline_view(roofline),
        "tools": {**asdict(tools), "any": tools.any},
    }


def graph_title(report: Record, number: int = 0, count: int = 1) -> str:
    part = f", part {number + 1}" if count > 1 else ""
    return f"{report['name']} {report['kind']}{part}"


# ---- one program ---------------------------------------------------------------------------------


def _program_view(
    graph: Graph, number: int, program: Program, roofline: Roofline, tools: ToolResults
) -> View:
    record, times = program.record, program.times
    tensors, steps = record["tensors"], record["steps"]
    shared = Counter(step["launch"] for step in steps)
    decisions = {node["node"]: node["decision"] for node in graph.report["nodes"]}
    boxes = [
        _box(step, shared[step["launch"]], record, times, roofline)
        | {"kind": _kind(step, decisions)}
        for step in steps
    ]
    _mark_failures(boxes, tools)
    return {
        "title": graph_title(graph.report, number, len(graph.programs)),
        "target": record["target"],
        "sizes": record["sizes"],
        "obstacle": record["obstacle"],
        "untimed": _untimed(record, times),
        "whole": times.get("whole"),
        "runs": times.get("runs"),
        "tensors": [
            [t["name"], f"{t['dtype']}{t['shape']}", t["nbytes"], t["place"], t["result"]]
            for t in tensors
        ],
        "boxes": boxes,
        "edges": edges_between(steps),
        "launches": _launches(steps, shared, times),
        "memory": memory_over_run(tensors, len(steps)),
        "workspace": record["workspace"],
        "blocks": [
            [t["name"], t["first"], t["last"], t["offset"], t["nbytes"]]
            for t in tensors if t["offset"] is not None
        ],
        "programs": record["programs"],
        "sources": record["sources"],
    }  # fmt: skip


def _box(step: Record, sharing: int, record: Record, times: Record, roofline: Roofline) -> View:
    """A kernel, a call or an operator. Its time is known unless it shares a launch with others."""
    moved = sum(a["nbytes"] for a in (*step["reads"], *step["writes"]))
    measured = times.get("seconds", {}).get(str(step["launch"])) if sharing == 1 else None
    limit = bound = None
    if measured is not None and roofline.copies:
        dtype = _dtype(step, record["tensors"])
        limit, bound = roofline.limit(moved, step["flops"], dtype)
    operators = Counter(_short(origin["op"]) for origin in step["origins"])
    return {
        "name": step["name"],
        "title": _DIGEST.sub("", step["name"]).rstrip("."),
        "group": step["group"],
        "operators": [f"{op} ×{n}" if n > 1 else op for op, n in operators.items()],
        "origins": [[o["op"], o["node"], o["user_line"]] for o in step["origins"]],
        "reads": [[a["tensor"], a["nbytes"]] for a in step["reads"]],
        "writes": [[a["tensor"], a["nbytes"]] for a in step["writes"]],
        "text": step["text"],
        "moved": moved,
        "flops": step["flops"],
        "seconds": measured and measured[0],
        "least": measured and measured[1],
        "limit": limit,
        "bound": bound,
        "failed": [],
    }


def _kind(step: Record, decisions: Mapping[str, str]) -> str:
    """Code that only calls a library counts as a library call, as its node's report says."""
    found = {decisions.get(origin["node"]) for origin in step["origins"]}
    return "library" if step["kind"] == "kernel" and found == {"library"} else str(step["kind"])


def _dtype(step: Record, tensors: Sequence[Record]) -> str:
    """The dtype of the largest tensor of a step, in which it computes for the most part."""
    touched = [tensors[a["tensor"]] for a in (*step["writes"], *step["reads"])]
    return max(touched, key=lambda t: t["nbytes"])["dtype"] if touched else ""


def _short(op: str) -> str:
    """`aten.add.Tensor` as `add`; other namespaces keep their name."""
    parts = op.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else op


def edges_between(steps: Sequence[Record]) -> list[list[Any]]:
    """[from, to, bytes, tensors] for each pair of steps of which one reads what the other wrote."""
    writer: dict[int, int] = {}
    found: dict[tuple[int, int], list[int]] = {}
    sizes: Counter[tuple[int, int]] = Counter()
    for number, step in enumerate(steps):
        for access in step["reads"]:
            source = writer.get(access["tensor"])
            if source is not None:
                found.setdefault((source, number), []).append(access["tensor"])
                sizes[source, number] += access["nbytes"]
        writer |= {access["tensor"]: number for access in step["writes"]}
    return [[*ends, sizes[ends], tensors] for ends, tensors in found.items()]


def _launches(steps: Sequence[Record], shared: Mapping[int, int], times: Record) -> list[View]:
    """The vendor's graphs that are launched as a whole: name, operators, seconds."""
    groups = {s["launch"]: s["group"] for s in steps if s["group"] and shared[s["launch"]] > 1}
    seconds = times.get("seconds", {})
    return [
        {"group": group, "operators": shared[launch],
         "seconds": seconds.get(str(launch), [None])[0]}
        for launch, group in groups.items()
    ]  # fmt: skip


def _untimed(record: Record, times: Record) -> str:
    """Why a program has no times; empty if it has."""
    if times:
        return str(times["obstacle"])
    return record["untimed"] or "times were not asked for, or it did not run"


def _mark_failures(boxes: Sequence[View], tools: ToolResults) -> None:
    """Give each kernel the failed comparisons of it: their rows begin with its name."""
    failed: dict[str, list[str]] = {}
    for row in tools.failures:
        failed.setdefault(row.get("name", "").partition(" ")[0], []).append(row.get("name", ""))
    for box in boxes:
        box["failed"] = failed.get(box["name"], [])


# ---- the other sections --------------------------------------------------------------------------


def _compilation(graph: Graph) -> View:
    report = graph.report
    decisions = Counter(node["decision"] for node in report["nodes"])
    return {
        "title": graph_title(report),
        "cache": report["cache"],
        "stages": [[name, seconds] for name, seconds in report["stages"].items()],
        "decisions": dict(decisions),
        "programs": len(graph.programs),
    }


def _left_to_eager(graph: Graph) -> list[View]:
    """The operators that have a reason: those left to eager, then library calls with one."""
    title = graph_title(graph.report)
    found = [
        {"graph": title, **node} for node in graph.report["nodes"]
        if node["decision"] == "eager" or node["reason"]
    ]  # fmt: skip
    return sorted(found, key=lambda node: node["decision"] != "eager")


def _break(record: Record) -> View:
    """A graph break: its first line, Dynamo's explanation and hints."""
    lines = [line.strip() for line in record["reason"].splitlines() if line.strip()]
    return {
        "place": record["place"],
        "skipped": record["skipped"],
        "reason": lines[0] if lines else "no reason given",
        "more": lines[1:],
    }


def _roofline_view(roofline: Roofline) -> View:
    if not roofline.copies:
        return {"obstacle": roofline.obstacle}
    return {
        "obstacle": "",
        "device": roofline.device,
        "processor": roofline.processor,
        "threads": roofline.threads,
        "load": roofline.load,
        "bandwidth": roofline.bandwidth,
        "rates": dict(roofline.rates),
    }
