"""Charts of a report: a bar per backend and row, one panel per base of comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import Report, Row, geometric_mean

try:
    import matplotlib
except ModuleNotFoundError:
    plt = None
else:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

WIDTH_PER_BAR, HEIGHT = 0.16, 3.2


def draw(report: Report, path: Path) -> bool:
    """Ratios to each base and shares of the floors; the dashed lines are the geometric means.

    Whether there is something to draw, and something to draw it with.
    """
    measures: list[tuple[str, Any]] = [
        (f"times better than {base}", lambda row, b, base=base: row.ratio(b, base))
        for base in report.bases
    ]
    for floor in report.floors:
        measures.append((f"share of {floor}", lambda row, b, floor=floor: row.share(b, floor)))
    panels = [(group, rows, m) for group, rows in report.groups.items() for m in measures]
    if not panels or plt is None:
        return False
    bars = max(len(rows) for _, rows, _ in panels) * max(1, len(report.backends))
    size = (max(6.0, WIDTH_PER_BAR * bars + 2), HEIGHT * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False)
    for axis, (group, rows, (title, measure)) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, rows, report.backends, measure)
        axis.set_title(f"{title} ({group})" if group else title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _panel(axis: Any, rows: list[Row], backends: list[str], measure: Any) -> None:
    width = 0.8 / max(1, len(backends))
    for index, backend in enumerate(backends):
        values = [measure(row, backend) for row in rows]
        mean = geometric_mean(values)
        if mean is None:
            continue
        places = [row + index * width for row in range(len(rows))]
        color = f"C{index}"
        label = f"{backend} (mean {mean:.2f})"
        axis.bar(places, [value or 0 for value in values], width, color=color, label=label)
        axis.axhline(mean, color=color, linestyle="--", linewidth=0.8)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks([row + 0.4 for row in range(len(rows))])
    axis.set_xticklabels([_tick(row) for row in rows], rotation=30, ha="right", fontsize=7)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def _tick(row: Row) -> str:
    size = row.facts.get("size", "")
    return f"{row.name} {size}".strip()
