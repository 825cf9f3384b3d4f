"""The fuzzer: what it may draw, what it notices, how it shrinks; and some of its programs."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from typer.testing import CliRunner

from dicp.fuzz import campaign
from dicp.fuzz.__main__ import app
from dicp.fuzz.batch import Find, as_test, draw_batch, examine, fails
from dicp.fuzz.campaign import fails_apart, find_from, plain_find
from dicp.fuzz.check import Mode, compare, compiled, evaluate, truth
from dicp.fuzz.generate import _wide, double_precision, generate, is_exact
from dicp.fuzz.program import VALUES, NumberInput, Program, Statement, TensorInput, merged, names
from dicp.fuzz.rounding import OtherLoops, _adds_exactly, is_explained
from dicp.fuzz.shrink import shrunk
from dicp.fuzz.slots import SLOTS, Choices
from dicp.fuzz.table import ROWS, UNDRAWN
from dicp.rules import RuleTable
from dicp.torch_private import pytree, schema_of

TARGETS = ("cpu", "triton", "maca", "ascend", "tops")
for _target in TARGETS:
    importlib.import_module(f"dicp.vendor.{_target}")
SEEDS = (0, 9, 41)  # static; unfused, with gradients; with sizes that change, with gradients
PROGRAMS = 24
EAGER = Mode("eager")


def drawn(count: int) -> list[Program]:
    rng = random.Random(7)
    return [generate(rng, Choices(grad=True)) for _ in range(count)]


def test_every_rule_of_every_target_is_drawn() -> None:
    reached = {rule for row in ROWS for rule in row.rules}
    tables = [
        value
        for target in TARGETS
        for name, module in list(sys.modules.items())
        if name.startswith((f"dicp.vendor.{target}", "dicp.loop", "dicp.graphop", "dicp.gpu"))
        for value in vars(module).values()
        if isinstance(value, RuleTable)
    ]
    rules = {schema_of(op).name.split("::")[1] for table in tables for op in table.ops()}
    assert rules - reached == set(UNDRAWN)


def test_every_slot_of_a_row_is_known() -> None:
    unknown = {slot for row in ROWS for slot in row.slots if slot.split("_")[0] not in SLOTS}
    assert unknown <= {"at_all"}


def test_a_seed_draws_the_same_programs() -> None:
    assert draw_batch("3/1", "eager", 6) == draw_batch("3/1", "eager", 6)
    assert draw_batch("3/1", "eager", 6) != draw_batch("3/2", "eager", 6)


def test_programs_survive_plain_data_and_merging() -> None:
    programs = drawn(8)
    for program in programs:
        find = Find(program, EAGER, "text")
        assert find_from(json.loads(json.dumps(plain_find(find)))) == find
    assert not fails(merged(programs), EAGER)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", SEEDS)
def test_programs(seed: int, backend_name: str) -> None:
    """A fixed choice; `python -m dicp.fuzz --backend NAME --seconds 600` goes on."""
    batch = draw_batch(f"ci/{seed}", backend_name, PROGRAMS)
    outcome = examine(batch)
    assert not outcome.finds, "\n\n".join(as_test(find) for find in outcome.finds)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_float64_runs_have_the_same_inputs(values: str, dtype: str) -> None:
    x = TensorInput("x0", dtype, ((6, 7), (6, 7)), values=values, seed=1)
    narrow = x.build(0)
    with double_precision():
        torch.testing.assert_close(
            x.build(0, wide=True).double(), narrow.double(), rtol=0, atol=0, equal_nan=True
        )


WRONG = "wrong_sine"


@pytest.fixture
def wrong_backend() -> Iterator[str]:
    """A backend that takes a sine for a cosine."""

    def compile_graph(gm: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            if node.target is torch.sin:
                node.target = torch.cos
        gm.recompile()
        return gm.forward

    torch._dynamo.register_backend(compile_graph, WRONG)
    yield WRONG
    torch._dynamo.backends.registry._COMPILER_FNS.pop(WRONG)
    torch._dynamo.backends.registry._BACKENDS.pop(WRONG, None)


def test_a_wrong_result_is_found_and_shrunk(wrong_backend: str) -> None:
    chain = Program(
        (
            TensorInput("x0", "float32", ((4, 5), (4, 5)), "transposed", "grid", 1, True),
            TensorInput("x1", "bfloat16", ((5,), (5,)), seed=2),
            NumberInput("i2", (2, 3)),
        ),
        (
            Statement("torch.exp({f})", {"f": "x0"}, ("v0",)),
            Statement("{x} + {y}", {"x": "v0", "y": "x1"}, ("v1",)),
            Statement("torch.sin({x})", {"x": "v1"}, ("v2",), "torch.no_grad()"),
            Statement("{x} * {s}", {"x": "v2", "s": "i2"}, ("v3",)),
        ),
        ("v3", "x0"),
    )
    mode = Mode(wrong_backend, dynamic=None, optimized=True)
    text = fails(chain, mode)
    assert text.startswith("output 0: absolute error")
    smallest = shrunk(Find(chain, mode, text), 60)
    (statement,) = smallest.program.statements
    assert (statement.template, statement.context) == ("torch.sin({x})", "")
    (only,) = smallest.program.inputs
    assert isinstance(only, TensorInput) and only.layout == "contiguous"
    assert only.shapes in (((), ()), ((1,), (1,)), ((1, 1), (1, 1)))
    assert smallest.mode == Mode(wrong_backend)
    names: dict[str, Any] = {}
    exec(as_test(smallest), names)
    with pytest.raises(AssertionError):
        names["test_found"]()


def test_batches_name_the_program_that_fails(wrong_backend: str) -> None:
    batch = draw_batch("3/2", "eager", 4)
    x = TensorInput("x0", "float32", ((3,), (3,)))
    sine = Program((x,), (Statement("torch.sin({x})", {"x": "x0"}, ("v0",)),), ("v0",))
    programs = (*batch.programs[:2], sine, *batch.programs[2:])
    outcome = examine(replace(batch, mode=Mode(wrong_backend), programs=programs))
    assert [find.program for find in outcome.finds] == [sine]
    assert outcome.programs == 5


@pytest.mark.sweep
def test_a_batch_that_cannot_be_drawn_ends_no_campaign() -> None:
    """Eager, which a program is tried in, may end the process: drawing is tried in another one."""
    plan = campaign.Plan("eager", batch=-1)  # drawing this many raises
    worker: Any = SimpleNamespace(process=SimpleNamespace(returncode=-11), number=3)
    tally = campaign.Tally(plan)
    assert campaign._after_end(plan, worker, tally, pytest.fail) == 4
    assert (tally.pytorch, tally.finds) == (1, [])
    assert campaign.draws(replace(plan, batch=2), 0, set())


def test_a_program_that_ends_its_process_is_told_apart() -> None:
    x = TensorInput("x0", "float32", ((), ()))
    ends = Program((x,), (Statement("__import__('os').abort()", {}),), ("x0",))
    assert fails_apart(ends, EAGER) == "Ended: status -6"


def test_deviations_of_equal_numbers_are_rounding_errors_of_rounded_means() -> None:
    """They are none where a target's own kernels compute the mean; nothing larger is anywhere."""
    x = TensorInput("x0", "float32", ((6, 7), (6, 7)), "expanded_last", seed=1)
    deviation = Program((x,), (Statement("{x}.std(-1)", {"x": "x0"}, ("v0",)),), ("v0",))
    (got,) = list(compiled(deviation, Mode("cpugraph")))[:1]
    eager = evaluate(deviation.function(), deviation, 0)
    exact = truth(deviation, 0, eager)
    assert not any(results.outputs[0].any() for results in (got, eager, exact))
    for error, explained in ((1e-7, True), (1e-5, False)):
        got.outputs[0].fill_(error)
        assert is_explained(deviation, 0, got, eager, exact, rounded_means=True) is explained
        assert not is_explained(deviation, 0, got, eager, exact)


