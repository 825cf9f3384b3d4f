"""The fuzzer: what it may draw, what it notices, how it shrinks; and some of its programs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from dicp.fuzz.batch import Find, as_test, draw_batch, examine, fails
from dicp.fuzz.campaign import fails_apart, find_from, plain_find
from dicp.fuzz.check import Mode, compiled, evaluate, is_explained, truth
from dicp.fuzz.generate import double_precision, generate
from dicp.fuzz.program import VALUES, NumberInput, Program, Statement, TensorInput, merged
from dicp.fuzz.shrink import shrunk
from dicp.fuzz.slots import SLOTS, Choices
from dicp.fuzz.table import ROWS, UNDRAWN
from dicp.loop.lowering import RULES

SEEDS = (0, 4, 50)  # static; unfused, with gradients; with sizes that change, with gradients
PROGRAMS = 24
EAGER = Mode("eager")


def drawn(count: int) -> list[Program]:
    rng = random.Random(7)
    return [generate(rng, Choices(grad=True)) for _ in range(count)]


def test_every_lowering_rule_is_drawn() -> None:
    reached = {rule for row in ROWS for rule in row.rules}
    rules = {op._schema.name.split("::")[1] for op in RULES.ops()}
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
    batch = draw_batch("3/1", "eager", 4)
    x = TensorInput("x0", "float32", ((3,), (3,)))
    sine = Program((x,), (Statement("torch.sin({x})", {"x": "x0"}, ("v0",)),), ("v0",))
    programs = (*batch.programs[:2], sine, *batch.programs[2:])
    outcome = examine(replace(batch, mode=Mode(wrong_backend), programs=programs))
    assert [find.program for find in outcome.finds] == [sine]
    assert outcome.programs == 5


def test_a_program_that_ends_its_process_is_told_apart() -> None:
    x = TensorInput("x0", "float32", ((), ()))
    ends = Program((x,), (Statement("__import__('os').abort()", {}),), ("x0",))
    assert fails_apart(ends, EAGER) == "Ended: status -6"


def test_deviations_of_equal_numbers_are_rounding_errors() -> None:
    """They are explained where the numbers are equal, and nothing larger is."""
    x = TensorInput("x0", "float32", ((6, 7), (6, 7)), "expanded_last", seed=1)
    deviation = Program((x,), (Statement("{x}.std(-1)", {"x": "x0"}, ("v0",)),), ("v0",))
    (got,) = list(compiled(deviation, Mode("cpugraph")))[:1]
    eager = evaluate(deviation.function(), deviation, 0)
    exact = truth(deviation, 0, eager)
    assert not exact.outputs[0].any() and not eager.outputs[0].any()
    assert is_explained(deviation, 0, got, eager, exact)
    got.outputs[0] += 1e-5
    assert not is_explained(deviation, 0, got, eager, exact)
