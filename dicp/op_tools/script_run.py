"""One run of a training script under observation: eager, compiled, or compiled and in float64.

The script runs unchanged as `__main__`. Its metric is what it assigns to a variable of that name;
for `loss`, else what it calls `backward` on; else the numbers that it prints after the name. What
the script compiles is compiled by the backend that is asked for; a script that compiles nothing has
its outermost modules compiled.

python -m dicp.op_tools.script_run SPEC.json RESULT.json
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import io
import json
import random
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dicp.discovery import target_name
from dicp.dynamo_bridge.backend import Backend
from dicp.module_calls import around_outermost_calls
from dicp.op_tools import trees
from dicp.op_tools.float64_graphs import Float64Graphs, Judged

KINDS = ("assigned", "backward", "printed")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"


@dataclass(frozen=True)
class RunSpec:
    """What one run of a script is to do; mode: "eager", "compiled" or "float64"."""

    script: str
    arguments: tuple[str, ...] = ()
    metric: str = "loss"
    steps: int = 20
    backend: str = ""
    mode: str = "eager"
    eager_ops: tuple[str, ...] = ()
    compiles_itself: bool = False
    folder: str = ""
    """Where the captures of a float64 run go."""


@dataclass
class Entry:
    """What a region was entered with: digests of its inputs and of the random sources."""

    inputs: str
    sources: dict[str, str]


@dataclass
class RunResult:
    """What a run gave: the metric by the way it was seen, and what it ran on."""

    values: dict[str, list[float]] = field(default_factory=dict)
    decimals: int = 0
    """Digits after the point of printed values."""
    error: str = ""
    compiles_itself: bool = False
    compiled: int = 0
    """How many graphs were compiled."""
    start: dict[str, str] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    judged: Judged = field(default_factory=Judged)

    def series(self, kind: str, steps: int) -> list[float]:
        return self.values.get(kind, [])[:steps]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> RunResult:
        entries = [Entry(**entry) for entry in plain.pop("entries")]
        judged = Judged.of(plain.pop("judged"))
        return cls(**plain, entries=entries, judged=judged)


class _EnoughValues(BaseException):
    """The script has shown as many values of its metric as were asked for."""


class ScriptRun:
    """Runs a script once; see `run`."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.result = RunResult(values={kind: [] for kind in KINDS})
        self.backend: Backend | None = None
        if spec.mode != "eager":
            options = {"fallback_random": True, "eager_ops": ",".join(spec.eager_ops)}
            options = {name: value for name, value in options.items() if value}
            target = None if spec.backend == "dicp" else target_name(spec.backend)
            self.backend = Backend(target, **options)
        self.graphs = Float64Graphs(Path(spec.folder or "."))
        self._assigns = False
        self._inside = False
        self._lines = _LineReader(self._printed)

    def run(self) -> RunResult:
        """The values of the metric; what the script raises is part of the result."""
        source = Path(self.spec.script).read_bytes()
        tree = ast.parse(source, self.spec.script)
        marked = _AssignmentReporter(self.spec.metric)
        marked_tree = ast.fix_missing_locations(marked.visit(tree))
        code = compile(marked_tree, self.spec.script, "exec", dont_inherit=True)
        self._assigns = marked.found
        self.result.start = _sources()
        with self._observed() as names, contextlib.suppress(_EnoughValues):
            try:
                exec(code, names)
            except SystemExit as end:
                if end.code not in (None, 0):
                    self.result.error = f"SystemExit: {end.code}"
            except Exception as error:  # scripts raise whatever they like
                first = (str(error).strip().splitlines() or [""])[0]
                self.result.error = f"{type(error).__name__}: {first}"
            self._lines.finish()
        self.result.judged = self.graphs.judged
        if self.backend is not None:
            self.result.compiled = len(self.backend.reports)
        return self.result

    # ---- the metric -----------------------------------------------------------------------------

    def _record_value(self, kind: str, value: Any) -> None:
        number = _number(value)
        if number is None:
            return
        seen = self.result.values[kind]
        seen.append(number)
        wanted = "assigned" if self._assigns else self._fallback_kind()
        if kind == wanted and len(seen) >= self.spec.steps:
            raise _EnoughValues

    def _fallback_kind(self) -> str:
        return "backward" if self.result.values["backward"] else "printed"

    def _assigned(self, value: Any) -> None:
        if not torch.compiler.is_compiling():
            self._record_value("assigned", value)

    def _printed(self, line: str) -> None:
        name = re.escape(self.spec.metric)
        for text in re.findall(rf"\b{name}\b['\"]?\s*[:=]?\s*({_NUMBER})", line, re.IGNORECASE):
            digits = text.lower().partition("e")[0].partition(".")[2]
            self.result.decimals = max(self.result.decimals, len(digits))
            self._record_value("printed", float(text))

    # ---- what is replaced while the script runs -------------------------------------------------

    @contextlib.contextmanager
    def _observed(self) -> Iterator[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            main = types.ModuleType("__main__")
            main.__file__ = self.spec.script
            main.__dict__[_MARK] = self._assigned
            stack.enter_context(_replaced_item(sys.modules, "__main__", main))
            argv = [self.spec.script, *self.spec.arguments]
            stack.enter_context(_replaced(sys, "argv", argv))
            path = [str(Path(self.spec.script).resolve().parent), *sys.path]
            stack.enter_context(_replaced(sys, "path", path))
            stack.enter_context(_replaced(torch, "compile", self._compile))
            if self.spec.metric == "loss":
                stack.enter_context(_replaced(torch.Tensor, "backward", self._backward()))
            buffer: Any = self._lines
            stdout = io.TextIOWrapper(buffer, encoding="utf-8", write_through=True)
            stack.enter_context(contextlib.redirect_stdout(stdout))
            stack.callback(around_outermost_calls(self._module_call))
            stack.enter_context(self.graphs.active_if(self.spec.mode == "float64"))
            yield main.__dict__

    def _backward(self) -> Callable[..., Any]:
        own = torch.Tensor.backward

        @functools.wraps(own)
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = own(tensor, *args, **kwargs)
            self._record_value("backward", tensor)
            return result

        return backward

    def _compile(self, model: Any = None, **options: Any) -> Any:
        """`torch.compile` by the backend of this run; in an eager run, what it was given."""
        if model is None:
            return lambda function: self._compile(function, **options)
        self.result.compiles_itself = True
        if self.backend is None:
            return model if isinstance(model, torch.nn.Module) else self._entered(model)
        kept = {k: v for k, v in options.items() if k in ("dynamic", "fullgraph")}
        compiled = _real_compile(model, backend=self.backend, **kept)
        return compiled if isinstance(model, torch.nn.Module) else self._entered(compiled)

    def _entered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._inside:
                return function(*args, **kwargs)
            self._enter(args, kwargs, ())
            self._inside = True  # modules called in here are parts of the region
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False

        return entered

    def _module_call(self, module: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._inside:
            weights = list(module.parameters()) if not self.result.entries else []
            self._enter(args, kwargs, weights)
        if self.backend is None or self.spec.compiles_itself or self._inside:
            return call(module, *args, **kwargs)
        known = self._compiled_forwards
        if id(module) not in known:
            known[id(module)] = module, _real_compile(module.forward, backend=self.backend)
        return known[id(module)][1](*args, **kwargs)

    @functools.cached_property
    def _compiled_forwards(self) -> dict[int, tuple[Any, Callable[..., Any]]]:
        return {}

    def _enter(self, args: Any, kwargs: Any, weights: Sequence[torch.Tensor]) -> None:
        if len(self.result.entries) < 4 * self.spec.steps:
            given = [*trees.tensors((args, kwargs)), *weights]
            self.result.entries.append(Entry(_digest_of(given), _sources()))


_MARK = "__dicp_metric__"
_real_compile = torch.compile


class _AssignmentReporter(ast.NodeTransformer):
    """Reports what is assigned to a name, by a call after each assignment."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found = False

    def _assignment(self, node: Any) -> Any:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        stores = [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name | ast.Tuple)]
        if self.name not in names or not stores or getattr(node, "value", None) is None:
            return node
        self.found = True
        call = ast.parse(f"{_MARK}({self.name})").body[0]
        for each in ast.walk(call):
            ast.copy_location(each, node)
        return [node, call]

    visit_Assign = visit_AugAssign = visit_AnnAssign = _assignment


class _LineReader(io.BufferedIOBase):
    """Hands each line that is written to a function; the end of a run shows nothing itself. A
    progress bar begins its lines anew by a carriage return."""

    def __init__(self, see: Callable[[str], None]) -> None:
        self.see = see
        self.rest = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        *lines, self.rest = re.split(rb"[\r\n]", self.rest + bytes(data))
        for line in lines:
            self.see(line.decode(errors="replace"))
        return len(data)

    def finish(self) -> None:
        """The script is over: its last line may have no end."""
        self.write(b"\n")


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _replaced_item(table: dict[str, Any], key: str, value: Any) -> Iterator[None]:
    before = table[key]
    table[key] = value
    try:
        yield
    finally:
        table[key] = before


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value.detach().double()) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float, np.integer, np.floating)) else None


def _sources() -> dict[str, str]:
    """Digests of the states of the random sources that programs share."""
    texts = {"random": repr(random.getstate()), "numpy.random": repr(np.random.get_state())}
    found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    state = torch.get_rng_state().numpy().tobytes()
    return {"torch": hashlib.sha256(state).hexdigest(), **found}


def _digest_of(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor.layout == torch.strided:
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(flat.numpy().tobytes())
    return digest.hexdigest()


def main(arguments: Sequence[str]) -> int:
    given, out = map(Path, arguments)
    plain = json.loads(given.read_text())
    plain["arguments"], plain["eager_ops"] = map(tuple, (plain["arguments"], plain["eager_ops"]))
    out.write_text(json.dumps(ScriptRun(RunSpec(**plain)).run().as_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