def test_a_cast_is_rounded_in_the_reference_and_what_follows_is_not() -> None:
    x = torch.tensor(0.865915060043335)
    (row,) = (r for r in ROWS if r.template == "F.gelu({f}.to({t_float}))")
    wide = _wide(row)
    found = eval(wide.format(f="x", t_float="torch.float16"), {**names(), "x": x.double()})
    assert found.dtype == torch.float64
    assert found == F.gelu(x.half().double()) != F.gelu(x.half()).double()


def test_the_gradient_of_a_cast_is_not_rounded_in_the_reference() -> None:
    x = torch.randn(50).double().requires_grad_()
    (row,) = (r for r in ROWS if r.template == "F.gelu({f}.to({t_float}))")
    wide = _wide(row)
    found = eval(wide.format(f="x", t_float="torch.bfloat16"), {**names(), "x": x})
    short = x.detach().bfloat16().double().requires_grad_()
    (given,) = torch.autograd.grad(found.sum(), x)
    (exact,) = torch.autograd.grad(F.gelu(short).sum(), short)
    assert torch.equal(given, exact) and not torch.equal(exact.bfloat16().double(), exact)


def test_sums_that_are_right_by_chance_are_not_exact() -> None:
    equal = torch.full((16,), 0.3)
    assert not _adds_exactly(equal) and _adds_exactly(torch.full((16,), 0.25))
    assert _adds_exactly(torch.arange(100.0)) and not _adds_exactly(torch.tensor([1.0, 2.0**-24]))


