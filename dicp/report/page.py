"""Rendering: the page's template, styles and scripts with the view as JSON inside.

The view is the only place for text that comes from a user's program. It stands in a script element
that is data, with `<`, `>` and `&` as escapes, and the scripts show it as text. The page's policy
allows the page's own scripts by their digest and forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

import torch
from markupsafe import Markup

from dicp.report.dump import Dump
from dicp.report.roofline import Roofline
from dicp.report.tool_results import ToolResults
from dicp.report.view import View, view_of
from dicp.template import render_html
from dicp.version import VERSION

_HERE = Path(__file__).parent
_LIBRARIES = ("third_party/dagre.min.js", "third_party/uPlot.iife.min.js")
_SCRIPTS = ("text.js", "graph.js", "panel.js", "tables.js", "charts.js", "page.js")
_STYLES = ("third_party/uPlot.min.css", "page.css")


def render(dump: Dump, roofline: Roofline, tools: ToolResults, command: str) -> str:
    """The page as text."""
    view = view_of(dump, roofline, tools)
    view["about"] = {
        "command": command,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": f"dicp {VERSION}, torch {torch.__version__}",
    }
    return page_of(view)


def page_of(view: View) -> str:
    """The page that shows a view."""
    scripts = [_script(name) for name in (*_LIBRARIES, *_SCRIPTS)]
    digests = [hashlib.sha256(text.encode()).digest() for text in scripts]
    policy = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return render_html(
        _HERE / "page.html.jinja",
        command=view["about"]["command"],
        policy=Markup(policy),
        styles=[Markup((_HERE / name).read_text("utf-8")) for name in _STYLES],
        scripts=[Markup(text) for text in scripts],
        data=Markup(_json_in_html(view)),
    )


def _script(name: str) -> str:
    """A script's text; a comment that names its source map would have the browser look for it."""
    lines = (_HERE / name).read_text("utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("//# sourceMappingURL"))


def _json_in_html(view: View) -> str:
    """JSON that no HTML parser takes for the end of its element, nor for a comment."""
    text = json.dumps(view, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
