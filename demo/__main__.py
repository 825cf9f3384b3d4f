"""Train a vision transformer and a ResNet on handwritten digits, eager beside compiled.

Prints a table and draws both loss curves into demo/output/loss.png. Run it twice: the second time
the compiled graphs come from the disk cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from demo.models import ResNet, VisionTransformer
from demo.training import Digits, Learner, learners
from dicp.dynamo_bridge.backend import Backend

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

OUTPUT = Path(__file__).resolve().parent / "output"
DECISIONS = ("compiled", "library", "fused", "eager")
CACHE_STATES = {
    "cold": "compiled now",
    "graph": "from the disk cache",
    "aot": "from the disk cache",
}


@dataclass(frozen=True)
class Course:
    """A model and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]


COURSES = (
    Course("vision transformer", VisionTransformer, lambda p: torch.optim.AdamW(p, lr=2e-3)),
    Course("ResNet", ResNet, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
)


@dataclass(frozen=True)
class Result:
    """Both runs of a course, and the reports of the graphs it compiled."""

    course: Course
    eager: Learner
    compiled: Learner
    reports: Sequence[Any]

    def decided(self, decision: str) -> int:
        """How many operators of all graphs met this decision."""
        return sum(report.counts.get(decision, 0) for report in self.reports)

    @property
    def cache(self) -> str:
        """Whether the graphs were compiled in this run or found on disk."""
        states = dict.fromkeys(CACHE_STATES.get(r.cache, r.cache) for r in self.reports)
        return ", ".join(states)


def run(course: Course, digits: Digits, epochs: int, target: str, console: Console) -> Result:
    """Train the course's model eager and compiled, step by step in turn."""
    backend = Backend(target)
    eager, compiled = learners(course.build, course.optimizer, backend)
    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss: eager {task.fields[eager]:.4f}, compiled {task.fields[compiled]:.4f}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(
            course.name, total=digits.steps(epochs), eager=float("nan"), compiled=float("nan")
        )
        for images, labels in digits.batches(epochs):
            for learner in (eager, compiled):
                learner.step(images, labels)
            bar.update(task, advance=1, eager=eager.losses[-1], compiled=compiled.losses[-1])
    for learner in (eager, compiled):
        learner.test(digits.test_images, digits.test_labels)
    return Result(course, eager, compiled, list(backend.reports))


def table(results: Sequence[Result], target: str) -> Table:
    """Times, losses and accuracies of both runs, and what became of the operators."""
    found = Table(title=f"eager beside compiled for {target}")
    found.add_column("")
    for result in results:
        found.add_column(f"{result.course.name}\neager", justify="right")
        found.add_column("\ncompiled", justify="right")

    def line(name: str, cells: Callable[[Result], tuple[str, str]]) -> None:
        found.add_row(name, *(cell for result in results for cell in cells(result)))

    def both(name: str, value: Callable[[Learner], str]) -> None:
        line(name, lambda result: (value(result.eager), value(result.compiled)))

    line("compile, s", lambda r: ("", f"{r.compiled.compile_time:.1f}"))
    line("graphs", lambda r: ("", r.cache))
    both("step, ms", lambda learner: f"{1e3 * learner.step_time:.2f}")
    line("faster than eager", lambda r: ("", f"{r.eager.step_time / r.compiled.step_time:.2f} x"))
    both("final loss", lambda learner: f"{learner.losses[-1]:.5f}")
    both("test accuracy", lambda learner: f"{100 * learner.accuracy:.1f}%")
    for decision in DECISIONS:
        name = "left to ATen" if decision == "eager" else decision
        line(f"operators: {name}", lambda r, d=decision: ("", str(r.decided(d))))
    return found


def draw(results: Sequence[Result], path: Path) -> None:
    """The loss curves of both runs of every course."""
    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 3.6), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        axis.plot(result.eager.losses, label="eager", linewidth=3, alpha=0.4)
        axis.plot(result.compiled.losses, label="compiled", linewidth=1)
        axis.set(title=result.course.name, xlabel="step", ylabel="training loss", yscale="log")
        axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--target", default="cpu", help="the dicp target to compile for")
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args(arguments)
    console, digits = Console(), Digits.load()
    results = [run(course, digits, given.epochs, given.target, console) for course in COURSES]
    console.print(table(results, given.target))
    draw(results, OUTPUT / "loss.png")
    console.print(f"loss curves: {OUTPUT / 'loss.png'}")


if __name__ == "__main__":
    main()