def test_long_numbers_are_inexact_once_computed() -> None:
    """A float64 result has no better reference: it is exact where it has few digits."""
    x = torch.randn(4, dtype=torch.float64)
    assert is_exact(x[1:], x[1:], [x]) and not is_exact(x.exp(), x.exp(), [x])
    halves = torch.tensor([0.5, 1.5], dtype=torch.float64)
    assert is_exact(halves * 3, halves * 3, [halves])
    assert not is_exact(x.float(), x, [x])


FRACTION = Program(
    (TensorInput("x0", "float64", ((4, 3), (4, 3))),),
    (
        Statement("torch.linalg.vector_norm({f}, 1)", {"f": "x0"}, ("v0",)),
        Statement("torch.frac({f})", {"f": "v0"}, ("v1",)),
    ),
    ("v1",),
)
SATURATED = Program(
    (TensorInput("x0", "float32", ((7,), (7,)), values="grid", seed=3, grad=True),),
    (Statement("torch.tanh({f} * 3)", {"f": "x0"}, ("v0",)),),
    ("v0",),
)


@pytest.mark.parametrize("program", [FRACTION, SATURATED])
def test_rounding_errors_explain_cancellation_and_no_more(program: Program) -> None:
    """The size of an excuse is that of rounding: not of the farthest element, nor of a NaN."""
    eager = evaluate(program.function(), program, 0)
    exact = truth(program, 0, eager)
    values = eager.grads if program is SATURATED else eager.outputs
    kept, eps = values[0].clone(), torch.finfo(values[0].dtype).eps
    for step, explained in ((8 * eps, True), (1e5 * eps, False)):
        got = evaluate(program.function(), program, 0)
        held = got.grads if program is SATURATED else got.outputs
        smallest = kept.abs().flatten().argmin()
        held[0].flatten()[smallest] += step * kept.abs().max()
        assert is_explained(program, 0, got, eager, exact) is explained
    held[0].flatten()[smallest] = torch.nan
    assert not is_explained(program, 0, got, eager, exact)


ONE_KEY = Program(
    tuple(
        TensorInput(name, "float32", ((1, 2, 1, 6),) * 2, values="grid", seed=k, grad=True)
        for k, name in enumerate(("q", "k", "v"))
    ),
    (
        Statement(
            "F.scaled_dot_product_attention({q}, {k}, {v})", {"q": "q", "k": "k", "v": "v"}, ("y",)
        ),
    ),
    ("y",),
)


