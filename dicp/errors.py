"""Every message a user of dicp can meet: one class each.

A message says what was given, what was expected, where in the user's code, and what to do.
Fields stay on the exception, so that tools need not parse text. Impossible states are asserts, not
classes in this file.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

_SHOWN_DIAGNOSTICS = 3
_SHOWN_SOURCES = 8


class DicpError(RuntimeError):
    """Base of all errors raised by dicp. The eager model stays usable after any of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default rebuilds from the constructor's arguments, which are fields here and not the
        # message; errors have to survive the way back from a worker process.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(cls: type[DicpError], args: tuple[Any, ...], fields: dict[str, Any]) -> DicpError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(fields)
    return error


class UnknownOptionError(DicpError):
    """An option name that no config field has."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        self.nearest = _nearest(name, known)
        super().__init__(
            f"unknown option {name!r}.{_did_you_mean(self.nearest)} "
            f"Valid options: {', '.join(sorted(known))}. "
            "`python -m dicp config` describes each."
        )


class ConfigValueError(DicpError, ValueError):
    """A known option with a value it cannot take. `source` says where the value came from."""

    def __init__(self, source: str, given: object, expected: str, fix: str) -> None:
        self.source = source
        self.given = given
        self.expected = expected
        self.fix = fix
        super().__init__(f"{source} is {given!r}; expected {expected}. {fix}")


class TargetNotFoundError(DicpError):
    """No installed target has this name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        self.nearest = _nearest(name, known)
        installed = ", ".join(sorted(known)) if known else "none"
        super().__init__(
            f"no target named {name!r} is installed.{_did_you_mean(self.nearest)} "
            f"Installed targets: {installed}. A target is registered by an entry point in the "
            "group 'dicp.targets'; install the package that brings it, or choose another backend."
        )


class InvalidTargetError(DicpError):
    """An installed target that breaks the contract of `dicp.target.Target`."""

    def __init__(self, name: str, place: str, problems: Sequence[str]) -> None:
        self.name = name
        self.problems = tuple(problems)
        listed = "; ".join(problems)
        super().__init__(
            f"target {name!r} ({place}) cannot be used: {listed}. Mend the package that registers "
            "it under the entry points `dicp.targets`, or uninstall it."
        )


class ToolchainError(DicpError):
    """A tool the target needs is missing, too old or does not work."""

    def __init__(self, target: str, tool: str, detail: str, fix: str) -> None:
        self.target = target
        self.tool = tool
        self.detail = detail
        self.fix = fix
        super().__init__(
            f"target {target!r} needs {tool}: {detail}. {_sentence(fix)} "
            "`python -m dicp doctor` checks the whole toolchain; "
            "on_compile_error='eager' runs the model uncompiled meanwhile."
        )


class CompilerError(DicpError):
    """The target's compiler refused generated source. `diagnostics` holds its whole output."""

    def __init__(
        self,
        target: str,
        command: Sequence[str],
        diagnostics: str,
        kernel_sources: Sequence[str] = (),
    ) -> None:
        self.target = target
        self.command = tuple(command)
        self.diagnostics = diagnostics
        self.kernel_sources = tuple(kernel_sources)
        lines = [f"target {target!r}: the compiler failed on generated code."]
        lines += ["command:", *_indent(shlex.join(self.command))]
        lines += ["first errors:", *_indent(_first_errors(diagnostics))]
        if kernel_sources:
            lines += ["compiled from:", *_indent("\n".join(_shortened(self.kernel_sources)))]
        lines.append(
            "Set dump=<folder> (DICP_DUMP) to keep the source, check the compiler with "
            "`python -m dicp doctor`, or set on_compile_error='eager' to run uncompiled."
        )
        super().__init__("\n".join(lines))


class LaunchError(DicpError):
    """The device's driver refused to run a compiled kernel, or an earlier kernel failed on it."""

    def __init__(self, target: str, kernel: str, reason: str, sources: Sequence[str] = ()) -> None:
        self.target = target
        self.kernel = kernel
        self.reason = reason
        self.kernel_sources = tuple(sources)
        lines = [f"target {target!r}: kernel {kernel} cannot be run: {reason}.", "compiled from:"]
        lines += _indent("\n".join(_shortened(self.kernel_sources)))
        lines.append(
            "Where the device reports a failed assertion or an illegal access, the message printed "
            "before this one names the operator; the process must be started again."
        )
        super().__init__("\n".join(lines))


