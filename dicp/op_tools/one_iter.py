"""One training step, module by module: recorded once, compared with a backend or a device.

    with op_tools.one_iter.record(model, optimizer, "folder"): train_step()
    op_tools.one_iter.compare("folder", model, optimizer, backend="dicp")

python -m dicp.op_tools.one_iter diff A B compares two recordings: exit status 0 they agree, 1 they
differ, 2 one cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dicp.errors import CaptureFormatError
from dicp.op_tools import trees
from dicp.op_tools.module_compare import COLUMNS as MODULE_COLUMNS
from dicp.op_tools.module_compare import Comparing, ModuleReport, Tested
from dicp.op_tools.recording import FolderSink, ModuleCall, Recorder, Recording
from dicp.op_tools.records import logger
from dicp.op_tools.results import FOLDER, new_file, save_rows
from dicp.op_tools.tables import table
from dicp.op_tools.verdict import COLUMNS, Comparison, as_promised
from dicp.op_tools.verdict import compare as compare_values
from dicp.torch_private import any_number_of_compilations

RESULTS = "one_iter_result"
_CALL_FILES = ("input", "output", "grad_outputs", "grad_inputs")
_STEP_FILES = ("weights_before", "parameter_grads", "weights_after")


def record(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: str | Path,
    iters: int = 1,
) -> Recorder:
    """A context in which each module's inputs, outputs, gradients and weights are saved; what was
    recorded in the folder before is removed.

    iters: steps of the optimizer to record; without an optimizer, calls of the model.
    """
    group = torch.distributed
    several = group.is_available() and group.is_initialized() and group.get_world_size() > 1
    own = Path(folder) / f"rank{group.get_rank()}" if several else Path(folder)
    return Recorder(model, optimizer, FolderSink(own), iters)


def compare(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    chained: bool = False,
) -> ModuleReport:
    """Run the recorded modules through a backend or on a device, and print their verdicts.

    Each module gets the recorded inputs and gradients; with `chained` the model gets them, and each
    module what those before it give. Verdicts are those of the fp64 rule. A model that is compiled
    already is judged as a whole; in compiled modules that are wrong the operator is looked for.
    The program's model and optimizer keep their state, but for weights of a compiled model, which
    become the recorded ones. The rows are also written to `op_tools_results/one_iter_result`.
    Raises CaptureFormatError; RecordingMismatchError where the model is not the recorded one.
    """
    tested = Tested(backend, torch.device(device or "cpu"))
    comparing = Comparing(Recording.read(folder), model, optimizer, tested)
    with any_number_of_compilations():
        report = comparing.chained() if chained else comparing.report()
    logger().info(str(report))
    path = new_file(FOLDER, RESULTS, "one_iter_info")
    save_rows(path, MODULE_COLUMNS, list(report.rows()), "one_iter result")
    return report


def diff(first: str | Path, second: str | Path) -> list[Comparison]:
    """The values of two recordings side by side, in the order of the first.

    Names are `<module> <file>[<k>]`. Raises CaptureFormatError.
    """
    left, right = Recording.read(first), Recording.read(second)
    others = {(c.iteration, c.path, n): c for n, c in _numbered(right.calls)}
    found: list[Comparison] = []
    for iteration in sorted({call.iteration for call in left.calls}):
        for n, call in _numbered(left.calls):
            if call.iteration != iteration:
                continue
            other = others.pop((iteration, call.path, n), None)
            if other is None:
                found.append(_missing(call.name, second))
                continue
            for file in _CALL_FILES:
                places = (call.folder, other.folder)
                found += _pairs(f"{call.name} {file}", left, right, places, file)
        place = f"iteration{iteration}"
        for file in _STEP_FILES:
            found += _pairs(f"{place} {file}", left, right, (place, place), file)
    return [*found, *(_missing(call.name, first) for call in others.values())]


def _numbered(calls: Sequence[ModuleCall]) -> Iterator[tuple[int, ModuleCall]]:
    """Each call with how often its module was called before it in the iteration."""
    counts: dict[tuple[int, str], int] = {}
    for call in calls:
        key = call.iteration, call.path
        counts[key] = counts.get(key, -1) + 1
        yield counts[key], call


def _missing(name: str, folder: str | Path) -> Comparison:
    return Comparison(name, False, 0.0, error_info=f"not in {folder}", fp64=False)


def _pairs(
    name: str, left: Recording, right: Recording, places: tuple[str, str], file: str
) -> Iterator[Comparison]:
    have = left.has(places[0], file), right.has(places[1], file)
    if not all(have):
        if any(have):
            yield _missing(name, (right if have[0] else left).folder)
        return
    values = left.load(places[0], file).value, right.load(places[1], file).value
    one, two = (dict(_named(value)) for value in values)
    for key in dict.fromkeys((*one, *two)):
        if key in one and key in two:
            found = compare_values(name, f"{name}{key}", one[key], two[key])
            yield as_promised(found, one[key], two[key])
        else:
            yield _missing(f"{name}{key}", (right if key in one else left).folder)


def _named(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, dict) and all(isinstance(v, torch.Tensor | None) for v in value.values()):
        yield from ((f" {k}", v) for k, v in value.items() if v is not None)
    else:
        yield from ((f"[{k}]", t) for k, t in enumerate(trees.tensors(value)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m dicp.op_tools.one_iter")
    commands = parser.add_subparsers(dest="command", required=True)
    own = commands.add_parser("diff", help="compare two recordings")
    own.add_argument("first", metavar="A")
    own.add_argument("second", metavar="B")
    options = parser.parse_args(arguments)
    try:
        found = diff(options.first, options.second)
    except CaptureFormatError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    wrong = [c for c in found if not c.allclose]
    logger().info(table(COLUMNS, [c.row() for c in found]))
    first = f"; first: {wrong[0].name}" if wrong else ""
    logger().info(f"one_iter: {len(found)} tensors, {len(wrong)} differ{first}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
