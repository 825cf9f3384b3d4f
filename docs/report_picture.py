"""Takes the picture of docs/report.md: a report of one training step of a transformer's layer.

python docs/report_picture.py    needs the program chromium
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from torch import Tensor, nn
from torch.nn import functional as F

from dicp.report import write_report

PICTURE = Path(__file__).with_name("report.png")


class Layer(nn.Module):
    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def train() -> None:
    model = torch.compile(Layer(), backend="cpugraph")
    model(torch.randn(4, 128, 256)).square().mean().backward()


def take() -> None:
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("chromium is not installed: docs/report.png is left as it is")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        script = Path(shutil.copy(__file__, Path(folder) / "train.py"))
        page = write_report(script, Path(folder) / "report.html", ["train"])
        shown = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = shown.new_page(viewport={"width": 1360, "height": 1180})
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-ready]")
        tab.locator("#drawing .box.kernel").nth(1).click()
        tab.evaluate("document.querySelector('#about').textContent = 'train.py'")
        tab.screenshot(path=PICTURE)
        shown.close()


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else take()
