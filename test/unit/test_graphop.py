"""Programs of graph operators: prototypes, the builder's checks, cutting around eager calls."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import sympy
import torch

from dicp.errors import PrototypeError
from dicp.graphop.builder import Builder, Dialect
from dicp.graphop.hoist import hoisted
from dicp.graphop.inplace import Writing, in_place
from dicp.graphop.interpreter import Call, Interpreter, Semantics
from dicp.graphop.literals import literal
from dicp.graphop.operators import Ops
from dicp.graphop.partition import Partition, remove_dead
from dicp.graphop.program import EagerCall, Graph, Node, Origin, Result, Slot, Value
from dicp.graphop.prototype import check_call, parse_prototypes
from dicp.graphop.rewrite import rewritten
from dicp.graphop.strides import dense_order, inverse
from dicp.graphop.text import Symbolic, Text, size_list
from dicp.rules import NoRule, RuleTable
from dicp.serialize import evaluate_size, restrided

CLASSES = {
    "any": frozenset({torch.float32, torch.int64, torch.bool}),
    "real": frozenset({torch.float32}),
    "index": frozenset({torch.int64}),
}
TABLE = """
# what a small vendor has
Plus: a:real b:=a -> y:=a
Sum: x:real axes:index -> y:=x | keep:Bool=false
Join: x*:real -> y:=x | axis:Int count:Int=1
Turn: x:any order:index -> y:=x
Put: place:real value:=place -> place:=place
Sheet: x:any shape:index -> y:=x
Maybe: x:real bias?:=x -> y:=x | names:ListInt=1,2 kind:String=none factor:Float=1.0 to:Type=F32
"""
PROTOTYPES = parse_prototypes("small.h", TABLE, CLASSES)
SEMANTICS = Semantics()
SEMANTICS.update({"Plus": torch.add, "Join": lambda x, axis, count=1: torch.cat(x, axis)})
SEMANTICS.op("Sum", host=("axes",))(lambda x, axes, keep=False: x.sum(axes, keep))
SEMANTICS.op("Turn", host=("order",))(lambda x, order: x.permute(order))
SEMANTICS.op("Put")(lambda place, value: value)
SEMANTICS.op("Sheet", host=("shape",))(lambda x, shape: x.reshape(shape))
SEMANTICS.op("Maybe")(lambda x, bias, **attrs: x if bias is None else x + bias)


class Small(Builder):
    def __init__(self) -> None:
        super().__init__(Dialect("small", PROTOTYPES, SEMANTICS), None)

    def transpose(self, x: Value, order: Any) -> Value:
        return self.op("Turn", x, self.ints(list(order)))


@pytest.fixture
def b() -> Small:
    return Small()


def slot(b: Small, *shape: int, name: str = "in0") -> Slot:
    return Slot(name, b.fake(shape, torch.float32))


def leaf(b: Small, *shape: int, name: str = "in0") -> Value:
    return b.input(slot(b, *shape, name=name), range(len(shape)))


# ---- prototypes ----------------------------------------------------------------------------------


def test_a_row_says_everything_of_an_operator() -> None:
    maybe = PROTOTYPES["Maybe"]
    assert maybe.group == "small.h"
    assert [(p.name, p.arity, p.same_as) for p in maybe.inputs] == [
        ("x", "one", ""), ("bias", "optional", "x"),
    ]  # fmt: skip
    assert [(a.name, a.type, a.default) for a in maybe.attrs][:2] == [
        ("names", "ListInt", "1,2"), ("kind", "String", "none"),
    ]  # fmt: skip


F32, I64 = torch.float32, torch.int64

VIOLATIONS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("Plus", {"a": F32}, {}, "input 'b' is missing"),
    ("Plus", {"a": F32, "b": F32, "c": F32}, {}, "no input 'c'"),
    ("Plus", {"a": I64, "b": I64}, {}, "input 'a' does not take int64"),
    ("Maybe", {"x": F32, "bias": I64}, {}, "input 'bias' is int64, but 'x' is float32"),
    ("Sum", {"x": F32, "axes": I64}, {"kep": True}, "no attribute 'kep'"),
    ("Sum", {"x": F32, "axes": I64}, {"keep": 1}, "attribute 'keep' is 1, not Bool"),
    ("Join", {"x": [F32]}, {}, "attribute 'axis' is missing"),
    ("Join", {"x": F32}, {"axis": 0}, "takes a list of tensors"),
    ("Plus", {"a": [F32], "b": F32}, {}, "takes one tensor"),
    ("Maybe", {"x": F32}, {"names": [1, True]}, "not ListInt"),
    ("Maybe", {"x": F32}, {"kind": 3}, "not String"),
    ("Maybe", {"x": F32}, {"factor": "1"}, "not Float"),
    ("Maybe", {"x": F32}, {"to": "float32"}, "not Type"),
]


@pytest.mark.parametrize(("kind", "inputs", "attrs", "message"), VIOLATIONS)
def test_violations_are_named(
    kind: str, inputs: dict[str, Any], attrs: dict[str, Any], message: str
) -> None:
    with pytest.raises(PrototypeError, match=message):
        check_call(PROTOTYPES[kind], inputs, attrs)


# ---- the builder ---------------------------------------------------------------------------------


def test_results_are_inferred_and_constants_shared(b: Small) -> None:
    x = leaf(b, 3, 4)
    total = b.op("Sum", x, b.ints([1]), keep=True)
    assert total.shape == (3, 1) and total.dtype == torch.float32
    assert b.ints([1]) is b.ints([1]) and b.number(1.0, F32) is not b.number(1, I64)


def test_an_unknown_operator_and_a_wrong_dtype(b: Small) -> None:
    x = leaf(b, 3)
    with pytest.raises(PrototypeError, match="small has no such operator"):
        b.op("Minus", x, x)
    with pytest.raises(NoRule, match="Plus does not take int64"):
        b.op("Plus", b.ints([1]), b.ints([2]))


def test_sizes_must_be_known_before_the_run(b: Small) -> None:
    x = leaf(b, 3, 4)
    axes = b.input(Slot("axes", b.fake((1,), I64)), [0])
    with pytest.raises(NoRule, match="known before the run"):
        b.op("Sum", x, axes)


def test_dense_tensors_in_any_order(b: Small) -> None:
    with b.inferring():
        transposed = torch.empty(2, 3, 4).permute(2, 0, 1)
        holes = torch.empty(4, 6)[:, ::2]
        empty = torch.empty(0, 3).t()
    assert dense_order(b, transposed) == (1, 2, 0)
    assert inverse((1, 2, 0)) == (2, 0, 1)
    assert dense_order(b, holes) is None
    assert dense_order(b, empty) == (0, 1)


# ---- partition and rewriting ---------------------------------------------------------------------


def eager(b: Small, source: Slot, name: str, **options: Any) -> EagerCall:
    out = Slot(name, source.fake)
    call = EagerCall(torch.ops.aten.relu.default, (source,), {}, [out], Origin(name, "relu", ""),
                     [source], **options)  # fmt: skip
    b.nodes.append(call)
    return call


def leave(b: Small, value: Value, name: str) -> Slot:
    out = Slot(name, value.fake)
    b.nodes.append(Result(value, out, tuple(range(value.ndim))))
    return out


def test_independent_operators_share_a_graph(b: Small) -> None:
    first = leaf(b, 3)
    left = b.op("Plus", first, first)
    call = eager(b, leave(b, left, "left"), "t")
    right = b.op("Plus", first, b.input(slot(b, 3, name="in1"), [0]))
    joined = b.op("Plus", right, b.input(call.outs[0], [0]))
    out = leave(b, joined, "out")
    steps = Partition(b, remove_dead(b.nodes, [out])).steps()
    assert [type(step) for step in steps] == [Graph, EagerCall, Graph]
    assert isinstance(steps[0], Graph) and isinstance(steps[2], Graph)
    assert len(steps[0].operators) == 2 and len(steps[2].operators) == 1
    crossing = [n.attrs["bound"].slot.name for n in steps[2].inputs]
    assert sorted(crossing) == ["t", "x0"]


def test_a_writing_call_comes_after_all_that_reads(b: Small) -> None:
    x = slot(b, 3)
    read = b.op("Plus", b.input(x, [0]), b.input(x, [0]))
    out = leave(b, read, "out")
    write = eager(b, x, "written", mutates=True)
    steps = Partition(b, remove_dead(b.nodes, [out])).steps()
    assert isinstance(steps[0], Graph) and steps[1:] == [write]


def test_dead_operators_go(b: Small) -> None:
    x = leaf(b, 3)
    b.op("Plus", x, x)
    out = leave(b, b.op("Maybe", x), "out")
    assert [n.kind for n in remove_dead(b.nodes, [out]) if hasattr(n, "kind")] == ["input", "Maybe"]


def test_rewrites_replace_and_keep_the_rest(b: Small) -> None:
    x = leaf(b, 3)
    out = leave(b, b.op("Plus", b.op("Maybe", x), x), "out")
    drop = {"Maybe": lambda builder, node: [node.inputs["x"]]}
    items = remove_dead(rewritten(b, b.nodes, drop), [out])
    assert [n.kind for n in items if hasattr(n, "kind")] == ["input", "Plus"]


@pytest.mark.parametrize("aliases", [frozenset({"Sheet"}), frozenset[str]()])
def test_a_vendor_says_which_operators_alias_memory(b: Small, aliases: frozenset[str]) -> None:
    """Through an alias of its own, a result is written into its input's memory directly."""
    place = slot(b, 4)
    x = b.input(place, [0])
    doubled = b.op("Plus", x, x)
    flat = b.op("Sheet", b.op("Sheet", doubled, b.ints([2, 2])), b.ints([4]))
    b.nodes.append(Result(flat, place, (0,), "into_input"))
    writing = Writing({}, frozenset({"Plus"}), aliases, lambda g, to, value: g.op("Put", to, value))
    kinds = [item.kind for item in in_place(b, b.nodes, writing) if isinstance(item, Node)]
    assert ("Put" in kinds) == (not aliases)