def test_gradients_of_attention_to_one_key_are_a_rounding_error_from_zero() -> None:
    """They are the difference of two sums that are equal, and added up in another order."""
    eager = evaluate(ONE_KEY.function(), ONE_KEY, 0)
    exact = truth(ONE_KEY, 0, eager)
    assert eager.grads[0].abs().max() < 1e-5  # 0 on some processors
    for step, explained in ((2e-7, True), (1e-3, False)):
        got = evaluate(ONE_KEY.function(), ONE_KEY, 0)
        got.grads[0][0, 0, 0, 0] += step
        assert is_explained(ONE_KEY, 0, got, eager, exact) is explained


LEAST = Program(
    (TensorInput("x0", "float32", ((4, 6), (4, 6)), seed=5, grad=True),),
    (
        Statement("F.layer_norm({f}, {f}.shape[-1:])", {"f": "x0"}, ("v0",)),
        Statement("torch.aminmax({x})", {"x": "v0"}, ("v1", "v2")),
    ),
    ("v1",),
)
HALVES = Program(
    (
        TensorInput("x0", "float32", ((1,), (1,)), seed=776986568, grad=True),
        TensorInput("x1", "float16", ((1,), (1,)), seed=1963789367),
    ),
    (
        Statement("torch.stack([{x}, {x}], -1)", {"x": "x0"}, ("v0",)),
        Statement(
            "F.rms_norm({f}.to(torch.float16), (2,))", {"f": "v0"}, ("v1",),
            wide="F.rms_norm(widened({f}.to(torch.float16)), (2,))",
        ),
        Statement("torch.add({x}, {y}, alpha=3)", {"x": "v1", "y": "x1"}, ("v2",)),
        Statement("F.gelu({f}, approximate='tanh')", {"f": "v2"}, ("v3",)),
    ),
    ("v3",),
)  # fmt: skip

GREATEST = Program(
    (TensorInput("x0", "bfloat16", ((4, 8), (4, 8)), grad=True),),
    (
        Statement("{x} * 1.3", {"x": "x0"}, ("v0",)),
        Statement("torch.exp({x} - {x}.amax(1, keepdim=True))", {"x": "v0"}, ("v1",)),
    ),
    ("v1",),
)


@pytest.mark.parametrize(
    ("program", "step"),
    [
        pytest.param(GREATEST, 0.2, id="elements are compared with the greatest of them"),
        pytest.param(LEAST, 7e-7, id="the least of computed elements is one of them"),
        pytest.param(HALVES, 6e-5, id="one operator reads a half before it is rounded"),
    ],
)
def test_rounding_errors_before_a_selection_and_in_one_of_two_readers(
    program: Program, step: float
) -> None:
    eager = evaluate(program.function(), program, 1)
    exact = truth(program, 1, eager)
    place = exact.grads[0].abs().argmax()
    for error, explained in ((step, True), (1e3 * step, False)):
        got = evaluate(program.function(), program, 1)
        got.grads[0].flatten()[place] += error
        assert is_explained(program, 1, got, eager, exact) is explained


HIDDEN = Program(
    (TensorInput("x0", "float32", ((3, 4), (3, 4))),),
    (
        Statement("{f}.masked_fill({f} > 0, -inf) * 3", {"f": "x0"}, ("v0",)),
        Statement("F.softmax({f}, -1)", {"f": "v0"}, ("v1",)),
    ),
    ("v1",),
)


def test_rounding_errors_of_hidden_elements_excuse_no_nan() -> None:
    eager = evaluate(HIDDEN.function(), HIDDEN, 0)
    exact = truth(HIDDEN, 0, eager)
    assert is_explained(HIDDEN, 0, eager, eager, exact)
    got = evaluate(HIDDEN.function(), HIDDEN, 0)
    got.outputs[0][0, 0] = torch.nan
    assert not is_explained(HIDDEN, 0, got, eager, exact)


