"""A dump of an invented compilation: as many kernels as wanted, in the form of a deep model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dicp.dynamo_bridge.recording import FORMAT

HOSTILE = "</script><script>window.broken = 1</script><!-- & \u2028"
KINDS = ("kernel", "kernel", "library", "kernel", "eager")


def write_dump(folder: Path, kernels: int, name: str = "graph00") -> Path:
    """A dump folder with one graph: blocks of a residual network, and skips over far blocks."""
    graph = folder / f"{name}_forward"
    graph.mkdir(parents=True)
    steps = [step(k) for k in range(kernels)]
    records = {
        "03_program.json": {
            "target": "cpu", "sizes": {"s0": 8}, "steps": steps, "workspace": 1 << 22,
            "tensors": [tensor(k, kernels) for k in range(kernels + 1)], "obstacle": "",
            "untimed": "", "lines": {},
            "programs": {s["name"]: f"kernel pointwise\n  from {HOSTILE}" for s in steps},
            "sources": {s["name"]: f"// {HOSTILE}\nvoid {s['name']}();" for s in steps},
        },
        "04_times.json": {
            "obstacle": "", "device": "cpu", "processor": "another machine's", "threads": 1,
            "load": 0.5,
            "runs": 5, "whole": 1e-5 * kernels,
            "seconds": {str(k): [1e-6 * (1 + k % 40), 1e-6] for k in range(kernels)},
        },
        "05_report.json": {
            "kind": "forward", "name": name, "cache": "cold", "created": 1.0, "pid": 1,
            "stages": {"dynamo": 0.5, "aotautograd": 1.5, "lower": 0.25, "build": 2.0},
            "nodes": [
                {"node": f"n{k}", "op": op(k), "line": f"/home/me/{HOSTILE}.py:{k}",
                 "decision": "eager" if KINDS[k % 5] == "eager" else "compiled",
                 "reason": f"no rule {HOSTILE}" if KINDS[k % 5] == "eager" else ""}
                for k in range(kernels)
            ],
            "lines": {f"/home/me/{HOSTILE}.py:{k}": f"y = {HOSTILE!r}" for k in range(kernels)},
        },
    }  # fmt: skip
    for file, record in records.items():
        (graph / file).write_text(json.dumps({"format": FORMAT, **record}))
    broken = {"reason": f"Unsupported: {HOSTILE}\nExplanation: {HOSTILE}", "place": "a.py:1",
              "skipped": False}  # fmt: skip
    record = {"format": FORMAT, "breaks": [broken], "lines": {"a.py:1": HOSTILE}}
    (folder / "breaks_1.json").write_text(json.dumps(record))
    return folder


def op(k: int) -> str:
    return ("aten.add.Tensor", "aten.gelu.default", "aten.mm.default", "aten.mul.Tensor",
            "aten.sort.default")[k % 5]  # fmt: skip


def step(k: int) -> dict[str, Any]:
    """Step k reads tensor k and writes tensor k + 1; some read earlier ones too."""
    earlier = [k - 6] if k % 3 == 0 and k > 6 else []
    earlier += [k - 100] if k % 10 == 0 and k > 100 else []
    reads = [{"tensor": t, "nbytes": 4096} for t in (k, *earlier)]
    kind = KINDS[k % 5]
    name = f"fused_{k}_{op(k).split('.')[1]}" if kind == "kernel" else op(k).replace(".", "::", 1)
    origins = [
        {"node": f"n{k}", "op": op(k), "user_line": f"/home/me/{HOSTILE}.py:{k}", "line_of": ""}
    ] * (1 + k % 4)  # fmt: skip
    return {
        "name": name, "kind": kind, "launch": k, "reads": reads, "origins": origins, "text": "",
        "writes": [{"tensor": k + 1, "nbytes": 4096}], "group": "", "flops": 1024 * k,
    }  # fmt: skip


def tensor(k: int, steps: int) -> dict[str, Any]:
    place = "caller" if k == 0 else "allocation" if k == steps else "workspace"
    return {
        "name": f"t{k}", "dtype": "float32", "shape": [8, 128], "nbytes": 4096, "place": place,
        "first": k - 1, "last": steps if k == steps else min(k + 6, steps - 1),
        "result": k == steps, "offset": 4096 * (k % 8) if place == "workspace" else None,
    }  # fmt: skip
