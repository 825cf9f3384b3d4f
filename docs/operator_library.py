"""Writes the table of docs/operator_library.md from `dicp/oplib/functions.txt`.

python docs/operator_library.py
"""

from __future__ import annotations

from pathlib import Path

from dicp.oplib.text import listing

PAGE = Path(__file__).with_name("operator_library.md")
MARK = "<!-- functions -->\n"


def page() -> str:
    """The page with the table as the code has it now."""
    written, _, _ = PAGE.read_text().partition(MARK)
    return f"{written}{MARK}{listing()}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
