"""Graphs that nearly are what a pattern looks for: it must not match, or must match rightly.

Each source is a graph that some pattern or rule rewrites. It is changed at one place, by
construction: a conversion and back on an edge, another constant, another dtype of a constant,
another axis, swapped operands, a second reader. What the passes make of the changed graph is run by
eager and held to the fp64 rule, in which conversions that the program asks for are made as asked.

A fixed sample runs as a test; `python test/unit/test_near_misses.py [NAME|KIND ..]` runs all.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

if __name__ == "__main__":
    sys.path.insert(0, "test")

from support.graphs import Graph, apply, capture

from dicp.compare import Rule, check_tensor
from dicp.dtypes import REDUCED_FLOATS
from dicp.dynamo_bridge.analysis.constants import CASTS
from dicp.dynamo_bridge.analysis.inference import Inference
from dicp.dynamo_bridge.attention.masks import MASKS
from dicp.dynamo_bridge.attention.training import TRAINING_ATTENTION
from dicp.dynamo_bridge.fuse.families import FAMILIES, FUSE
from dicp.dynamo_bridge.passes.canonicalize import CANONICALIZE
from dicp.torch_private import ATTENTION_FORWARD

pytestmark = pytest.mark.sweep

aten = torch.ops.aten
prims = torch.ops.prims
PASSES = (CANONICALIZE, MASKS, FUSE, CANONICALIZE)
JOINT_PASSES = (TRAINING_ATTENTION, MASKS)
SAMPLE = 8


# ---- sources -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A function whose graph the passes rewrite, with its inputs."""

    fn: Callable[..., Any]
    inputs: Callable[[], list[Tensor]]
    keep: tuple[Any, ...] = ()


def _qkv(dims: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shape = (2, 3, 6, 8)[4 - dims :]
    return [torch.randn(shape, dtype=dtype) for _ in range(3)]


def _rows_hidden(kind: torch.dtype, fill: float = -math.inf) -> Tensor:
    """A mask with a wholly hidden row, of booleans or of numbers."""
    keep = torch.rand(6, 6) > 0.3
    keep[:, 0] = True
    keep[2] = False
    return keep if kind == torch.bool else torch.where(keep, 0.0, fill).to(kind)


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.35 + mask).softmax(-1) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, q @ k.mT / 2.8, -math.inf).softmax(-1) @ v


def filled_low(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.35).masked_fill(~keep, torch.finfo(q.dtype).min)
    return scores.float().softmax(-1).to(q.dtype) @ v


def safe(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.matmul(aten._safe_softmax(q @ k.mT * 0.35 + mask, -1), v)


def unsafe_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.5
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (powers / powers.sum(-1, keepdim=True)) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    allowed = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    bias = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    return (q @ k.mT * 0.5 + bias).softmax(-1) @ v


def causal_kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    allowed = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def repeat(x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, 2, s, d).reshape(b, h * 2, s, d)

    return (q @ repeat(k).transpose(2, 3) * 0.5).softmax(-1) @ repeat(v)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x32 = x.float()
    centered = x32 - x32.mean(-1, keepdim=True)
    normal = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)
    return normal.to(x.dtype) * w + b


def layer_norm_var(x: Tensor, w: Tensor) -> Tensor:
    var = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(var + 1e-3) * w


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def gelu_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    x32 = x.float()
    inner = math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32 * x32 * x32)
    return (0.5 * x32 * (1 + torch.tanh(inner))).to(x.dtype)


def silu_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return (y.float() * torch.sigmoid(y.float())).to(y.dtype)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target, reduction="none")


def conv_bn(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, scale: Tensor) -> Tensor:
    return F.batch_norm(F.conv2d(x, w, b, padding=1), mean, var, scale, b, eps=1e-3)


