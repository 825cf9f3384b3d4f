"""Records the ATen calls of a program, forward, backward and optimizer, as a case file in JSON."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from dicp.errors import RecordedScriptError
from dicp.op_tools.cases import CaseList, NotStorableError
from dicp.torch_private import TorchDispatchMode, overload_name, pytree, schema_of

WITHOUT_VALUES: Final = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
    "lift_fresh", "_local_scalar_dense", "is_same_size", "set_", "resize_",
})  # fmt: skip
"""Operators that compute no values: they make memory or name it, or hand a number to Python."""


class Recorder(TorchDispatchMode):
    """Adds each call below autograd to `calls`; `left_out` counts those without a form."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = CaseList()
        self.left_out: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._add(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        space, _, name = str(func.name()).partition("::")
        name = name.partition(".")[0]
        if name in WITHOUT_VALUES or space == "profiler":
            return
        if space != "aten":
            self.left_out[f"{space}.{name}"] += 1
            return
        schema = schema_of(func)
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        plain = pytree.tree_map_only(Tensor, Tensor.detach, given)
        operator = f"aten.{name}.{overload_name(func) or 'default'}"
        try:
            self.calls.add(operator, f"torch.ops.{operator}", (), plain, schema.is_mutable)
        except NotStorableError as problem:
            self.left_out[f"{operator}: {problem}"] += 1


@dataclass(frozen=True)
class Recording:
    """A list of calls, and what it was recorded from."""

    model: str
    about: Mapping[str, str]
    entries: list[dict[str, Any]] = field(default_factory=list)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """The case file, an operator a line."""
        lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in self.entries)
        head = f'{{"model": {json.dumps(self.model)},\n"about": {json.dumps(dict(self.about))},\n'
        return f'{head}"case": [\n{lines}\n]}}\n'


def recording(model: str, about: Mapping[str, str], run: Callable[[], object]) -> Recording:
    """What `run` calls; programs that compile run in eager."""
    recorder = Recorder()
    with recorder, torch.compiler.set_stance("force_eager"):
        run()
    about = {**about, "torch": str(torch.__version__)}
    return Recording(model, about, recorder.calls.entries(), dict(recorder.left_out))


def run_script(command: str) -> None:
    """Run `python FILE ...` or `python -m MODULE ...` in this process.

    Raises RecordedScriptError for a command that is neither, or that fails.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise RecordedScriptError(command, f"it cannot be split into words: {error}") from None
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    as_module = words[:1] == ["-m"]
    words = words[1:] if as_module else words
    if not words or words[0].startswith("-"):
        raise RecordedScriptError(command, "it names no script")
    if not as_module and not Path(words[0]).is_file():
        raise RecordedScriptError(command, f"there is no file {words[0]!r}")
    folder = str(Path.cwd() if as_module else Path(words[0]).resolve().parent)
    with _command_line(words, folder):
        try:
            if as_module:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RecordedScriptError(command, f"it exits with {end.code}") from None


@contextmanager
def _command_line(words: list[str], folder: str) -> Iterator[None]:
    """Arguments and the first folder of imports as the interpreter would give them."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:0] = list(words), [folder]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