class RunStatusError(DicpError):
    """A target's run gave something other than the status of a success or of a failed kernel."""

    def __init__(
        self, target: str, what: str, status: object, expected: str, sources: Sequence[str] = ()
    ) -> None:
        self.target = target
        self.status = status
        lines = [f"target {target!r}: the run of {what} gave status {status!r}, not {expected}."]
        if sources:
            lines += ["compiled from:", *_indent("\n".join(_shortened(sources)))]
        lines.append(
            "Its results cannot be trusted. The device may have refused the launch, or the "
            "target's run returns no status: see `python -m dicp doctor` and "
            "docs/adding_a_vendor.md."
        )
        super().__init__("\n".join(lines))


class RuleError(DicpError):
    """A target's rule for an operator raised an exception, or returned what no rule returns."""

    def __init__(
        self,
        op: str,
        dtypes: Sequence[object],
        shapes: Sequence[object],
        target: str,
        user_line: str,
        problem: str,
    ) -> None:
        self.op = op
        self.dtypes = tuple(dtypes)
        self.shapes = tuple(shapes)
        self.target = target
        self.user_line = user_line
        self.problem = problem
        super().__init__(
            f"target {target!r}: the rule for {op}({_operands(dtypes, shapes)}) {problem}."
            f"{_at(user_line)} Mend the rule, or report it; until then eager_ops={op!r} "
            "(DICP_EAGER_OPS) runs the operator eagerly."
        )


class UnsupportedOperatorError(DicpError):
    """An operator would run eagerly although fallback='error' or native_ops forbids it."""

    def __init__(
        self,
        op: str,
        dtypes: Sequence[object],
        shapes: Sequence[object],
        target: str,
        user_line: str,
        reason: str,
        forbidden_by: Literal["fallback", "native_ops"] = "fallback",
    ) -> None:
        self.op = op
        self.dtypes = tuple(dtypes)
        self.shapes = tuple(shapes)
        self.target = target
        self.user_line = user_line
        self.reason = reason
        forbids, cure = {
            "fallback": ("fallback='error'", "set fallback='auto' (DICP_FALLBACK)"),
            "native_ops": ("native_ops", "take the operator out of native_ops (DICP_NATIVE_OPS)"),
        }[forbidden_by]
        super().__init__(
            f"target {target!r} does not compile {op}({_operands(dtypes, shapes)}): {reason}."
            f"{_at(user_line)} {forbids} forbids running it eagerly; {cure}, or rewrite the line."
        )


class InferenceMismatchError(DicpError):
    """The target sees a node otherwise than PyTorch's own inference does: a defect in dicp."""

    def __init__(self, node: str, field: str, expected: object, got: object) -> None:
        self.node = node
        self.field = field
        self.expected = expected
        self.got = got
        super().__init__(
            f"{node}: the target infers {field} {got}, PyTorch infers {expected}. This is a "
            "defect of the conversion, not of the model: please report it with the graph that "
            "dump=<folder> (DICP_DUMP) writes."
        )


class PrototypeError(DicpError):
    """A graph operator is used otherwise than its prototype says: a defect in dicp."""

    def __init__(self, operator: str, detail: str, where: str = "") -> None:
        self.operator = operator
        self.detail = detail
        self.where = where
        super().__init__(
            f"graph operator {operator}: {detail}.{_at(where)} This is a defect of the conversion, "
            "not of the model: please report it with the graph that dump=<folder> (DICP_DUMP) "
            "writes; on_compile_error='eager' runs the model uncompiled meanwhile."
        )


class GraphRejectedError(DicpError):
    """The vendor's graph compiler refused a graph. `message` holds its own words."""

    def __init__(
        self,
        target: str,
        message: str,
        operator: str = "",
        aten: str = "",
        user_line: str = "",
        node: str = "",
    ) -> None:
        self.target = target
        self.message = message
        self.operator = operator
        self.node = node
        self.aten = aten
        self.user_line = user_line
        named = f" operator {operator}" if operator else " the graph"
        made = f", made from {aten}" if aten else ""
        super().__init__(
            f"target {target!r}: the graph compiler refused{named}{made}.{_at(user_line)} "
            f"It says: {_sentence(message)} Set rejected='eager' (DICP_REJECTED) to run such "
            "operators eagerly, or dump=<folder> (DICP_DUMP) to keep the source."
        )