def test_copies_take_any_strides() -> None:
    source = torch.arange(6.0).reshape(2, 3)
    transposed = restrided(source, (2, 3), (1, 2))
    assert torch.equal(transposed, source) and transposed.stride() == (1, 2)
    spread = restrided(source[:, :1].expand(2, 3), (2, 3), (1, 0))
    assert torch.equal(spread, source[:, :1].expand(2, 3)) and spread.stride() == (1, 0)
    assert restrided(torch.empty(0, 3), (0, 3), (7, 2)).shape == (0, 3)


# ---- interpreter and rules -----------------------------------------------------------------------


def test_the_interpreter_runs_calls_and_frees_what_is_read_last() -> None:
    plus, total = PROTOTYPES["Plus"], PROTOTYPES["Sum"]
    calls = [
        0, torch.tensor([1]),
        Call("p", plus, SEMANTICS["Plus"], ((0, 0), (0, 0)), {}),
        Call("s", total, SEMANTICS["Sum"], ((2, 0), (1, 0)), {"keep": True}),
    ]  # fmt: skip
    interpreter = Interpreter(calls, [(3, 0)])
    (result,) = interpreter.run([torch.ones(2, 3)])
    assert torch.equal(result, torch.full((2, 1), 6.0))
    assert interpreter._dying[2] == [0] and sorted(interpreter._dying[3]) == [1, 2]


