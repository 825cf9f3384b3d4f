"""What a vendor's package does wrong is said in an error that names the call, never accepted."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.packages import NAMES, compiled, folder, target

from dicp import Backend
from dicp.errors import (
    CacheWarning,
    FallbackWarning,
    GraphRejectedError,
    RuleError,
    RunFailureError,
    RunStatusError,
    SimulatorWarning,
    TargetFailureError,
)
from dicp.graphop.interpreter import Meaning
from dicp.loop.ir.expr import apply
from dicp.rules import RuleTable

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore", category=SimulatorWarning)
__all__ = ["folder", "target"]


def with_rule(target: Any, op: Any, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RuleTable()
    own.add(op, rule)
    monkeypatch.setattr(type(target), "rules", target.rules.merged(own))


def broken(b: Any, x: Any) -> Any:
    return {}["no such key"]


def wide(b: Any, x: Any) -> Any:
    return b.cast(x, torch.float64)


FAULTS = {
    "raises": (broken, "raises KeyError: 'no such key'"),
    "nothing": (lambda b, x: None, r"returns None where eager gives float32\[2, 3\]"),
    "dtype": (wide, r"returns float64\[2, 3\] where eager gives float32\[2, 3\]"),
    "number": (lambda b, x: 4.0, r"returns float where eager gives float32\[2, 3\]"),
    "tensor": (lambda b, x: torch.ones(2, 3), "Tensor, no Value, where eager gives"),
    "sizes": (lambda b, x: b.reshape(x, [3, 2]), r"returns float32\[3, 2\] where eager gives"),
    "rank": (lambda b, x: b.reshape(x, [6]), r"returns float32\[6\] where eager gives"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rule_s_fault_names_operator_operands_target_and_line(
    fault: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, problem = FAULTS[fault]
    with_rule(target, aten.relu.default, rule, monkeypatch)
    with pytest.raises(Exception, match=problem) as caught:
        compiled(target, lambda x: torch.relu(x) * 2)(torch.randn(2, 3))
    message = str(caught.value)
    assert "aten.relu.default(torch.float32[2, 3])" in message and repr(target.name) in message
    assert (
        message.count("test_vendor_faults.py:") == 2 and f"Fix the rule at {__file__}:" in message
    )
    assert "RuleError" in message or isinstance(caught.value, RuleError)


@pytest.mark.parametrize("symbolic", [False, True])
def test_wrong_sizes_of_a_rule_are_found_whether_they_are_symbolic(
    symbolic: bool, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_rule(target, aten.t.default, lambda b, x: x, monkeypatch)
    with_rule(target, aten.permute.default, lambda b, x, order: x, monkeypatch)
    fn = torch.compile(lambda x: x.t() * 2, backend=Backend(target.name, cache=False),
                       dynamic=symbolic)  # fmt: skip
    with pytest.raises(Exception, match=r"returns float32\[.* where eager gives float32\["):
        fn(torch.randn(5, 3))


def test_a_graph_operator_that_a_rule_misuses_is_named(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target.name != NAMES["graph"]:
        return
    with_rule(target, aten.relu.default, lambda b, x: b.op("Relu", x, alpha=1), monkeypatch)
    problem = r"\(torch.float32\[2\]\) misuses the graph operator Relu: it has no attribute 'alpha'"
    with pytest.raises(Exception, match=problem) as caught:
        compiled(target, torch.relu)(torch.randn(2))
    assert f"Fix the rule at {__file__}:" in str(caught.value)


@pytest.mark.parametrize(
    ("op", "operands", "problem"),
    [
        ("squrt", 1, "there is no scalar operator 'squrt' .* Did you mean 'sqrt'"),
        ("sqrt", 2, "the scalar operator 'sqrt' takes 1 operands, not 2"),
    ],
)
def test_a_scalar_operator_that_a_rule_misuses_is_named(
    op: str, operands: int, problem: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target.name != NAMES["loop"]:
        return

    def rule(b: Any, x: Any) -> Any:
        return b.map(lambda e: apply(op, e.dtype, *[e] * operands), x)

    with_rule(target, aten.relu.default, rule, monkeypatch)
    with pytest.raises(Exception, match=f"raises ValueError: {problem}"):
        compiled(target, torch.relu)(torch.randn(2))


def unknown_name(x: Any) -> Any:
    return x + bias  # type: ignore[name-defined]  # noqa: F821


MEANINGS = {
    "raises": (unknown_name, "raises NameError: name 'bias' is not defined"),
    "nothing": (lambda x: None, "returns None for Relu: x -> y"),
    "several": (lambda x: (x, x), "returns 2 results for Relu: x -> y"),
    "number": (lambda x: 4.0, "returns float for Relu: x -> y"),
    "dtype": (
        lambda x: torch.relu(x).double(),
        r"returns torch\.float64 for 'y', whose dtype is that of 'x', torch\.float32",
    ),
}


@pytest.mark.parametrize("fault", MEANINGS)
def test_a_faulty_meaning_of_an_operator_is_named_before_the_shared_rule(
    fault: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target.name != NAMES["graph"]:
        return
    function, problem = MEANINGS[fault]
    semantics = importlib.import_module(f"{target.name}_dicp.operators").SEMANTICS
    monkeypatch.setitem(semantics._table, "Relu", Meaning(function))
    with pytest.raises(Exception, match=problem) as caught:
        compiled(target, torch.relu)(torch.randn(2))
    line = function.__code__.co_firstlineno + (fault == "raises")
    said = f"Fix the meaning of Relu at {__file__}:{line}, or the rule at "
    assert said in str(caught.value), str(caught.value)


def test_a_meaning_of_the_wrong_sizes_is_named_beside_the_rule(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeps_dims(x: Any, axes: Any, keep_dims: bool = False) -> Any:
        return x.sum(axes, keepdim=True)

    if target.name == NAMES["graph"]:
        semantics = importlib.import_module(f"{target.name}_dicp.operators").SEMANTICS
        meaning = Meaning(keeps_dims, frozenset({"axes"}))
        monkeypatch.setitem(semantics._table, "ReduceSum", meaning)
        with pytest.raises(Exception, match=r"returns float32\[2, 1\] where eager") as caught:
            compiled(target, lambda x: x.sum(1))(torch.randn(2, 3))
        line = keeps_dims.__code__.co_firstlineno
        assert f", or the meaning of ReduceSum at {__file__}:{line}, or rep" in str(caught.value)


def test_a_rule_with_too_few_results_is_named(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_rule(target, aten.sort.default, lambda b, x, *rest: [x], monkeypatch)
    problem = r"aten.sort.default\(torch.float32\[5\]\) returns 1 results where eager gives 2"
    with pytest.raises(Exception, match=problem):
        compiled(target, lambda x: torch.sort(x)[0])(torch.randn(5))


def test_a_faulty_rule_can_be_passed_over(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the error says, by eager_ops; and where errors of compiling are not to be raised."""
    with_rule(target, aten.relu.default, broken, monkeypatch)
    x = torch.randn(2, 3)
    eager = compiled(target, torch.relu, eager_ops=["aten.relu.default"])(x)
    assert torch.equal(eager, torch.relu(x))
    torch.compiler.reset()
    with pytest.warns(FallbackWarning, match="the rule for aten.relu.default"):
        found = compiled(target, torch.relu, on_compile_error="eager")(x)
    assert torch.equal(found, torch.relu(x))