class DeviceError(DicpError):
    """The device's runtime reported a failure. `message` holds its own words."""

    def __init__(self, target: str, call: str, status: int, message: str) -> None:
        self.target = target
        self.call = call
        self.status = status
        self.message = message
        super().__init__(
            f"target {target!r}: {call} failed with status {status}: "
            f"{_sentence(message or 'no message')} "
            "The state of the device is unknown; restart the process if the next run fails too."
        )


class DeviceMemoryError(DicpError, MemoryError):
    """The device has too little free memory for a graph."""

    def __init__(self, target: str, wanted: int, what: str) -> None:
        self.target = target
        self.wanted = wanted
        self.what = what
        super().__init__(
            f"target {target!r}: the device is out of memory for {what}{_bytes(wanted)}. Use a "
            "smaller batch, free tensors that are no longer needed, or run fewer graphs at a time."
        )


class HostMemoryError(DicpError, MemoryError):
    """A kernel on the host got no memory for what it keeps while it runs."""

    def __init__(self, operators: Sequence[str], wanted: int) -> None:
        self.operators = operators
        self.wanted = wanted
        more = f" and {len(operators) - 1} more" if len(operators) > 1 else ""
        super().__init__(
            f"{operators[0]}{more}: the host is out of memory for the kernel's workspace"
            f"{_bytes(wanted)}. Use a smaller batch or fewer threads, or free tensors that are no "
            "longer needed."
        )


class ModelMismatchError(DicpError):
    """A built model does not fit the device that is to run it."""

    def __init__(self, target: str, built_for: str, found: str) -> None:
        self.target = target
        self.built_for = built_for
        self.found = found
        super().__init__(
            f"target {target!r}: the model was built for {built_for} and this device is {found}. "
            "Remove it with `python -m dicp cache clear`, and compile again on this machine."
        )


class InputMismatchError(DicpError):
    """An input contradicts what the graph was compiled for."""

    def __init__(self, index: int, expected: str, got: str) -> None:
        self.index = index
        self.expected = expected
        self.got = got
        super().__init__(
            f"input {index} of the compiled graph is {got}; the graph was compiled for {expected}. "
            "Call the function returned by torch.compile, which recompiles where that is needed, "
            "and not the compiled graph itself."
        )


class ResultMismatchError(DicpError):
    """The sizes of a result depend on data, and are not those the program promised."""

    def __init__(self, op: str, expected: Sequence[int], got: Sequence[int]) -> None:
        self.op = op
        self.expected = tuple(expected)
        self.got = tuple(got)
        super().__init__(
            f"{op} gave a tensor of sizes {list(got)}, where checks in the program (torch._check) "
            f"promise {list(expected)}. Correct the check, or remove it."
        )


class DeviceMovedError(DicpError):
    """The model or its inputs went to another device after compilation."""

    def __init__(self, expected: object, got: object) -> None:
        self.expected = str(expected)
        self.got = str(got)
        super().__init__(
            f"the graph was compiled for device {expected} and is called with tensors on {got}. "
            "Move the model and its inputs to one device before the call, and call torch.compile "
            "again after moving the model."
        )


class IndexOutOfBoundsError(DicpError, IndexError):
    """An index outside its dimension, found before or by a compiled kernel (check_bounds=True)."""

    def __init__(
        self, op: str, user_line: str, index: int | None, size: int, wraps: bool = True
    ) -> None:
        self.op = op
        self.user_line = user_line
        self.index = index
        """None: any index into an empty dimension."""
        self.size = size
        what = "an index" if index is None else str(index)
        rule = ", or from -1 backwards" if wraps else " and may not be negative"
        super().__init__(
            f"{op}: index out of range: {what} in a dimension of size {size}.{_at(user_line)} "
            f"Indices count from 0{rule}; clamp them, or enlarge the dimension."
        )


