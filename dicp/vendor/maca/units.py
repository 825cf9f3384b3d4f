"""Translation units of MACA C++: their text, and the headers beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from dicp.codegen.spelling import SCALAR_HEADER, header_text
from dicp.template import render_template

FOLDER = Path(__file__).parent
HEADERS = ("device.h", "shim.h", "checked.h", "gpu.h", "compat.h", "native.h")


def unit_text(bodies: Mapping[str, str], comments: Mapping[str, Sequence[str]]) -> str:
    """Kernel name -> body as one unit, each below comments that list the operators it computes."""
    kernels = [
        {"name": name, "body": body, "comments": [_one_line(c) for c in comments.get(name, ())]}
        for name, body in bodies.items()
    ]
    return render_template(FOLDER / "unit.maca.jinja", kernels=kernels)


@lru_cache(maxsize=1)
def header_texts() -> dict[str, str]:
    """The files a unit includes, by name."""
    own = {name: (FOLDER / name).read_text() for name in HEADERS}
    return {**own, SCALAR_HEADER: header_text()}


def _one_line(text: str) -> str:
    return json.dumps(text, ensure_ascii=True)[1:-1].rstrip("\\")
