"""`python -m benchmarks COMMAND`, such as models, kernels or tools: one table, JSON and a chart."""

from __future__ import annotations

import argparse
import importlib
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import chart
from benchmarks.backends import EAGER, MODULES, parse
from benchmarks.machine import describe, kind
from benchmarks.options import OptionError, Options
from benchmarks.report import RESULTS, Progress, Report
from dicp.errors.command_line import described

COMMANDS = {
    "models": ("benchmarks.steps", "time of a step, inference and --train"),
    "kernels": ("benchmarks.kernels", "memory-bound kernels beside a copy of as many bytes"),
    "compile": ("benchmarks.compile", "time to the first result, caches empty, then filled"),
    "memory": ("benchmarks.memory", "peak memory of a step and of the process"),
    "gpu": ("benchmarks.gpu", "features, kernels, models and tests on a GPU, within ten minutes"),
    "tools": ("benchmarks.tools", "what the operator tools cost on a training step"),
    "scaling": ("benchmarks.scaling", "compile time and overhead against the number of layers"),
}


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def dtypes(text: str) -> tuple[str, ...]:
    for name in names(text):
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise argparse.ArgumentTypeError(f"{name!r} is no dtype, such as float32,bfloat16")
    return names(text)


def counts(text: str) -> tuple[int, ...]:
    for number in names(text):
        if not number.isdecimal() or not int(number):
            raise argparse.ArgumentTypeError(f"{number!r} is not a whole number above 0")
    return tuple(map(int, names(text)))


def backends(text: str) -> tuple[str, ...]:
    """Split at commas, but keep `name:option=value,option=value` together."""
    found: list[str] = []
    for part in names(text):
        if "=" in part and ":" not in part and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    known = sorted({EAGER, *MODULES, *torch.compiler.list_backends(exclude_tags=())})
    for label in found:
        try:
            name = parse(label).name
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if name not in known:
            raise argparse.ArgumentTypeError(f"no backend {name!r}; known: {', '.join(known)}")
    return tuple(found)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    top.add_argument("command", choices=COMMANDS)
    top.add_argument("--backends", type=backends, default="eager,inductor,cpugraph")
    top.add_argument("--models", "--kernels", "--sections", dest="names", type=names, default=())
    top.add_argument("--out", type=Path, help="default: the machine's in benchmarks/results")
    top.add_argument("--dtype", type=dtypes, default="float32", help="float32,bfloat16")
    top.add_argument("--train", action="store_true", help="training instead of inference")
    top.add_argument("--both", action="store_true", help="inference and training")
    top.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    top.add_argument("--layers", type=counts, default="1,4,16,64")
    top.add_argument("--quick", action="store_true", help="fewer samples and sizes")
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results, also of a run that was interrupted.

    Each kind of machine has a folder in `benchmarks/results/`: no run overwrites another kind's.
    """
    top = parser()
    given = top.parse_args(arguments)
    options = Options(
        command=given.command,
        backends=given.backends,
        names=given.names,
        dtypes=given.dtype,
        modes=(False, True) if given.both else (given.train,),
        device=given.device,
        quick=given.quick,
        layers=given.layers,
        out=given.out or RESULTS / kind(given.device),
    )
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # now, rather than after the measurement
    except OSError as error:
        top.error(f"--out: {described(error)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    report = Report(options, unit="", machine=describe(options.device))
    signal.signal(signal.SIGTERM, _interrupt)  # a time limit from outside: the table is printed
    try:
        importlib.import_module(COMMANDS[options.command][0]).run(
            options, report, Progress(console)
        )
    except OptionError as error:
        top.error(str(error))
    finally:
        if report.rows:
            console.print(report.table())
            for path in written(report, options.out):
                console.print(f"wrote {path}")


def written(report: Report, folder: Path) -> list[Path]:
    """Write the report as data, text and, where there is matplotlib, a chart; the paths."""
    paths = report.write(folder)
    picture = paths[0].with_suffix(".png")
    return [*paths, *([picture] if chart.draw(report, picture) else [])]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
