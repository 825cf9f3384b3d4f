"""The pages of docs: their Python blocks run, their commands work, the picture is the code's."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import COMPILER, server

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `benchmarks`, however pytest starts

from dicp.testing import torchvision_operators  # noqa: E402

torchvision_operators.define()
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
PAGES = [*READMES, *sorted((ROOT / "docs").glob("*.md"))]
IN_FRESH_FOLDER = ROOT / "docs" / "new_hardware.md"
"""Its commands are run by test_new_vendor.py, in an environment of their own."""
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.M | re.S)


TESTED_ELSEWHERE = ("python -m examples llama", "python -m examples.needle",
                    "python -m dicp.conformance models")  # fmt: skip
"""Commands that take seconds, whose functions test_examples.py and test_models.py call as well."""


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def commands() -> list[Any]:
    """The commands of all pages, each once, without their comments."""
    pages = [page for page in PAGES if page != IN_FRESH_FOLDER]
    lines = "".join("".join(blocks(page, "sh")) for page in pages).splitlines()
    found = sorted({line.partition(" #")[0].strip() for line in lines})
    sweep = [pytest.mark.sweep]
    return [
        pytest.param(line, marks=sweep if line.startswith(TESTED_ELSEWHERE) else [])
        for line in found
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run_in_order(page: Path) -> None:
    names = {"torch": torch, "__name__": page.stem}
    source = page.read_text()
    for text in blocks(page, "python"):
        line = source[: source.index(text)].count("\n")
        exec(compile("\n" * line + text, str(page), "exec"), names)  # errors name the page's line


@pytest.mark.parametrize("command", commands())
def test_commands_work(command: str) -> None:
    program, *arguments = command.split()
    if program == "make":  # what takes minutes to an hour is listed, not run
        subprocess.run(["make", "-n", *arguments], check=True, capture_output=True, cwd=ROOT)
    else:
        assert program == "python", "only commands of Python and make are run here"
        server(*COMPILER).run(arguments, check=True, cwd=ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_block_of_commands_escapes(page: Path) -> None:
    """What looks like a block of code is fenced, in a language that a test runs or that shows."""
    source = page.read_text()
    languages = re.findall(r"^```([^\n]*)\n.*?^```$", source, re.M | re.S)
    assert set(languages) <= {"python", "sh", "cpp", "text", "toml", "yaml", "mermaid"}
    outside = re.sub(r"^```.*?^```$", "", source, flags=re.M | re.S)
    assert not re.findall(r"^(?: {4}|\t)\S.*", outside, re.M), "fence it"


def script(name: str) -> Any:
    """A script of docs as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_drawn_from_the_code() -> None:
    rooms = script("rooms")
    for path in rooms.PAGES:
        assert rooms.page(path) == path.read_text(), f"{path.name}: run `make docs`"


def test_the_settings_are_written_from_the_tables() -> None:
    environment = script("environment")
    assert environment.page() == environment.PAGE.read_text(), "run `make docs`"


def test_a_picture_that_the_code_does_not_have_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- pipeline -->\nstale\n<!-- end -->\n<!-- folders -->\n<!-- end -->\n")
    text = script("rooms").page(page)
    assert "stale" not in text and "capture --> partition --> passes --> lower" in text
    assert "dynamo_bridge[dynamo_bridge] --> target[target]" in text


def test_every_file_that_a_page_names_exists() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([\w/.]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
        for name in re.findall(r"`((?:dicp|test|docs)/[\w/.]+)`", page.read_text()):
            assert "NAME" in name or (ROOT / name).exists(), f"{page.name}: {name}"