class SizeMismatchError(DicpError, RuntimeError):
    """Arguments whose sizes do not fit together, found before a compiled graph runs."""

    def __init__(self, op: str, user_line: str, detail: str, left: int, right: int) -> None:
        self.op = op
        self.user_line = user_line
        self.detail = detail
        super().__init__(
            f"{op}: {detail}: {left} and {right}.{_at(user_line)} Make these sizes equal."
        )


class IntegerDivisionByZeroError(DicpError, ZeroDivisionError):
    """An integer division or remainder by zero, found by a compiled kernel."""

    def __init__(self, op: str, user_line: str) -> None:
        self.op = op
        self.user_line = user_line
        super().__init__(
            f"{op}: integer division or remainder by zero.{_at(user_line)} "
            "Mask the divisor, or divide in a floating-point type."
        )


class SimulatorForbiddenError(DicpError):
    """runs_on='device' and there is no device."""

    def __init__(self, target: str, fix: str) -> None:
        self.target = target
        self.fix = fix
        super().__init__(
            f"target {target!r} has no device here and runs_on='device' forbids its simulator. "
            f"{_sentence(fix)} Or set runs_on='auto' or 'simulator' (DICP_RUNS_ON)."
        )


class NewVendorError(DicpError):
    """`new-vendor` cannot write a package of this name, or there."""

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        self.problem = problem
        super().__init__(
            f"vendor {name!r} {problem}. For example: "
            "python -m dicp new-vendor mychip --family loop --package mychip_dicp"
        )


class ResultsFileError(DicpError):
    """A file that should hold results of tests."""

    def __init__(self, file: Path, problem: str) -> None:
        self.file = file
        self.problem = problem
        super().__init__(
            f"{str(file)!r} holds no results of tests: {problem}. "
            "`pytest --results FILE` writes them."
        )


class ReportSourceError(DicpError):
    """A path that no report can be made from."""

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
            lines += ["its last lines on stderr:", *_indent(output.strip())]
        lines.append("Mend the script, or run it by itself with DICP_DUMP=<folder> and give that.")
        super().__init__("\n".join(lines))


class ReportOutputError(DicpError):
    """The file for a report cannot be written."""

    def __init__(self, file: Path, reason: str) -> None:
        self.file = file
        self.reason = reason
        super().__init__(
            f"the report cannot be written to {str(file)!r}: {reason}. Give another file by --out."
        )


class CacheFolderError(DicpError):
    """The cache folder cannot be used, where that cannot be worked around."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path = Path(path)
        self.reason = reason
        super().__init__(
            f"cache folder {str(path)!r}: {reason}. Point DICP_CACHE_DIR (option cache_dir) at a "
            "folder that belongs to you and that nobody else can write."
        )


class UnknownFeatureError(DicpError):
    """A name that no feature of the operator tools has."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        self.nearest = _nearest(name, known)
        super().__init__(
            f"no operator tool provides the feature {name!r}.{_did_you_mean(self.nearest)} "
            f"Features: {', '.join(self.known)}."
        )


