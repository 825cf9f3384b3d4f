"""The page of a report in a real browser: it loads silently, and is searched, clicked and read."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked import COMPILER, server
from synthetic import write_dump

from dicp.report import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1440, 600)
SCRIPT = Path(__file__).with_name("program.py")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser of this machine."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(
            f"THE PAGE IS NOT TESTED: none of {', '.join(BROWSERS)} is installed "
            "(Debian: apt-get install chromium)"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


class Opened:
    """A page that is open in the browser, and all that it complained about or asked for."""

    def __init__(self, browser: Any, file: Path, width: int = WIDTHS[0]) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._requested)
        start = time.monotonic()
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)
        self.seconds = time.monotonic() - start

    def _requested(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.complaints.append(f"requested {request.url}")

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 500 kernels of a program with hostile names."""
    folder = tmp_path_factory.mktemp("large")
    return write_report(write_dump(folder / "dump", 500), folder / "report.html")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a script: training with a graph break, an eager operator, a tool that finds."""
    folder = tmp_path_factory.mktemp("real")
    command = ["-m", "dicp", "report", "--out", "page.html", SCRIPT, "cpugraph"]
    done = server(*COMPILER).run(command, cwd=folder, check=True)
    assert "the script printed this" in done.stdout
    return folder / "page.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_it_loads_silently_and_asks_for_nothing(browser: Any, real: Path, width: int) -> None:
    opened = Opened(browser, real, width)
    assert opened.complaints == []
    fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert opened.page.evaluate(fits), "the page scrolls sideways"
    shot = opened.page.screenshot(full_page=True)
    assert len(shot) > 30_000, "the screenshot is nearly empty"


def test_it_says_what_was_compiled(browser: Any, real: Path) -> None:
    opened = Opened(browser, real)
    summary = opened.text("#summary")
    assert "graphs" in summary and "1 graph break" in summary and "eager call" in summary
    names = opened.page.locator("#chosen option").all_inner_texts()
    assert {"forward", "backward"} <= {name.split()[1] for name in names}
    assert len(names) == 4, "forward and backward, before and after the graph break"
    assert "graph_break" in opened.text("#break-list")
    assert opened.count("#stages .stage-row") == 4
    stages = opened.text("#stages")
    assert "dynamo" in stages and "lower" in stages and "build" in stages
    assert opened.count("#memory-chart canvas") == 1
    assert "at most" in opened.text("#memory-note")


def test_kernels_are_timed_beside_their_roofline(browser: Any, real: Path) -> None:
    opened = Opened(browser, real)
    rows = opened.page.locator("#kernel-table tbody tr").all_inner_texts()
    cells = [row.split("\t") for row in rows]
    timed = [row for row in cells if row[6] != "not measured"]
    assert len(timed) == len(cells) > 5
    assert all(row[7] and row[9].strip().endswith("%") for row in timed)
    assert "GFLOP/s in float32" in opened.text("#kernels-note")


def test_a_click_shows_program_source_and_line(browser: Any, real: Path) -> None:
    opened = Opened(browser, real)
    opened.page.select_option("#chosen", label=graph_with(opened, "forward", 0))
    opened.page.locator("#drawing .box.kernel").first.click()
    panel = opened.text("#panel")
    assert "program.py:" in panel and "native_layer_norm" in panel
    assert "self.norm(x)" in panel, "the text of the user's line"
    assert "kernel inner_reduction" in opened.text("#panel pre.source")
    opened.page.get_by_role("button", name="Generated source").click()
    assert "for (" in opened.text("#panel pre.source")
    assert opened.count("#drawing .box.selected") == 1


def graph_with(opened: Opened, kind: str, place: int) -> str:
    names = opened.page.locator("#chosen option").all_inner_texts()
    return [name for name in names if f" {kind}" in name][place]


def test_calls_have_colours_of_their_own_and_edges_have_sizes(browser: Any, real: Path) -> None:
    opened = Opened(browser, real)
    colours = set()
    for name in opened.page.locator("#chosen option").all_inner_texts():
        opened.page.select_option("#chosen", label=name)
        fill = "boxes => boxes.map(box => getComputedStyle(box).fill)"
        for kind in ("kernel", "library", "eager"):
            found = opened.page.eval_on_selector_all(f"#drawing .box.{kind} rect", fill)
            colours |= {(kind, colour) for colour in found}
        if opened.count("#drawing .box") > 1:
            sizes = opened.page.locator("#drawing .edge text").all_text_contents()
            assert sizes and all(size.endswith("B") for size in sizes)
    assert len(colours) == len({colour for _, colour in colours}) == 3


def test_tool_findings_are_shown_and_mark_the_kernel(browser: Any, real: Path) -> None:
    opened = Opened(browser, real)
    found = opened.text("#tool-results")
    assert "beyond the tolerance" in found and "planted.kernel" in found
    assert "overflow_check: first inf or nan" in found
    assert "Bisection of train.py" in found and "aten.planted.default" in found
    assert "Modules beyond the fp64 rule, of 1 value" in found and "planted.block" in found
    assert "1 bisected fault" in opened.text("#summary")


def test_search_marks_jumps_and_filters(browser: Any, large: Path) -> None:
    opened = Opened(browser, large)
    opened.page.fill("#search", "fused_321_gelu")
    assert "1 here" in opened.text("#found")
    assert opened.count("#drawing .box.match") == 1
    shown = "rows => rows.filter(row => !row.hidden).length"
    assert opened.page.eval_on_selector_all("#kernel-table tbody tr", shown) == 1
    opened.page.press("#search", "Enter")
    assert "fused_321_gelu" in opened.text("#panel h3")
    box = opened.page.locator("#drawing .box.match").bounding_box()
    canvas = opened.page.locator("#canvas").bounding_box()
    assert canvas["x"] <= box["x"] <= canvas["x"] + canvas["width"]
    assert canvas["y"] <= box["y"] <= canvas["y"] + canvas["height"]
    opened.page.fill("#search", "no such thing")
    assert "0 here" in opened.text("#found")
    opened.page.press("#search", "Escape")
    assert opened.text("#found") == ""
    assert opened.page.eval_on_selector_all("#kernel-table tbody tr", shown) == 500
    assert opened.complaints == []


def test_zoom_pan_and_overview(browser: Any, large: Path) -> None:
    opened = Opened(browser, large)
    look = "document.getElementById('drawing').getAttribute('viewBox').split(' ').map(Number)"
    x, y, width, _ = opened.page.evaluate(look)
    opened.page.click("#zoom [data-zoom=in]")
    assert opened.page.evaluate(look)[2] < width
    opened.page.click("#zoom [data-zoom=fit]")
    assert opened.page.evaluate(look)[3] > 30_000, "all 500 are shown"
    opened.page.click("#zoom [data-zoom=start]")
    canvas = opened.page.locator("#canvas").bounding_box()
    middle = canvas["x"] + canvas["width"] / 3, canvas["y"] + canvas["height"] / 2
    opened.page.mouse.move(*middle)
    _, before, _, _ = opened.page.evaluate(look)
    opened.page.mouse.wheel(0, 400)
    opened.page.wait_for_function(f"{look}[1] > {before} + 100")
    opened.page.locator("#overview").click(position={"x": 30, "y": 300})
    opened.page.wait_for_function(f"{look}[1] > {before} + 5000")


def test_500_kernels_are_quick_and_readable(browser: Any, large: Path) -> None:
    opened = Opened(browser, large)
    assert opened.count("#drawing .box") == 500
    assert opened.seconds < 20, "about 1.5 seconds on an idle machine"
    heights = opened.page.eval_on_selector_all(
        "#drawing .box .name",
        "names => names.slice(0, 3).map(n => n.getBoundingClientRect().height)",
    )
    assert min(heights) >= 9, "the first boxes are large enough to be read"
    start = time.monotonic()
    opened.page.fill("#search", "gelu")
    assert "100 here" in opened.text("#found")
    assert time.monotonic() - start < 5
    assert large.stat().st_size < 3_000_000
    assert opened.complaints == []


def test_hostile_names_stay_text(browser: Any, large: Path) -> None:
    """Names, lines and sources of the synthetic dump try to end the script that holds them."""
    opened = Opened(browser, large)
    opened.page.locator("#drawing .box").first.click()
    assert "</script><script>window.broken = 1" in opened.text("#panel")
    assert "</script><script>window.broken = 1" in opened.text("#break-list")
    assert opened.page.evaluate("window.broken") is None
    assert opened.complaints == []
    source = large.read_text()
    assert source.count("</script>") == source.count("<script")
    assert "window.broken = 1</script>" not in source