def neutral(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    one = torch.full((), 1, dtype=torch.float32)
    return (
        x * 1 + 1.5, x / one * 2, (x - 0.0) * 3, (x + -0.0) * 4, x**1 - 1, (i + 0) * 2, (i * 1) - 1,
        torch.full((4,), 3.0) * x, torch.full((4,), 1, dtype=torch.uint8).to(torch.int64) + i,
    )  # fmt: skip


def conversions(x: Tensor, i: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return (
        x.half().float().half() + 1, x.bfloat16().float().to(torch.float64) * 2,
        i.to(torch.int16).to(torch.float32).to(torch.uint8) * 2, t.float().to(torch.int32) + 1,
        t.to(torch.int8).bool() & t, torch.full((4,), 1.0).to(torch.int32).to(torch.float16) * x,
    )  # fmt: skip


def shapes(x: Tensor) -> tuple[Tensor, ...]:
    return (
        x.permute(1, 2, 0).permute(2, 0, 1) + 1, x.unsqueeze(1).squeeze(1) * 2,
        x.view(6, 4).view(2, 12) - 1, x.expand(2, 3, 4).clone() + 2,
        F.pad(x, (0, 0)) * 3, torch.cat([x]) * 5, x[:, 0:3] + 7,
    )  # fmt: skip


def _bf16(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]


def _rand(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def shifted_bytes(a: Tensor, b: Tensor) -> Tensor:
    product = torch._int_mm((a.to(torch.int32) + 128).to(torch.uint8), b)
    return (product - 128 * b.sum(0, keepdim=True, dtype=torch.int32)).float()


def _bytes(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randint(-128, 128, size, dtype=torch.int8) for size in sizes]


def _conv() -> list[Tensor]:
    x, w, b, mean, scale = _rand((2, 3, 9, 9), (4, 3, 3, 3), (4,), (4,), (4,))
    return [x, w, b, mean, torch.rand(4) + 0.5, scale]


WHOLE = torch.tensor([[1, -2, 300, 70000]])

SOURCES = {
    "added": Source(added, lambda: [*_qkv(), _rows_hidden(torch.float32)]),
    "added_low": Source(added, lambda: [*_qkv(), _rows_hidden(torch.float32, -3e38)]),
    "added_bf16": Source(added, lambda: [*_qkv(dtype=torch.bfloat16),
                                         _rows_hidden(torch.bfloat16)]),
    "chosen": Source(chosen, lambda: [*_qkv(3), _rows_hidden(torch.bool)]),
    "filled_low": Source(filled_low, lambda: [*_qkv(dtype=torch.bfloat16),
                                              _rows_hidden(torch.bool)]),
    "safe": Source(safe, lambda: [*_qkv(3), _rows_hidden(torch.float32)],
                   (aten._safe_softmax.default,)),
    "exp": Source(unsafe_exp, _qkv),
    "causal": Source(causal, _qkv),
    "causal_kept": Source(causal_kept, _qkv, (ATTENTION_FORWARD,)),
    "grouped": Source(grouped, lambda: _rand((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))),
    "layer_norm": Source(layer_norm, lambda: _rand((3, 16), (16,), (16,))),
    "layer_norm_bf16": Source(layer_norm, lambda: _bf16((3, 16), (16,), (16,))),
    "layer_norm_var": Source(layer_norm_var, lambda: _rand((4, 4), (4,))),
    "rms_norm": Source(rms_norm, lambda: _rand((4, 4), (4,))),
    "rms_norm_bf16": Source(rms_norm, lambda: _bf16((3, 16), (16,))),
    "gelu_erf": Source(gelu_erf, lambda: _rand((4, 16))),
    "gelu_tanh": Source(gelu_tanh, lambda: _rand((4, 16))),
    "gelu_tanh_bf16": Source(gelu_tanh, lambda: _bf16((4, 16))),
    "linear": Source(silu_linear, lambda: _rand((2, 5, 8), (7, 8), (7,))),
    "linear_bf16": Source(silu_linear, lambda: _bf16((5, 8), (7, 8), (7,))),
    "cross_entropy": Source(cross_entropy, lambda: [*_bf16((6, 9)), torch.arange(6)]),
    "conv_bn": Source(conv_bn, _conv),
    "int8": Source(shifted_bytes, lambda: _bytes((1, 6), (6, 5))),
    "neutral": Source(neutral, lambda: [torch.tensor([-0.0, 1e-10, math.inf, 2.5]), WHOLE]),
    "conversions": Source(conversions, lambda: [torch.randn(4) * 100, WHOLE, WHOLE > 0]),
    "shapes": Source(shapes, lambda: _rand((2, 3, 4))),
}  # fmt: skip


# ---- changes -------------------------------------------------------------------------------------

Change = Callable[[fx.GraphModule, fx.Node], None]
"""Makes one change to a graph at a node."""

BETWEEN = (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8,
           torch.int32)  # fmt: skip
CONSTANTS = (-1, 0, 1, 2, 0.5, 1.001, 1e-10, 3e38, math.inf)
"""What a number is replaced by; 1.001 times it is another."""
_FILLS = frozenset({aten.full.default, aten.scalar_tensor.default, aten.full_like.default})
_AXES = frozenset({
    aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default, aten.mean.dim,
    aten.amax.default, aten.sum.dim_IntList, aten.var.correction, aten.gather.default,
    aten.unsqueeze.default,
})  # fmt: skip
"""Operators whose second argument is an axis or several."""
_ARITHMETIC = frozenset({
    *(op for packet in (aten.add, aten.sub, aten.mul, aten.div)
      for op in (packet.Tensor, packet.Scalar)),
    aten.pow.Tensor_Scalar,
})  # fmt: skip
_ORDERED = frozenset({aten.sub.Tensor, aten.div.Tensor, aten.bmm.default, aten.mm.default})
_ALPHA = frozenset({aten.add.Tensor, aten.sub.Tensor})


def _there_and_back(dtype: torch.dtype) -> Change:
    def change(gm: fx.GraphModule, node: fx.Node) -> None:
        convert = prims.convert_element_type.default
        with gm.graph.inserting_after(node):
            there = gm.graph.call_function(convert, (node, dtype))
        with gm.graph.inserting_after(there):
            back = gm.graph.call_function(convert, (there, node.meta["val"].dtype))
        node.replace_all_uses_with(back)
        there.update_arg(0, node)

    return change


def _with_argument(position: int, value: Any) -> Change:
    def change(gm: fx.GraphModule, node: fx.Node) -> None:
        node.update_arg(position, value)

    return change


def _with_keyword(name: str, value: Any) -> Change:
    def change(gm: fx.GraphModule, node: fx.Node) -> None:
        node.kwargs = {**node.kwargs, name: value}

    return change


def _swapped(gm: fx.GraphModule, node: fx.Node) -> None:
    node.args = (node.args[1], node.args[0], *node.args[2:])


def _returned(gm: fx.GraphModule, node: fx.Node) -> None:
    output = gm.graph.output_node()
    output.args = ((*output.args[0], node),)  # type: ignore[misc]


def changes(node: fx.Node) -> Iterator[tuple[str, Change]]:
    """Every change that can be made at a node, with a name."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or node.op not in ("placeholder", "call_function"):
        return
    if value.dtype.is_floating_point:
        # A rounding before it, which a pattern may leave out, moves a number to another step.
        coarse = value.dtype in REDUCED_FLOATS and node.op == "call_function"
        for dtype in BETWEEN[:3] if coarse else BETWEEN:
            if dtype != value.dtype:
                yield f"through {dtype}", _there_and_back(dtype)
    if node.op == "placeholder":
        return
    yield "returned", _returned
    for position, argument in enumerate(node.args):
        whole = isinstance(argument, int) and node.target in _FILLS | _ARITHMETIC
        if isinstance(argument, float) or whole:
            for number in (*CONSTANTS, argument * 1.001, -argument):
                yield f"constant {number}", _with_argument(position, number)
    if node.target in _FILLS:
        for dtype in (*BETWEEN[:3], torch.uint8, torch.int64):
            yield f"filled {dtype}", _with_keyword("dtype", dtype)
    if node.target in _AXES and len(node.args) > 1:
        for axis in (0, -2):
            wanted = axis if isinstance(node.args[1], int) else [axis]
            yield f"axis {axis}", _with_argument(1, wanted)
    if node.target in _ORDERED:
        yield "swapped", _swapped
    if node.target in _ALPHA:
        yield "alpha", _with_keyword("alpha", 2)


# ---- running them --------------------------------------------------------------------------------


class Exact(fx.Interpreter):
    """Runs a graph in float64, but for the conversions and constants it asks for."""

    def run_node(self, n: fx.Node) -> Any:
        kept = n.target in CASTS | _FILLS or n.op == "get_attr"
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "call_function" and not kept:
            kwargs = {k: _wide_dtype(v) for k, v in kwargs.items()}
            args = tuple(_wide_dtype(v) for v in args)
            if n.target in (aten._softmax.default, aten._log_softmax.default):
                args = (*args[:2], False)
        result = getattr(self, n.op)(n.target, args, kwargs)
        return torch.utils._pytree.tree_map(_wide, result)


def _wide(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.dtype.is_floating_point
    return value.double() if floating else value


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def exact(graph: Graph) -> Any:
    with torch.no_grad():
        return Exact(graph.gm).run(*map(_wide, graph.inputs))


def reinfer(gm: fx.GraphModule) -> bool:
    """Values of all nodes anew; false if the changed graph is none that eager runs."""
    infer = Inference.of(gm)
    try:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                infer.infer(node)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return False
    return True


def captured(name: str, kind: str = "static") -> Graph:
    """The graph of a source; `kind`: static, symbolic (run at sizes other than the traced ones), or
    joint: forward and backward."""
    torch.manual_seed(0)
    source = SOURCES[name]
    inputs = source.inputs()
    if kind == "joint":
        inputs = [x.requires_grad_(x.is_floating_point()) for x in inputs]
    again = [_grown(x) for x in inputs] if kind == "symbolic" else []
    graph, *_ = capture(source.fn, *inputs, keep=source.keep, dynamic=kind == "symbolic",
                        train=kind == "joint", again=again)  # fmt: skip
    return graph


OTHER_SIZES = {3: 5, 5: 9, 6: 7}


def _grown(value: Tensor) -> Tensor:
    """The tensor with repeated rows, so that it has other sizes."""
    for dim, size in enumerate(value.shape):
        rows = torch.arange(OTHER_SIZES.get(size, size)) % size
        value = value.index_select(dim, rows)
    return value


def mutants(graph: Graph) -> list[tuple[int, str, Change]]:
    return [
        (position, f"{name} at {node.name}", change)
        for position, node in enumerate(graph.gm.graph.nodes)
        for name, change in changes(node)
    ]


def problems(graph: Graph, position: int, change: Change) -> list[str] | None:
    """What the passes get wrong of the changed graph; None if eager refuses it.

    Where a value is close to the middle between two of a coarser dtype, any rounding error before
    it decides which one it becomes: what fails must fail for other values, too.
    """
    mutant = Graph(graph.kind, copy.deepcopy(graph.gm), graph.inputs)
    change(mutant.gm, list(mutant.gm.graph.nodes)[position])
    if not reinfer(mutant.gm):
        return None
    plain = copy.deepcopy(mutant.gm)
    apply(mutant, JOINT_PASSES if graph.kind == "joint" else PASSES, fusions=FAMILIES)
    found: list[str] = []
    for factor in (1, 1.0625, 0.9375):
        inputs = [_scaled(x, factor) for x in graph.inputs]
        try:
            found = differences(Graph(graph.kind, plain, inputs), replace(mutant, inputs=inputs))
        except Refused:
            return None
        if not found:
            break
    return found


class Refused(Exception):
    """Eager refuses the changed graph."""


def differences(before: Graph, after: Graph) -> list[str]:
    try:
        theirs, true = before.run(), exact(before)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise Refused from error
    values = [torch.utils._pytree.tree_leaves(each) for each in (after.run(), theirs, true)]
    found = []
    for ours, eager, real in zip(*values, strict=True):
        if isinstance(eager, Tensor):
            found += check_tensor(ours, eager, real, Rule(floor=4.0))
        elif ours != eager:
            found.append(f"got {ours}, eager {eager}")
    return found


def _scaled(value: Any, factor: float) -> Any:
    floating = isinstance(value, Tensor) and value.dtype.is_floating_point
    return value * factor if floating else value


ATTENTION = ("added", "added_low", "added_bf16", "chosen", "filled_low", "exp", "causal", "grouped")
SYMBOLIC = (*ATTENTION, "safe", "causal_kept", "layer_norm", "layer_norm_bf16", "rms_norm_bf16",
            "gelu_erf", "gelu_tanh_bf16", "linear", "linear_bf16", "cross_entropy")  # fmt: skip
CASES = (
    *(("static", name) for name in SOURCES),
    *(("symbolic", name) for name in SYMBOLIC),
    *(("joint", name) for name in ATTENTION),
)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_near_misses(kind: str, name: str) -> None:
    graph = captured(name, kind)
    every = mutants(graph)
    assert not problems(graph, 0, lambda gm, node: None)
    chosen = random.Random(name).sample(every, min(SAMPLE, len(every)))
    found = {label: problems(graph, position, change) for position, label, change in chosen}
    assert not any(found.values()), {k: v for k, v in found.items() if v}


def main(names: list[str]) -> None:
    """All changes of the sources named, or of all of them."""
    for kind, name in CASES:
        if names and name not in names and kind not in names:
            continue
        graph, ran, wrong = captured(name, kind), 0, 0
        for position, label, change in mutants(graph):
            try:
                found = problems(graph, position, change)
            except Exception as error:  # whatever a pass raises is a find
                found = [f"{type(error).__name__}: {error}"]
            ran += found is not None
            wrong += bool(found)
            if found:
                print(f"  {kind} {name}: {label}: {'; '.join(found)[:300]}", flush=True)
        print(f"{kind} {name}: {ran} graphs, {wrong} wrong", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