class OperatorNameError(DicpError):
    """A dotted name of an operator that leads to no function."""

    def __init__(self, name: str, near: Sequence[str] = ()) -> None:
        self.name = name
        self.near = tuple(near)
        known = f" Near names: {', '.join(self.near)}." if near else ""
        super().__init__(
            f"operator name {name!r} leads to no function.{known} Write it as a program does, such "
            "as torch.add, torch.Tensor.add or torch.nn.functional.linear; a third-party module "
            "must be importable."
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

    def __init__(self, operator: str, tensor: str, user_line: str) -> None:
        self.operator = operator
        self.tensor = tensor
        self.user_line = user_line
        super().__init__(
            f"{operator}: {tensor} holds inf or nan.{_at(user_line)} Look at the operator's inputs "
            "in the table above; raise_on_bad=False only reports."
        )


class CaptureFormatError(DicpError, ValueError):
    """A capture on disk that cannot be read."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path = Path(path)
        self.reason = reason
        super().__init__(
            f"capture {str(path)!r} cannot be read: {_sentence(reason)} Capture the operator again "
            "with dicp.op_tools.OpCapture."
        )


class DeviceRegistrationError(DicpError):
    """The eager device cannot be registered in this process."""

    def __init__(self, problem: str, fix: str) -> None:
        self.problem = problem
        super().__init__(f"the eager device cannot be registered: {problem}. {_sentence(fix)}")


class MixedDevicesError(DicpError):
    """An operator of the device was given tensors of two devices."""

    def __init__(self, operator: str, name: str, place: Any, other: str, elsewhere: Any) -> None:
        self.operator = operator
        super().__init__(
            f"{operator}: argument {name!r} lies on {place} and argument {other!r} on "
            f"{elsewhere}; move one of them with .to()."
        )


class RuntimeLibraryError(DicpError):
    """A vendor's runtime library lacks functions of the interface."""

    def __init__(self, path: str, missing: Sequence[str]) -> None:
        self.path = path
        self.missing = tuple(missing)
        super().__init__(
            f"{path} lacks functions of the device runtime interface: {', '.join(missing)}. "
            "dicp/device/native/runtime.h declares them; `python -m dicp device check` tests a "
            "library against it."
        )


class VendorNotFoundError(DicpError):
    """DIPU_DEVICE names a vendor whose runtime is not installed."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        listed = ", ".join(sorted(known)) if known else "none"
        super().__init__(
            f"DIPU_DEVICE is {name!r}, and no installed package registers a runtime of that name."
            f"{_did_you_mean(_nearest(name, known))} Installed: {listed}. A runtime is registered "
            "by an entry point in the group 'dicp.devices'; unset DIPU_DEVICE for the simulated "
            "chip."
        )


class DicpWarning(UserWarning):
    """Base of all warnings given by dicp."""


class CacheWarning(DicpWarning):
    """The cache works with less than it should: an entry was rebuilt, or nothing is kept."""


class SerialWarning(DicpWarning):
    """The host's compiler has no OpenMP."""

    def __init__(self, compiler: str) -> None:
        super().__init__(
            f"{compiler} does not take -fopenmp: generated kernels run on one thread. Install its "
            "OpenMP runtime (Debian: apt install libomp-dev), or name another compiler in DICP_CXX."
        )


class SimulatorWarning(DicpWarning):
    """A simulator stands in for a device: its numerics count, its speed does not."""


class ToolWarning(DicpWarning):
    """An operator tool does less than it was asked for; the program goes on."""


class SpecializationWarning(DicpWarning):
    """A graph is compiled for more sets of sizes than are kept."""

    def __init__(self, limit: int, symbols: Sequence[str]) -> None:
        self.limit = limit
        self.symbols = tuple(symbols)
        super().__init__(
            f"a graph has been compiled for more than {limit} values of the sizes "
            f"{', '.join(symbols)}; the least recently used programs are dropped and compiled "
            "again when their sizes return. Pad the inputs to a few sizes to keep them all."
        )


class FallbackWarning(DicpWarning):
    """Something runs eagerly that would otherwise be compiled."""


def _nearest(name: str, known: Sequence[str]) -> str | None:
    matches = difflib.get_close_matches(name.lower(), known, n=1)
    return matches[0] if matches else None


def _did_you_mean(nearest: str | None) -> str:
    return f" Did you mean {nearest!r}?" if nearest else ""


def _bytes(wanted: int) -> str:
    return f" ({wanted} bytes)" if wanted else ""


def _at(user_line: str) -> str:
    return f" At: {user_line.strip()}." if user_line.strip() else ""


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _shape(shape: object) -> str:
    return f"[{', '.join(map(str, shape))}]" if isinstance(shape, Sequence) else f"[{shape}]"


def _operands(dtypes: Sequence[object], shapes: Sequence[object]) -> str:
    pairs = zip(dtypes, shapes, strict=False)
    return ", ".join(f"{dtype}{_shape(shape)}" for dtype, shape in pairs)


def _indent(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _shortened(sources: Sequence[str]) -> list[str]:
    rest = len(sources) - _SHOWN_SOURCES
    return [*sources[:_SHOWN_SOURCES], *([f"... and {rest} more"] if rest > 0 else [])]


def _first_errors(diagnostics: str) -> str:
    """The first lines that report an error, or the first lines of all if none does."""
    lines = [line for line in diagnostics.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    rest = len(errors) - _SHOWN_DIAGNOSTICS
    shown = errors[:_SHOWN_DIAGNOSTICS] or ["(the compiler printed nothing)"]
    return "\n".join([*shown, *([f"... and {rest} more"] if rest > 0 else [])])