def test_means_of_rows_with_an_infinity_are_nan_or_infinite() -> None:
    """Eager's mean beside a variance is NaN, unless the infinity is the last of its row."""
    rows = TensorInput("x0", "float32", ((16, 2), (16, 2)), values="spiked", seed=2076764844)
    means = Program(
        (rows,), (Statement("torch.std_mean({f}, -1)", {"f": "x0"}, ("v0", "v1")),), ("v1",)
    )
    eager, got = (evaluate(means.function(), means, 0) for _ in range(2))
    exact = truth(means, 0, eager)
    got.outputs[0][:] = rows.build(0).mean(-1)
    infinite = got.outputs[0].isinf() & eager.outputs[0].isnan()
    assert infinite.any()
    assert is_explained(means, 0, got, eager, exact)
    got.outputs[0][infinite] = 1.0
    assert not is_explained(means, 0, got, eager, exact)


MASKED = Program(
    (TensorInput("x0", "float64", ((4, 6), (4, 6)), seed=5, grad=True),),
    (
        Statement(
            "F.softmax({f}.masked_fill({f} > 0, torch.finfo({f}.dtype).min) * 1.0, -1)",
            {"f": "x0"}, ("v0",),
        ),
        Statement("{f}.sum(-1) * 3", {"f": "v0"}, ("v1",)),
    ),
    ("v1",),
)  # fmt: skip


def test_rounding_errors_beside_masked_scores() -> None:
    """Their gradients are differences of equal sums; the masked ones make no run NaN."""
    eager = evaluate(MASKED.function(), MASKED, 0)
    exact = truth(MASKED, 0, eager)
    place = exact.grads[0].abs().argmax()
    for error, explained in ((3e-16, True), (1e-12, False)):
        got = evaluate(MASKED.function(), MASKED, 0)
        got.grads[0].flatten()[place] += error
        assert is_explained(MASKED, 0, got, eager, exact) is explained


NAN = TensorInput("x0", "float32", ((6, 6), (6, 6)), values="special", seed=2087588642, grad=True)


@pytest.mark.parametrize("template", ["F.elu({f})", "F.relu6({f})", "F.relu6({f} * 2)"])
def test_eager_scalar_loops_explain_other_gradients_at_nan(template: str) -> None:
    """At NaN, eager's gradients of elu, NaN, and of relu6, 0, are that of the result in a scalar
    loop."""
    program = Program((NAN,), (Statement(template, {"f": "x0"}, ("v0",)),), ("v0",))
    eager = evaluate(program.function(), program, 0)
    exact = truth(program, 0, eager)
    with OtherLoops(gaps=True):
        got = evaluate(program.function(), program, 0)
    assert compare(got, eager, exact) and is_explained(program, 0, got, eager, exact)
    got.grads[0].flatten()[got.grads[0].isfinite().flatten().long().argmax()] = torch.nan
    assert not is_explained(program, 0, got, eager, exact)


def test_eager_vectorized_loops_explain_other_nans() -> None:
    """Eager's fmod of a large number is NaN in a vectorized loop."""
    inputs = (
        TensorInput("x0", "float32", ((9, 8),) * 2, "sliced", "special", 3),
        TensorInput("x1", "float32", ((9, 8),) * 2, seed=4),
    )
    rest = (Statement("torch.fmod({f}, {g})", {"f": "x0", "g": "x1"}, ("v0",)),)
    fmod = Program(inputs, rest, ("v0",))
    eager = evaluate(fmod.function(), fmod, 0)
    exact = truth(fmod, 0, eager)
    got = replace(eager, outputs=[torch.fmod(*(x.contiguous() for x in eager.inputs))])
    assert compare(got, eager, exact) and is_explained(fmod, 0, got, eager, exact)
    got.outputs[0].flatten()[got.outputs[0].isfinite().flatten().long().argmax()] = torch.nan
    assert not is_explained(fmod, 0, got, eager, exact)