def test_a_packet_registers_its_functional_overloads() -> None:
    table = RuleTable()
    table.register(torch.ops.aten.add)(lambda b, x, y: x)
    assert torch.ops.aten.add.Tensor in table.ops()
    assert torch.ops.aten.add_.Tensor not in table.ops()
    assert torch.ops.aten.add.out not in table.ops()


# ---- what runs once ------------------------------------------------------------------------------


def test_what_reads_only_constants_moves_to_a_graph_that_runs_once(b: Small) -> None:
    weight, x = slot(b, 4, 3, name="weight"), slot(b, 3, 4, name="x")
    fixed, given = b.input(weight, (0, 1)), b.input(x, (0, 1))
    transposed = b.transpose(b.op("Plus", fixed, fixed), [1, 0])
    total = b.op("Plus", given, transposed)
    fake = b.fake((3, 4), torch.float32)
    results = [
        Result(total, Slot("out", fake), (0, 1)),
        Result(transposed, Slot("w", fake), (0, 1)),
    ]
    steps = Partition(b, [*b.nodes, *results]).steps()
    once, every = hoisted(b, steps, {weight})
    # the transpose is itself a result of every run: what it reads is kept
    assert [n.kind for g in once for n in g.operators] == ["Plus"]
    (graph,) = every
    assert isinstance(graph, Graph)
    assert [n.kind for n in graph.operators] == ["Turn", "Plus"]
    names = [n.attrs["bound"].slot.name for n in graph.inputs]
    assert sorted(names) == ["kept0_0", "x"]
    assert hoisted(b, steps, ())[0] == []