@pytest.mark.parametrize("status", [None, -1, 7, 1], ids=str)
def test_a_run_s_status_is_not_taken_for_success(
    status: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop program's 1 means that its first kernel failed, whose error then has to be known."""
    simulator = importlib.import_module(f"{target.name}_dicp.simulator")
    place = simulator.Segment if target.name == NAMES["loop"] else simulator.Model
    monkeypatch.setattr(place, "run", lambda self, *given: status)
    with pytest.raises(RunStatusError, match=f"gave status {status}, not 0") as caught:
        compiled(target, lambda x: torch.relu(x) * 2)(torch.randn(2, 3))
    message = str(caught.value)
    named = "relu_mul" if target.name == NAMES["loop"] else "graph "
    assert repr(target.name) in message and named in message
    assert f"aten.relu.default (relu) at {__file__}:" in message


@pytest.mark.parametrize("status", [None, 2])
def test_a_profiled_kernel_s_status_is_checked_too(
    status: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target.name != NAMES["loop"]:
        return
    simulator = importlib.import_module(f"{target.name}_dicp.simulator")
    monkeypatch.setattr(simulator.Segment, "run_one", lambda self, position: status)
    with pytest.raises(RunStatusError, match="not 0"), torch.profiler.profile():
        compiled(target, lambda x: torch.relu(x) * 2)(torch.randn(2, 3))


@pytest.mark.parametrize("profiled", [False, True])
def test_what_a_run_raises_names_the_target_and_the_line(
    profiled: bool, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = importlib.import_module(f"{target.name}_dicp.simulator")
    loop = target.name == NAMES["loop"]

    def run(self: Any, *given: Any) -> int:
        return {}["no such buffer"]  # type: ignore[no-any-return]

    place, name = (simulator.Segment, "run_one" if profiled else "run") if loop else (
        simulator.Model, "run")  # fmt: skip
    monkeypatch.setattr(place, name, run)
    problem = "raises KeyError: 'no such buffer', at"
    profile = torch.profiler.profile() if profiled else nullcontext()
    with pytest.raises(RunFailureError, match=problem) as caught, profile:
        compiled(target, lambda x: torch.relu(x) * 2)(torch.randn(2, 3))
    assert f"aten.relu.default (relu) at {__file__}:" in str(caught.value)
    lines = inspect.getsourcelines(run)
    assert caught.value.place == f"{__file__}:{lines[1] + 1}"
    assert repr(target.name) in str(caught.value)


def test_a_run_that_takes_other_arguments_is_named(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's when it is loaded; a segment's, and what makes segments, when it is called."""
    simulator = importlib.import_module(f"{target.name}_dicp.simulator")

    def none(self: Any, *, one: Any) -> int:
        return 0

    line = none.__code__.co_firstlineno
    if target.name == NAMES["graph"]:
        cases = {
            (simulator.Model, "run"): r"launch returns a function that does not take \(inputs, "
        }
    else:
        places = (simulator.Segment, "run"), (simulator.Simulator, "segment")
        cases = dict.fromkeys(places, "the run of relu_.* raises TypeError: ")
    for place, problem in cases.items():
        with monkeypatch.context() as patch:
            patch.setattr(*place, none)
            torch.compiler.reset()
            with pytest.raises(Exception, match=f"{problem}.*at {__file__}:{line}"):
                compiled(target, torch.relu)(torch.randn(2, 3))


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (
            lambda self, *given: None,
            "segment returns None, which lacks the methods run and run_one",
        ),
        (lambda self, *given: {}["x"], "the run of relu_.* raises KeyError: 'x', at "),
    ],
)
def test_what_makes_segments_is_checked(
    made: Any, problem: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target.name == NAMES["loop"]:
        simulator = importlib.import_module(f"{target.name}_dicp.simulator")
        monkeypatch.setattr(simulator.Simulator, "segment", made)
        line = made.__code__.co_firstlineno
        with pytest.raises((RunFailureError, TargetFailureError), match=problem) as caught:
            compiled(target, torch.relu)(torch.randn(2, 3))
        assert f"{__file__}:{line}" in str(caught.value)


STAGES = ("fingerprint", "prepare", "lower", "render", "build", "load")
HOOKS = {
    "loop": (
        *STAGES, "rules_for", "decide_on", "schedule", "with_form", "render_kernel", "compile",
        "runtime", "pool",
    ),
    "graph": (
        *STAGES, "make_builder", "refuses", "fuse", "assign_formats", "render_graph", "identity",
        "graph_options", "compile", "launch",
    ),
}  # fmt: skip


def break_hook(target: Any, hook: str, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Puts the function of that text into the target's module; returns the module's file."""
    module = importlib.import_module(type(target).__module__)
    names = dict(vars(module))
    exec(compile(text, str(module.__file__), "exec"), names)
    monkeypatch.setattr(type(target), hook, names[hook], raising=False)
    return str(module.__file__)


def test_what_a_hook_raises_names_target_hook_and_line(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = next(family for family, name in NAMES.items() if name == target.name)
    x = torch.randn(2, 3)
    for hook in HOOKS[family]:
        with monkeypatch.context() as patch:
            text = f"def {hook}(self, *args, **kwargs):\n    return {{}}['no such key']\n"
            file = break_hook(target, hook, text, patch)
            torch.compiler.reset()
            with pytest.raises(Exception, match="no such key") as caught:
                compiled(target, torch.relu)(x)
            error = caught.value
            message = str(error)
            assert "TargetFailureError" in message or isinstance(error, TargetFailureError), hook
            said = f"target '{target.name}': {hook} raises KeyError: 'no such key', at {file}:2."
            assert said in message, (hook, message)
            torch.compiler.reset()
            with pytest.warns(FallbackWarning, match=f"{hook} raises KeyError"):
                found = compiled(target, torch.relu, on_compile_error="eager")(x)
            assert torch.equal(found, torch.relu(x)), hook


def test_a_warning_of_dicp_s_that_is_an_error_is_not_the_target_s(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `python -W error` and a cache folder that cannot be written."""
    text = "def compile(self, *args):\n    raise CacheWarning('full')\n"
    monkeypatch.setattr(builtins, "CacheWarning", CacheWarning, raising=False)
    break_hook(target, "compile", text, monkeypatch)
    with pytest.raises(Exception, match="CacheWarning: full") as caught:
        compiled(target, torch.relu)(torch.randn(2, 3))
    assert "TargetFailureError" not in str(caught.value)


def test_a_hook_of_a_module_without_a_file_is_named(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a notebook."""
    text = "def lower(self, *args, **kwargs):\n    return {}['no such key']\n"
    break_hook(target, "lower", text, monkeypatch)
    monkeypatch.delattr(importlib.import_module(type(target).__module__), "__file__")
    with pytest.raises(Exception, match="lower raises KeyError: 'no such key'"):
        compiled(target, torch.relu)(torch.randn(2, 3))


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("kernel.body", "kernel.boddy", "compile raises UndefinedError: .* no attribute 'boddy'"),
        ("{% for line", "{% fr line", "compile raises TemplateSyntaxError: .* unknown tag 'fr'"),
    ],
)
def test_an_error_in_a_skeleton_names_its_line(
    right: str, wrong: str, problem: str, target: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if target.name != NAMES["loop"]:
        return
    module = importlib.import_module(type(target).__module__)
    text = module.TEMPLATE.read_text()
    broken = module.TEMPLATE.with_name(f"{wrong[-5:].strip()}.jinja")
    broken.write_text(text.replace(right, wrong))
    monkeypatch.setattr(module, "TEMPLATE", broken)
    line = text[: text.index(right)].count("\n") + 1
    with pytest.raises(Exception, match=f"{problem}.*, at {broken}:{line}\\.") as caught:
        compiled(target, torch.relu)(torch.randn(2, 3))
    assert "TargetFailureError" in str(caught.value)


def test_operators_of_a_dtype_that_the_code_generator_lacks_are_named(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = target.facts.dtypes | {torch.uint32}
    monkeypatch.setattr(type(target), "facts", replace(target.facts, dtypes=dtypes))
    problem = "render_kernel raises ValueError: there is no generated code for torch.uint32; take"
    if target.name == NAMES["graph"]:
        text = "def render_graph(self, *given):\n    raise KeyError('uint32')\n"
        break_hook(target, "render_graph", text, monkeypatch)
        problem = "render_graph raises KeyError: 'uint32', at "
    x = torch.ones(2, dtype=torch.uint32 if target.name == NAMES["loop"] else torch.float32)
    with pytest.raises(Exception, match=problem) as caught:
        compiled(target, lambda x: torch.relu(x.float()) * 2)(x)
    assert "compiled from:\n  aten." in str(caught.value)
    assert f"  aten.relu.default (relu) at {__file__}:" in str(caught.value)


RETURNS = {
    "loop": ("fingerprint", "render_kernel", "compile", "runtime"),
    "graph": ("fingerprint", "make_builder", "render_graph", "compile", "launch"),
}


@pytest.mark.parametrize("result", ["None", "7", "{'unit': 7}"])
def test_what_a_hook_returns_is_checked(
    result: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping is what `compile` returns: there, what it holds is checked."""
    family = next(family for family, name in NAMES.items() if name == target.name)
    mapping = result.startswith("{")
    for hook in ("compile",) if mapping else RETURNS[family]:
        with monkeypatch.context() as patch:
            text = f"def {hook}(self, *args, **kwargs):\n    return {result}\n"
            file = break_hook(target, hook, text, patch)
            torch.compiler.reset()
            found, wanted = ("int", "(str|bytes)") if mapping else ("(None|int)", "[A-Za-z ]+")
            said = f"'{target.name}': {hook} returns {found}, no {wanted}, at {file}:1. Fix"
            with pytest.raises(Exception, match=said):
                compiled(target, torch.relu)(torch.randn(2, 3))


@pytest.mark.parametrize("named", ["relu_", "a core"])
def test_what_a_graph_compiler_refuses_is_traced_to_the_line(
    named: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the node in its message, and the call runs eagerly if that is asked for."""
    if target.name != NAMES["graph"]:
        return

    def refuse(unit: Any, *given: Any) -> Any:
        found = re.search(f"{named}\\d+", unit.text)
        if found or named == "a core":
            raise GraphRejectedError(target.name, f"no room for {found[0] if found else named}")
        return own(unit, *given)

    own = target.compile
    monkeypatch.setattr(target, "compile", refuse)
    x = torch.randn(2, 3)
    with pytest.raises(Exception, match=f"no room for {named}") as caught:
        compiled(target, lambda x: torch.relu(x) * 2)(x)
    assert f"At: {__file__}:" in str(caught.value)
    if named == "relu_":
        assert "(Relu), made from aten.relu.default" in str(caught.value)
        torch.compiler.reset()
        with pytest.warns(FallbackWarning, match=r"aten\.relu\.default runs eagerly: no room"):
            found = compiled(target, lambda x: torch.relu(x) * 2, rejected="eager")(x)
        assert torch.equal(found, torch.relu(x) * 2)


def test_files_of_a_graph_compiler_are_bytes(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if target.name == NAMES["graph"]:
        text = "def compile(self, *args):\n    return {'graph.json': 'text'}\n"
        break_hook(target, "compile", text, monkeypatch)
        with pytest.raises(Exception, match="compile returns str, no bytes"):
            compiled(target, torch.relu)(torch.randn(2, 3))


def test_a_hook_that_takes_other_arguments_is_named(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = break_hook(target, "compile", "\n\ndef compile(self): pass\n", monkeypatch)
    with pytest.raises(Exception, match=f"compile raises TypeError.*, at {file}:3"):
        compiled(target, torch.relu)(torch.randn(2, 3))


def test_a_target_compiles_and_loads_outside_of_pytorch_s_tracing(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors have numbers, without a name of PyTorch's that a vendor would have to know."""
    made = []

    def watched(own: Any) -> Any:
        def stage(*given: Any) -> Any:
            made.append(torch.tensor([1.0, 2.0]).sum())
            return own(*given)

        return stage

    for stage in ("compile", "launch" if target.name == NAMES["graph"] else "runtime"):
        monkeypatch.setattr(target, stage, watched(getattr(target, stage)))
    x = torch.randn(2, 3)
    assert torch.equal(compiled(target, lambda x: torch.relu(x) * 2)(x), torch.relu(x) * 2)
    assert len(made) == 2
    assert all(type(value) is torch.Tensor and value.item() == 3 for value in made)
