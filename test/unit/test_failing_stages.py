"""`on_compile_error="eager"`: whichever function of the compiler fails, eager code runs instead."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dicp import Backend, torch_private
from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge import aot_graph, compile_fx
from dicp.dynamo_bridge.attempt import attempt
from dicp.dynamo_bridge.executables import interpreted

STAGES = tuple(
    str(Path(compile_fx.__file__).with_name(name))
    for name in ("compile_fx.py", "aot.py", "aot_results.py")
)
DICP = str(Path(compile_fx.__file__).parents[1])
FALLBACK = {
    attempt,
    compile_fx.Compilation.attempt,
    aot_graph.CompiledGraph.__init__,
    aot_graph.CompiledGraph.run.fget,  # type: ignore[attr-defined]
    interpreted,
    torch_private.need_eager,
}
"""What the fallback itself is made of."""

PARTS = 4
"""Of the functions, one part in each test."""

Phase = Literal["forward", "backward", "other sizes"]


def fn(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1).square()


class Calls:
    """A trace function that notes which functions of dicp the stages of a compilation call."""

    def __init__(self) -> None:
        self.phase: Phase = "forward"
        self.found: dict[tuple[CodeType, Phase], None] = {}

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        self.phase = phase
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if code.co_filename.startswith(DICP) and caller is not None:
            if caller.f_code.co_filename.startswith(STAGES):
                self.found.setdefault((code, self.phase))

    def functions(self) -> list[tuple[FunctionType, Phase]]:
        """Those that a module or class has: functions within others fail with their callers."""
        functions = [f for f in gc.get_objects() if type(f) is FunctionType]  # not proxies
        wanted = [f for f in functions if "<locals>" not in f.__qualname__ and f not in FALLBACK]
        by_code = {f.__code__: f for f in wanted}
        return [(by_code[code], phase) for code, phase in self.found if code in by_code]


class Failure:
    """A function that raises from one phase on."""

    def __init__(self, function: FunctionType, phase: Phase) -> None:
        self.function, self.phase, self.code = function, phase, function.__code__

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        def fails(*args: Any, **kwargs: Any) -> Any:
            raise OSError("this function fails")

        if phase == self.phase:
            self.function.__code__ = fails.__code__.replace(co_freevars=self.code.co_freevars)
        try:
            yield
        finally:
            self.function.__code__ = self.code


def check(target: str, sizes: bool, folder: Path, during: Calls | Failure) -> None:
    """Compiles `fn` and its gradient, with a second shape if `sizes`; compares with eager."""
    torch._dynamo.reset()
    Cache.open(Config(cache_dir=folder)).clear("aot", "graph")  # what is built for them stays
    backend = Backend(target, cache_dir=folder, on_compile_error="eager")
    compiled = torch.compile(fn, backend=backend, dynamic=sizes)
    shapes: dict[Phase, Any] = {"forward": (4, 3), **({"other sizes": (6, 2)} if sizes else {})}
    for phase, shape in shapes.items():
        x, reference = (torch.linspace(-2, 2, 12).reshape(shape).requires_grad_() for _ in "ab")
        with during.during(phase):
            y = compiled(x)
        with during.during("backward" if phase == "forward" else phase):
            y.sum().backward()
        expected = fn(reference)
        expected.sum().backward()
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(x.grad, reference.grad)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(
    ("target", "sizes", "phases"),
    [
        ("cpu", False, {"forward", "backward"}),  # backward is compiled in its first run
        ("tops", True, {"forward", "other sizes"}),  # every shape is compiled by itself
    ],
)
def test_whichever_function_fails_eager_code_runs(
    target: str, sizes: bool, phases: set[str], part: int, tmp_path: Path
) -> None:
    for calls in (Calls(), Calls()):  # the first builds what later ones find built
        check(target, sizes, tmp_path, calls)
    functions = calls.functions()
    assert {phase for _, phase in functions} == phases
    names = {function.__name__ for function, _ in functions}
    assert names >= {"graph_name", "active_inspector", "around", "user_locations"}
    assert len(names) > 50
    for function, phase in functions[part::PARTS]:
        try:
            check(target, sizes, tmp_path, Failure(function, phase))
        except Exception as error:
            pytest.fail(f"{function.__qualname__}, {phase}: {type(error).__name__}: {error}")