def test_what_reads_a_result_of_every_run_runs_every_time(b: Small) -> None:
    weight, x = slot(b, 4, 3, name="weight"), slot(b, 3, 4, name="x")
    transposed = b.transpose(b.input(weight, (0, 1)), [1, 0])
    total = b.op("Plus", b.op("Plus", transposed, transposed), b.input(x, (0, 1)))
    fake = b.fake((3, 4), torch.float32)
    results = [
        Result(transposed, Slot("w", fake), (0, 1)),
        Result(total, Slot("out", fake), (0, 1)),
    ]
    once, every = hoisted(b, Partition(b, [*b.nodes, *results]).steps(), {weight})
    assert not once
    assert isinstance(every[0], Graph)
    assert [n.kind for n in every[0].operators] == ["Turn", "Plus", "Plus"]


def test_a_node_of_a_shared_graph_is_shown_in_few_words(b: Small) -> None:
    """pytest and debuggers show the arguments of every frame."""
    x = leaf(b, 3)
    for _ in range(60):
        x = b.op("Plus", x, x)
    assert len(repr(x)) < 300 and len(repr(x.node)) < 1200


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("Tanh x:float -> y:=x", "is not `Name: inputs -> outputs"),
        ("Tanh: x:float y:=x", "is not `Name: inputs -> outputs"),
        ("Tanh: x:float -> y:=z", "'y' has the dtype of 'z', no input"),
        ("Tanh: x:=z -> y:=x", "'x' has the dtype of 'z', no input"),
        ("Add: x:float -> y:=x", "there is another row of Add"),
        ("Tanh: x:flot -> y:=x", r"'flot' is no class of dtypes; known are \['any', 'float'\]"),
        ("Tanh: x:float -> y:=x | axis:Number", "'axis:Number' is no attribute; types are Int"),
        ("Tanh: x:float -> y:=x | keep:Bool=fals", "the default 'fals' of 'keep' is no Bool"),
        ("Tanh: x:float -> y:=x | n:Int=1.5", "the default '1.5' of 'n' is no Int"),
        ("Tanh: x:float -> y:=x | low:Float=a", "the default 'a' of 'low' is no Float"),
        ("Tanh: x:float -> y:=x | n:ListInt=1,b", "the default '1,b' of 'n' is no ListInt"),
        ("Tanh: x:float x:any -> y:=x", "'x' occurs twice"),
        ("Tanh: x:float -> y:=x | n:Int n:Int", "'n' occurs twice"),
    ],
)
def test_a_prototype_that_cannot_be_read_is_named(row: str, message: str) -> None:
    classes = {"any": frozenset({torch.float32}), "float": frozenset({torch.float32})}
    with pytest.raises(ValueError, match=message) as raised:
        parse_prototypes("chip", f"Add: x1:any x2:any -> y:=x1\n{row}", classes)
    assert repr(row) in str(raised.value)


def test_an_operator_without_a_meaning_is_named() -> None:
    classes = {"any": frozenset({torch.float32})}
    prototypes = parse_prototypes("chip", "Add: x1:any x2:any -> y:=x1", classes)
    semantics = Semantics()
    semantics.op("Add", host=("x3",))(torch.add)
    with pytest.raises(ValueError, match="Add has no input x3 to read on the host"):
        Dialect("chip", prototypes, semantics)
    with pytest.raises(ValueError, match="chip has no semantics for Add"):
        Dialect("chip", prototypes, Semantics())