def test_deviations_beyond_the_largest_number_may_be_nan() -> None:
    """Also where the elements were drawn from a table, which adds nothing up."""
    x = TensorInput("x0", "float64", ((6, 6),) * 2, values="special", seed=1464317239)
    rest = (Statement("{o}.std({d})", {"o": "x0", "d": "1"}, ("v0",)),)
    program = Program((x,), rest, ("v0",))
    eager = evaluate(program.function(), program, 1)
    exact = truth(program, 1, eager)
    got = replace(eager, outputs=[eager.outputs[0].clone()])
    got.outputs[0][4] = torch.inf
    assert compare(got, eager, exact) and is_explained(program, 1, got, eager, exact)


def _batch_norm_with_statistics(x: Any, w: Any, mean: Any, var: Any) -> tuple[Any, ...]:
    mean, var = mean * 1, var * 1
    return F.batch_norm(x, mean, var, training=True), mean, var


HALF_NORM_FINDS: dict[str, Callable[..., Any]] = {
    "running statistics": _batch_norm_with_statistics,
    "layer_norm": lambda x, w, m, v: F.layer_norm(x, (3,), w),
    "group_norm": lambda x, w, m, v: F.group_norm(x, 1, w),
    "instance_norm": lambda x, w, m, v: F.instance_norm(x, weight=w),
}


@pytest.mark.parametrize("name", HALF_NORM_FINDS)
def test_norms_of_halves_keep_eager_dtypes_and_statistics(name: str, backend_name: str) -> None:
    """PyTorch's inference promotes running statistics, and rounds saved ones of float32 weights."""
    norm = HALF_NORM_FINDS[name]
    # Far from 0 a rounded mean shows; with everything in one short dtype eager rounds it too.
    far = 0 if name == "running statistics" else 300
    x = (torch.randn(2, 3, 3) + far).bfloat16().requires_grad_()
    inputs = (x, torch.ones(3), torch.zeros(3).bfloat16(), torch.ones(3).bfloat16())
    results = []
    for function in (norm, torch.compile(norm, backend=backend_name, fullgraph=True)):
        flat = pytree.tree_leaves(function(*inputs))
        cotangent = torch.linspace(-1, 1, 18).reshape(2, 3, 3).bfloat16()
        results.append([*flat, *torch.autograd.grad(flat[0], x, cotangent)])
    for eager, got in zip(*results, strict=True):
        torch.testing.assert_close(got, eager, rtol=0.02, atol=0.02)


def test_dropout_of_nothing_from_an_expanded_tensor(backend_name: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = x.expand(2, 2)
        return v / (v.abs() + 0.5), torch.native_dropout(v, 0.0, True)[1]

    x = torch.randn(2, requires_grad=True)
    run = torch.compile(program, backend=backend_name, fullgraph=True)
    (got,) = torch.autograd.grad(run(x)[0].sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(program(x)[0].sum(), x)[0])


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_of_a_dimension_that_is_not_there(
    function: Callable[..., Any], backend_name: str
) -> None:
    x = torch.randn(2, 2, 2)
    run = torch.compile(lambda x, dim: function(x, dim=dim), backend=backend_name, dynamic=True)
    torch.testing.assert_close(run(x, -3), function(x, dim=-3))
    for dim in (3, -4):
        with pytest.raises(IndexError, match="Dimension out of range"):
            run(x, dim)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--backend", "raedy"), ("--group", "unray"), ("--without", "torch.abss"), ("--show", "-1")],
)
def test_a_name_or_number_that_there_is_not_is_no_find(option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["--programs", "1", option, value])
    assert result.exit_code == 2
    assert value in result.output or "greater than or equal to 0" in result.output


def test_a_file_for_finds_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--programs", "1", "--out", str(tmp_path)])
    assert isinstance(result.exception, IsADirectoryError)
