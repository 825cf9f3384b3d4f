"""The operator tools and reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dicp.errors.base import DicpError
from dicp.errors.text import at, did_you_mean, indented, nearest, sentence, shortened

__all__ = [
    "CaptureFormatError", "OperatorNameError", "OverflowFoundError", "RecordingMismatchError",
    "ReportOutputError", "ReportScriptError", "ReportSourceError", "ResultsFileError",
    "TestFileError", "ToolVariableError", "UnknownFeatureError",
]  # fmt: skip


class ResultsFileError(DicpError):
    """A file that should hold results of tests."""

    def __init__(self, file: Path, problem: str, by: str = "pytest --results FILE") -> None:
        self.file = file
        self.problem = problem
        super().__init__(f"{str(file)!r} holds no results of tests: {problem}. `{by}` writes them.")


class ReportSourceError(DicpError):
    """A path without a dump to report on."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(
            f"no report of {str(path)!r}: {problem}. Give a Python script that uses a backend of "
            "dicp, or a folder that DICP_DUMP=<folder> wrote (with DICP_DUMP_TIMES=1 for times)."
        )


class ReportScriptError(DicpError):
    """A script that ended with an error, so that no report is made. `output` ends its stderr."""

    def __init__(self, script: Path, status: int, output: str) -> None:
        self.script = script
        self.status = status
        self.output = output
        lines = [f"no report: {str(script)!r} ended with exit status {status}."]
        if output.strip():
            lines += ["its last lines on stderr:", *indented(output.strip())]
        lines.append("Fix the script, or run it by itself with DICP_DUMP=<folder> and give that.")
        super().__init__("\n".join(lines))


class ReportOutputError(DicpError):
    """The file for a report cannot be written."""

    def __init__(self, file: Path, reason: str) -> None:
        self.file = file
        self.reason = reason
        super().__init__(
            f"the report cannot be written to {str(file)!r}: {reason}. Give another file by --out."
        )


class UnknownFeatureError(DicpError):
    """A name that no feature of the operator tools has."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        self.nearest = nearest(name, known)
        super().__init__(
            f"no operator tool provides the feature {name!r}.{did_you_mean(self.nearest)} "
            f"Features: {', '.join(self.known)}."
        )


class OperatorNameError(DicpError):
    """A dotted name of an operator that leads to no function."""

    def __init__(self, name: str, near: Sequence[str] = (), problem: str = "") -> None:
        self.name = name
        self.near = tuple(near)
        known = f" Near names: {', '.join(self.near)}." if near else ""
        reason = f": {problem}" if problem else ""
        super().__init__(
            f"operator name {name!r} leads to no function{reason}.{known} Write it as a program "
            "does, such as torch.add, torch.Tensor.add or torch.nn.functional.linear; a "
            "third-party module must be importable."
        )


class ToolVariableError(DicpError, ValueError):
    """An environment variable or argument of an operator tool with a text it cannot take."""

    def __init__(self, variable: str, value: str, expected: str) -> None:
        self.variable = variable
        self.value = value
        self.expected = expected
        super().__init__(f"{variable} is {value!r}; expected {expected}.")


class OverflowFoundError(DicpError, ArithmeticError):
    """`overflow_check` met a value that is infinite or not a number (raise_on_bad=True)."""

    def __init__(self, operator: str, tensor: str, counted: str, user_line: str) -> None:
        self.operator = operator
        self.tensor = tensor
        self.user_line = user_line
        super().__init__(
            f"{operator}: {tensor} holds inf or nan: {counted}.{at(user_line)} Look at the "
            "operator's inputs in the table above; raise_on_bad=False only reports."
        )


class CaptureFormatError(DicpError, ValueError):
    """A capture or recording on disk that cannot be read; `by`: what writes one."""

    def __init__(self, path: Path | str, reason: str, by: str = "OpCapture") -> None:
        self.path = Path(path)
        self.reason = reason
        super().__init__(
            f"capture {str(path)!r} cannot be read: {sentence(reason)} Capture again with "
            f"dicp.op_tools.{by}."
        )


class RecordingMismatchError(DicpError, ValueError):
    """A model or optimizer that is another than the one that `one_iter.record` saw."""

    def __init__(self, folder: Path | str, differences: Sequence[str]) -> None:
        self.folder = Path(folder)
        self.differences = tuple(differences)
        super().__init__(
            f"the recording {str(folder)!r} is of another model or optimizer than the one given:\n"
            + "\n".join(f"  {line}" for line in shortened(differences))
            + "\nGive one_iter.compare those that were recorded, with the same settings, or record "
            "these with dicp.op_tools.one_iter.record."
        )


class TestFileError(DicpError):
    """A test file of PyTorch's source tree that is not there. `tree` is empty if none is named."""

    __test__ = False  # for pytest

    def __init__(self, file: str, tree: str) -> None:
        self.file = file
        self.tree = tree
        if not tree:
            problem = "TORCH_SOURCE_PATH names no source tree of PyTorch; set it to a checkout"
        else:
            problem = f"{tree}/test has no such file; check TORCH_SOURCE_PATH and --tests"
        super().__init__(f"the test file {file!r} cannot run: {problem}.")