MEANINGS = {
    "Tan": (lambda x: x, "chip has semantics, but no prototype, for Tan"),
    "one input less": (lambda x: x, "too many positional arguments for Add: a b -> y . n f"),
    "one input more": (lambda a, b, c, n: a, "missing a required argument: 'c' for Add: a b -> y"),
    "no attribute": (lambda a, b: a, "got an unexpected keyword argument 'n'"),
    "all attributes": (lambda a, b, n, f=1: a, ""),
    "PyTorch's": (torch.add, ""),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_a_meaning_that_does_not_take_what_its_prototype_has_is_named(case: str) -> None:
    function, message = MEANINGS[case]
    prototypes = parse_prototypes("chip", "Add: a b -> y | n:Int f:Float=1.0", {"any": frozenset()})
    semantics = Semantics()
    semantics.update({"Add": torch.add, "Tan" if case == "Tan" else "Add": function})
    if not message:
        assert Dialect("chip", prototypes, semantics).semantics is semantics
        return
    with pytest.raises(ValueError, match=message) as raised:
        Dialect("chip", prototypes, semantics)
    place = f"the meaning of Add at {__file__}:{function.__code__.co_firstlineno}: "
    assert case == "Tan" or place in str(raised.value)


def test_an_operand_that_the_operator_lacks_is_not_dropped(b: Small) -> None:
    x = leaf(b, 3)
    with pytest.raises(PrototypeError, match=r"it has no operand 3 but \['a', 'b'\]"):
        b.op("Plus", x, x, x)
    assert b.op("Plus", x, x, None).shape == (3,)


def test_unknown_operators_in_a_vendor_s_tables_are_named() -> None:
    with pytest.raises(ValueError, match="names: 'Reluu' is no .* vocabulary. Did you mean 'Relu'"):
        type("Chip", (Ops,), {"names": {"Reluu": "Plus"}})
    with pytest.raises(ValueError, match="Chip.forms: 'Qxz' is no operator of the vocabulary$"):
        type("Chip", (Ops,), {"forms": {"Qxz": lambda g, x: x}})
    dialect = Dialect("small", PROTOTYPES, SEMANTICS)
    for table in ({"names": {"Add": "Pluss"}}, {"moves": {"Pluss"}}, {"exact": {"Pluss"}}):
        with pytest.raises(
            ValueError, match="'Pluss' is no operator of small. Did you mean 'Plus'"
        ):
            type("Chip", (Ops,), table)(dialect, None)


@pytest.mark.parametrize(
    ("number", "dtype", "text"),
    [
        (True, torch.bool, "true"),
        (0.1, torch.float32, "0.100000001f"),
        (0.1, torch.float64, "0.1"),
        (3.0, torch.float32, "3.0f"),
        (1e39, torch.float32, "__builtin_inff()"),
        (-math.inf, torch.float64, "-__builtin_inf()"),
        (math.nan, torch.float32, '__builtin_nanf("")'),
        (0.1, torch.float16, "0x2e66"),
        (1e5, torch.float16, "0x7c00"),  # infinity, as when PyTorch converts a tensor
        (-1e5, torch.float16, "0xfc00"),
        (0.1, torch.bfloat16, "0x3dcd"),
        (-(2**63), torch.int64, "INT64_MIN"),
        (2**32 - 1, torch.uint32, "4294967295u"),
        (-5, torch.int8, "-5"),
    ],
)
def test_literal(number: Any, dtype: torch.dtype, text: str) -> None:
    assert literal(number, dtype) == text


def test_text_keeps_symbolic_sizes_apart_until_numbers_replace_them() -> None:
    rows = sympy.Symbol("s0", integer=True)
    text = Text.of("Op({", size_list([rows, 4, 2 * rows]), "}, ", 7, ")")
    assert text.parts == ("Op({", Symbolic("s0"), ", 4, ", Symbolic("2*s0"), "}, 7)")
    kept = Text.decode(json.loads(json.dumps(text.encode())))
    assert kept == text
    assert kept.at(lambda size: evaluate_size(size, {"s0": 3})) == "Op({3, 4, 6}, 7)"
    assert text.shown() == "Op({<s0>, 4, <2*s0>}, 7)" and len(text) == len(text.shown())
