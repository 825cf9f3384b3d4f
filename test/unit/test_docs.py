"""The pages of docs: their Python blocks run, their commands work, the picture is the code's."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run_in_order(page: Path) -> None:
    names = {"torch": torch, "__name__": page.stem}
    source = page.read_text()
    for text in blocks(page, "python"):
        line = source[: source.index(text)].count("\n")
        exec(compile("\n" * line + text, str(page), "exec"), names)  # errors name the page's line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_work(page: Path) -> None:
    for command in "".join(blocks(page, "sh")).splitlines():
        program, *arguments = command.split()
        assert program == "python", "only commands of Python are run here"
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT)


def test_the_picture_of_the_rooms_is_drawn_from_the_code() -> None:
    spec = importlib.util.spec_from_file_location("rooms", ROOT / "docs" / "rooms.py")
    assert spec is not None and spec.loader is not None
    rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rooms)
    assert rooms.page() == rooms.PAGE.read_text(), "run `make docs`"


def test_every_file_that_a_page_names_exists() -> None:
    for page in [*PAGES, ROOT / "README.md"]:
        for name in re.findall(r"`((?:dicp|test|docs)/[\w/.]+)`", page.read_text()):
            assert "NAME" in name or (ROOT / name).exists(), f"{page.name}: {name}"
