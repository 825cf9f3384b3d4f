"""Replay captured operators offline.

python -m dicp.op_tools.run_op_from_data DIR... [--acc_check] [--run_times N] [--sync_time_measure]
    [--only_run_forward] [--device D] [--backend B] [--as_case FILE] [--module M]...

DIR is one capture or any folder above captures. Exit status: 0 all checks hold, 1 one failed,
2 no capture found, one that cannot be read, or a file that cannot be written. Collectives are named
and not replayed. A capture is data and could name any function: operators of PyTorch's and of its
plugins are run, and functions of the modules that --module names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dicp.dynamo_bridge.timed import copied_as_laid_out
from dicp.errors import CaptureFormatError, OperatorNameError
from dicp.machine import device_problem
from dicp.op_tools import storage, trees
from dicp.op_tools.autocompare import OpAutoCompare
from dicp.op_tools.capture import argument_rows
from dicp.op_tools.cases import CaseList, NotStorableError, case_file
from dicp.op_tools.draws import GeneratorStates
from dicp.op_tools.frame import FRAME, Call
from dicp.op_tools.names import operator_called, overwrites, reads_memory
from dicp.op_tools.overwriting import differentiable_result
from dicp.op_tools.reference import autocast_named, writable
from dicp.op_tools.tables import argument_table
from dicp.op_tools.timing import OpTimeMeasure, device_of

RUNS = 100
"""How often an operator is measured by default."""

_INPUTS = ("input.json", "input.pth")


@dataclass(frozen=True)
class Captured:
    """One captured call, read from its folder."""

    folder: Path
    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_outputs: Sequence[torch.Tensor | None] | None
    random_states: GeneratorStates | None = None
    autocast: str = ""

    @property
    def is_collective(self) -> bool:
        return self.operator.startswith("torch.distributed.")

    def function(self, modules: Sequence[str] = ()) -> Callable[..., Any]:
        """The operator. Raises OperatorNameError, and CaptureFormatError for a function that is
        neither an operator nor of these modules."""
        found = operator_called(self.operator, modules)
        if found is None:
            reason = f"{self.operator!r} is no operator of PyTorch's; --module MODULE lets it run"
            raise CaptureFormatError(self.folder, reason)
        return found


def find_captures(folder: Path) -> Iterator[Path]:
    """The captures in or below a folder: those that hold an `input` file."""
    files = [path for name in _INPUTS for path in folder.rglob(name)]
    yield from sorted({path.parent for path in files})


def read_capture(folder: Path, device: str | None = None) -> Captured:
    """Raises CaptureFormatError."""
    if (folder / "input.json").exists():
        saved = storage.load(folder / "input", device)
        value, facts = saved.value, saved.facts
        if "kernel" in facts:
            reason = "it is of a compiled graph's kernel, which its reproduce.py runs"
            raise CaptureFormatError(folder, reason)
        gradients = None
        if (folder / "grad_outputs.json").exists():
            gradients = storage.load(folder / "grad_outputs", device).value
        try:
            if not isinstance(facts["operator"], str):
                raise TypeError(f"its operator is {facts['operator']!r}")
            return Captured(
                folder, facts["operator"], tuple(value["args"]), value["kwargs"], gradients,
                GeneratorStates.of_facts(facts), facts.get("autocast", ""),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it holds no call of an operator ({type(error).__name__}: {error})"
            raise CaptureFormatError(folder, reason) from error
    value = storage.load_legacy(folder / "input.pth")
    gradients = None
    if (folder / "grad_outputs.pth").exists():
        loaded = storage.load_legacy(folder / "grad_outputs.pth")
        gradients = list(trees.tensors(loaded))
    args, kwargs = _legacy_arguments(value)
    if device is not None:
        args, kwargs = trees.map_tensors((args, kwargs), lambda t: t.to(device))
    return Captured(folder, _legacy_name(folder), args, kwargs, gradients)


def _legacy_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, dict) and "args" in value:
        return tuple(value["args"]), dict(value.get("kwargs") or {})
    return tuple(value) if isinstance(value, (tuple, list)) else (value,), {}


def _legacy_name(folder: Path) -> str:
    """The operator's name among the parts of an older tool's path. Raises CaptureFormatError."""
    for part in reversed(folder.parts):
        if "." in part:
            try:
                if operator_called(part) is not None:
                    return part
            except OperatorNameError:
                continue
    raise CaptureFormatError(folder, "no part of its path is an operator's name")


def replay(captured: Captured, options: argparse.Namespace) -> bool:
    """Run one capture as the options ask; whether all checks hold."""
    function = captured.function(options.module)
    compiled = _compiled(function, options.backend) if options.backend else function
    check = OpAutoCompare(style="table") if options.acc_check else None
    call = Call(captured.operator, function, captured.args, captured.kwargs)
    if not (options.acc_check or options.sync_time_measure):
        sys.stdout.write(f"{argument_table(argument_rows(call))}\n")
    if check is not None:
        with check:
            for _ in range(options.run_times or 1):
                _run(captured, compiled, options)
    times = RUNS if options.run_times is None else options.run_times
    if options.sync_time_measure:
        with OpTimeMeasure():
            for _ in range(times):
                _run(captured, compiled, options)
    elif check is None:
        for _ in range(times):
            _run(captured, compiled, options)
    return check is None or not check.failures


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The operator through torch.compile, as one function that the tools see as the operator."""
    torch.compiler.reset()

    def plain(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.compile(plain, backend=backend, dynamic=False)  # type: ignore[no-any-return]


def _run(captured: Captured, function: Callable[..., Any], options: argparse.Namespace) -> None:
    """One run on copies of the inputs, backward included."""
    if captured.random_states is not None:
        captured.random_states.restore()
    with FRAME.unhooked():
        fresh = _same_memory if reads_memory(captured.operator) else _fresh
        args, kwargs = trees.map_tensors((captured.args, captured.kwargs), fresh)
        if overwrites(captured.operator, kwargs):
            args, kwargs = trees.map_tensors(
                (args, kwargs), lambda t: writable(t) if t.requires_grad else t
            )
    with autocast_named(captured.autocast, device_of((args, kwargs))):
        operator = captured.function(options.module)
        result = FRAME.call(function, args, kwargs, captured.operator, operator)
    if options.only_run_forward:
        return
    result = differentiable_result(captured.operator, args, result)
    results = [t for t in trees.tensors(result) if t.requires_grad]
    if results:
        with FRAME.unhooked():
            gradients = _gradients(captured, result)
        torch.autograd.backward(results, gradients)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return copied_as_laid_out(tensor.detach()).requires_grad_(tensor.requires_grad)


def _same_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _gradients(captured: Captured, result: Any) -> list[torch.Tensor]:
    """The captured gradients of the outputs, or ones."""
    found = []
    saved = captured.grad_outputs or []
    for place, tensor in enumerate(trees.tensors(result)):
        if tensor.requires_grad:
            gradient = saved[place] if place < len(saved) else None
            found.append(torch.ones_like(tensor) if gradient is None else gradient)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parser().parse_args(arguments)
    folders: list[Path] = []
    for name in options.folders:
        found = list(find_captures(Path(name)))
        if not found:
            sys.stderr.write(f"no capture found in {name}\n")
            return 2
        folders += found
    framework = f"{torch.__name__}:{torch.__version__}"
    device = options.device or " ".join(sorted(set(map(_devices, folders)))) or "cpu"
    sys.stdout.write(f"ditorch.framework: {framework}    device: {device}\n")
    status = 0
    cases: list[Captured] = []
    for folder in folders:
        sys.stdout.write(f"{folder}\n")
        try:
            captured = read_capture(folder, options.device)
            if not captured.is_collective:
                captured.function(options.module)
        except (CaptureFormatError, OperatorNameError) as error:
            sys.stderr.write(f"{error}\n")
            status = status or 2
            continue
        cases.append(captured)
        if not _holds(captured, options):
            status = 1
    if options.as_case and not _save_cases(Path(options.as_case), cases):
        status = status or 2
    return status


def _save_cases(path: Path, captures: Sequence[Captured]) -> bool:
    """Write the calls as a case file; False if it lacks one that has no form there, or fails."""
    cases, complete = CaseList(), True
    for captured in captures:
        name = captured.operator
        try:
            cases.add(name.replace("/", "_"), name, captured.args, captured.kwargs)
        except NotStorableError as error:
            sys.stderr.write(f"{captured.folder} is no case: a case file has no form for {error}\n")
            complete = False
    try:
        path.write_text(case_file(cases), "utf-8")
    except OSError as error:
        sys.stderr.write(f"{path} is not saved: {error.strerror}\n")
        return False
    sys.stdout.write(f"{path} saved\n")
    return complete


def _devices(folder: Path) -> str:
    """The devices of a capture's inputs, as far as they are there now."""
    try:
        rows = storage.facts_of(folder / "input").get("tensors", [])
        return " ".join(sorted({storage.present(row["device"]) for row in rows}))
    except (CaptureFormatError, KeyError, TypeError):  # reported when the capture is read
        return ""


def _holds(captured: Captured, options: argparse.Namespace) -> bool:
    """Replay one capture; False too if its operator raises."""
    if captured.is_collective:
        sys.stdout.write("not replayed: a collective needs the processes of its group\n")
        return True
    try:
        return replay(captured, options)
    except Exception as error:  # operators raise whatever they like
        sys.stdout.write(f"{captured.operator} raises {type(error).__name__}: {error}\n")
        return False


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _device(text: str) -> str:
    """A device that has memory here."""
    if problem := device_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return text


def _backend(text: str) -> str:
    """A backend of torch.compile, which looks it up at once."""
    try:
        torch.compile(_devices, backend=text)
    except Exception as error:  # of Dynamo's, or of a package that registers a backend
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dicp.op_tools.run_op_from_data", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folders", nargs="+", metavar="DIR")
    parser.add_argument("--acc_check", action="store_true", help="compare with float64 on the CPU")
    parser.add_argument("--run_times", type=_count, help=f"runs ({RUNS}; checks: 1)")
    parser.add_argument("--sync_time_measure", action="store_true", help="measure each run")
    parser.add_argument("--only_run_forward", action="store_true", help="leave out backward")
    parser.add_argument(
        "--device", type=_device, help="run there and not on the device of the capture"
    )
    parser.add_argument(
        "--backend", type=_backend, help="run through torch.compile with this backend"
    )
    parser.add_argument(
        "--module", action="append", default=[], help="a module whose functions may run, too"
    )
    parser.add_argument("--as_case", metavar="FILE", help="write conformance cases")
    return parser


if __name__ == "__main__":
    sys.exit(main())
