"""One jinja2 environment for all skeletons; a name that is not given is an error."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.nativetypes import NativeEnvironment


@lru_cache(maxsize=64)
def _template(path: Path, autoescape: bool, kind: type[Environment] = Environment) -> Template:
    environment = kind(
        loader=FileSystemLoader(path.parent), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=autoescape,
    )  # fmt: skip
    environment.filters["one_line"] = one_line
    return environment.get_template(path.name)


def one_line(text: str) -> str:
    """`text` for a comment that ends with its line, in ASCII."""
    return json.dumps(text, ensure_ascii=True)[1:-1].rstrip("\\")


def render_template(path: Path, **values: Any) -> str:
    """The skeleton file at `path` filled in; raises jinja2.UndefinedError for a missing value."""
    return _template(path, False).render(**values)


def render_parts(path: Path, **values: Any) -> list[Any]:
    """As `render_template`, but texts and values as they are, one after the other."""
    template = _template(path, False, NativeEnvironment)
    try:
        return list(template.root_render_func(template.new_context(values)))
    except Exception:
        template.environment.handle_exception()  # raises it again, with the skeleton's own lines


def render_html(path: Path, **values: Any) -> str:
    """As `render_template`, for HTML: values are escaped unless they are marked as safe."""
    return _template(path, True).render(**values)
