"""Writes docs/environment.md from the tables of `dicp.config` and of the installed targets.

python docs/environment.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dicp.config import DEVICE_VARIABLES, OPTIONS, SWITCH_VARIABLES, Option
from dicp.discovery import discover
from dicp.target import find_target

PAGE = Path(__file__).with_name("environment.md")
HEAD = """# Settings and environment variables

`make docs` writes this page from the tables of `dicp/config`; `python -m dicp config` prints
them with the values that hold now. An option goes before its variable:
`torch.compile(f, backend=..., options={"fuse": False})`. A variable that is set but empty counts as
unset, a `DICP_` variable that is none of these is a warning, and a wrong value is an error that
names the variable. Of several names for one setting, the first that is set counts.

"""
TOOLS = """
## The operator tools

Their variables (`OP_...`) are described where the tools are: [op_tools.md](op_tools.md).
"""


def page() -> str:
    """The page as the code has it now."""
    parts = [HEAD, "## Compilation\n\n", table(OPTIONS)]
    for name in sorted(discover()):
        target = find_target(name)
        if target.options:
            parts += [f"\n## Target `{name}`\n\n", table(target.options)]
    parts += ["\n## The eager device\n\n", table(DEVICE_VARIABLES)]
    parts += ["\n## `import ditorch`\n\n", table(SWITCH_VARIABLES), TOOLS]
    return "".join(parts)


def table(options: Iterable[Option]) -> str:
    rows = [
        "| setting | variable | values | default | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for option in options:
        many = isinstance(option.default, tuple)
        default = " ".join(map(str, option.default)) if many else str(option.default)
        variables = "<br>".join(f"`{variable}`" for variable in option.environment)
        cells = (f"`{option.name}`", variables, option.kind.name, default, option.meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
