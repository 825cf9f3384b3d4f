"""Kernel fusion: that it happens where it pays, and that it never changes a result."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from programs import Program, mismatches, random_program
from recorder import Recorder, calls, kernels, record
from torch import Tensor, nn

from dicp import Backend
from dicp.compare import assert_matches


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def dropout_add_norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.dropout(x, 0.1) + residual, (48,), w, b)


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    denominator = (v.sqrt() / (1 - 0.999**3) ** 0.5).add_(1e-8)
    p.addcdiv_(m, denominator, value=-0.01 / (1 - 0.9**3))


def layer_norm_gradients(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [48], w, w, 1e-5)
    return torch.ops.aten.native_layer_norm_backward(
        g, x, [48], mean, rstd, w, w, [True, True, True]
    )


def rms_norm_gradients(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    inner, normal = g * w, x * scale
    moved = (inner - normal * (inner * normal).mean(-1, keepdim=True)) * scale
    return moved, (g * normal).sum(tuple(range(g.ndim - 1)))


ROW = (torch.randn(24, 48),)
VECTOR = torch.randn(48)
ONE_KERNEL: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "softmax": (lambda x: x.softmax(-1), ROW),
    "log_softmax": (lambda x: x.log_softmax(-1), ROW),
    "softmax of columns": (lambda x: x.relu().sum(0), ROW),
    "layer norm": (lambda x: F.layer_norm(x, (48,), VECTOR, VECTOR), ROW),
    "layer norm in bf16": (lambda x: F.layer_norm(x, (48,)), (ROW[0].bfloat16(),)),
    "rms norm": (rms_norm, (*ROW, VECTOR)),
    "rms norm of PyTorch": (lambda x: F.rms_norm(x, (48,), VECTOR), ROW),
    "gelu": (F.gelu, ROW),
    "tanh gelu": (lambda x: F.gelu(x, approximate="tanh"), ROW),
    "dropout, add, norm": (dropout_add_norm, (*ROW, ROW[0] + 1, VECTOR, VECTOR)),
    "masked softmax": (
        lambda x, m: torch.where(m, x / 3, -torch.inf).softmax(-1), (*ROW, ROW[0] > -2)
    ),
    "several outputs": (lambda x: (x.sin(), x.cos(), x + 1, x.sum(-1)), ROW),
    "swiglu": (lambda x: F.silu(x[:, :24]) * x[:, 24:], ROW),
    "mean and variance": (lambda x: torch.var_mean(x, -1), ROW),
    "normalize": (lambda x: F.normalize(x, dim=-1), ROW),
    "through a reshape": (lambda x: (x + 1).reshape(12, 2, 48).softmax(-1).flatten(), ROW),
    "argmax of a product": (lambda x: (x * 2 + 1).argmax(-1), ROW),
    "adam": (adam, tuple(torch.rand(5, 7) for _ in range(4))),
    "sgd with momentum": (
        lambda p, g, m: (m.mul_(0.9).add_(g), p.sub_(m, alpha=0.1))[0],
        tuple(torch.rand(5, 7) for _ in range(3)),
    ),
}  # fmt: skip


ACROSS = {
    "layer norm": (layer_norm_gradients, ((200, 48), (200, 48), (48,))),
    "layer norm of a sequence": (layer_norm_gradients, ((5, 37, 48), (5, 37, 48), (48,))),
    "rms norm": (rms_norm_gradients, ((6, 600, 48), (6, 600, 48), (48,))),
    "sum of what is reduced": (
        lambda x, y: (x.softmax(-1), (x + y).sum(0)), ((64, 20), (64, 20))
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACROSS)
def test_sums_over_rows_are_taken_along(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    fn, shapes = ACROSS[name]
    inputs = [torch.randn(s).to(dtype) for s in shapes]
    if not dynamic:
        target = record(fn, *inputs)
        assert kernels(target) == [1] or dtype == torch.bfloat16  # whose sums are rounded apart
        assert "outer_reduction" not in target.programs[0].text()
    compiled = torch.compile(fn, backend="cpugraph", dynamic=dynamic)
    exact = fn(*(x.double() for x in inputs))
    for found, eager, wanted in zip(compiled(*inputs), fn(*inputs), exact, strict=True):
        assert found.shape == wanted.shape and found.dtype == dtype
        allowed = 2 * (eager.double() - wanted).abs().max() + 1e-5
        assert (found.double() - wanted).abs().max() <= allowed


def test_columns_of_which_a_second_pass_needs_the_first(dynamic: bool) -> None:
    """The mean, from which a variance is summed, is no result to be computed after both."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x.var(1, correction=2), x.std(0, correction=0)

    x = torch.randn(12, 80)[::2, 3:77:2]
    compiled = torch.compile(fn, backend="cpugraph", dynamic=dynamic)
    for found, eager, exact in zip(compiled(x), fn(x), fn(x.double()), strict=True):
        assert_matches(found, eager, exact)


def test_what_reads_a_sum_over_rows_comes_after_it() -> None:
    """The sum is complete when its kernel ends: a reader of rows cannot be in that kernel."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.sum(0)
        return total, (x - total).softmax(-1)

    x = torch.randn(64, 20)
    found, wanted = torch.compile(fn, backend="cpugraph")(x), fn(x)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name: str, dynamic: bool) -> None:
    fn, inputs = ONE_KERNEL[name]
    target = record(fn, *[x.clone() for x in inputs], dynamic=dynamic)
    assert (kernels(target), calls(target)) == ([1], [])


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def unit(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return activation(gate) * value

    return unit


GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": F.glu,
    "glu of channels": lambda x: F.glu(x, 1),
    "glu of rows": lambda x: F.glu(x, 0),
    "swiglu": gated(F.silu),
    "geglu": gated(F.gelu),
    "reglu": gated(F.relu),
}


def elementary_functions(made: Recorder) -> list[str]:
    """The calls of elementary functions in the kernels of the last program."""
    text = "".join(made.programs[-1].kernel_texts.values())
    return re.findall(r"\bd_(?:exp|tanh|normal_cdf|exp_weight)\(", text)


@pytest.mark.parametrize("name", GATED)
def test_gradients_of_gated_units_are_one_kernel(name: str, dynamic: bool) -> None:
    """Both halves are computed from the gate's function, which no buffer holds."""
    made = record(GATED[name], torch.randn(4, 6, 80, requires_grad=True), dynamic=dynamic)
    assert kernels(made)[-1] == 1
    found = elementary_functions(made)
    assert len(found) == len(set(found)), made.programs[-1].text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", GATED)
def test_gradients_of_gated_units(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    def gradient(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        mine = x.clone().to(dtype).requires_grad_()
        fn(mine).square().sum().backward()
        assert mine.grad is not None
        return mine.grad

    compiled = torch.compile(GATED[name], backend="cpugraph", dynamic=dynamic)
    for shape in ((4, 6, 74), (2, 10, 38)):
        x = torch.randn(shape).to(dtype)
        eager, exact = gradient(GATED[name], dtype), gradient(GATED[name], torch.float64)
        assert_matches(gradient(compiled, dtype), eager, exact)


TANHS: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    "a value and its double": (1, lambda y: torch.cat([y, y * 2], -1)),
    "padding": (1, lambda y: F.pad(y, (1, 2))),
    "a part": (1, lambda y: y[:, 3:17].clone()),
    "a value in three parts": (2, lambda y: torch.cat([y, y * 2, y * 3], -1)),
    "neighbours": (2, lambda y: y[:, 1:] - y[:, :-1]),
    "a value that is returned": (2, lambda y: (y, torch.cat([y, y * 2], -1))),
    "a value that is summed up": (2, lambda y: (y.sum(0), torch.cat([y, y * 2], -1))),
    "broadcasting": (2, lambda y: y[:, None].expand(-1, 3, -1).clone()),
}


@pytest.mark.parametrize("name", TANHS)
def test_elementary_functions_are_computed_by_their_only_reader(name: str, dynamic: bool) -> None:
    """Where that computes them no more often than a kernel of their own."""
    count, use = TANHS[name]
    made = record(lambda x: use(x.tanh()), torch.randn(6, 20), dynamic=dynamic)
    assert kernels(made) == [count], made.programs[0].text()
    *_, last = made.programs[0].kernel_texts.values()
    assert ("d_tanh(" in last) == (count == 1)


def test_cross_entropy_forward_writes_no_logits() -> None:
    """One pass over the rows, whose statistics are all that is kept of them."""
    target = torch.randint(0, 48, (24,))
    made = record(lambda x: F.cross_entropy(x, target), ROW[0])
    (program,) = made.programs
    sizes = [b["shape"] for b in program.serialized["buffers"] if b["role"] == "temp"]
    assert [24, 48] not in sizes, program.text()
    assert kernels(made)[0] <= 2, "a row each, and their mean"


def test_softmax_backward_is_one_kernel() -> None:
    made = record(lambda x: x.softmax(-1), ROW[0].clone().requires_grad_())
    assert kernels(made) == [1, 1]


def mlp(layers: int) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks)


def distinct_kernels(target: Recorder) -> int:
    return len({name for program in target.programs for name in program.kernel_texts})


def test_identical_layers_share_kernels() -> None:
    x = torch.randn(8, 16)
    one, four = (distinct_kernels(record(mlp(n), x)) for n in (1, 4))
    assert four <= one + 4


def test_fusion_stops_at_library_calls_and_returned_buffers() -> None:
    made = record(lambda x, w: ((x + 1) @ w).sin(), torch.randn(4, 4), torch.randn(4, 4))
    assert kernels(made) == [2] and len(calls(made)) == 1


def test_no_kernel_where_nothing_is_computed() -> None:
    assert kernels(record(lambda x: (x.t(), x.view(-1)[3:], x[None]), torch.randn(4, 5))) in (
        [], [0],
    )  # fmt: skip


# ---- random programs -----------------------------------------------------------------------------


def check(program: Program, dynamic: bool, grad: bool) -> None:
    torch._dynamo.reset()
    compiler = Backend("cpu", cxx_flags="-O0")
    compiled = torch.compile(program.function(), backend=compiler, dynamic=dynamic)
    assert not mismatches(program, compiled, grad=grad)


@pytest.mark.sweep
@settings(
    deadline=None, derandomize=True, max_examples=20, database=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking would compile thousands of programs
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(st.data())
def test_random_programs(data: st.DataObject) -> None:
    grad = data.draw(st.booleans())
    program = random_program(lambda s: data.draw(st.sampled_from(s)), 8, mutation=not grad)
    check(program, data.draw(st.booleans()), grad)


FOUND = {
    "the constant of a rejoined quotient": (
        [(2, 8, 1)], ["v1 = v0.reshape(1, 16, 1).select(1, -1) + v0"], True, False
    ),
    "a slice walked backwards under a division": (
        [(4, 3)], ["v1 = v0.tanh().t().reshape(12)[:9].flip(0)"], False, False
    ),
    "a number computed from sizes": (
        [(2, 4)], ["v1 = v0.var((1,), unbiased=False)"], True, True
    ),
    "positions in a split column": (
        [(8, 12, 1)], ["v1 = v0.argmin(0, keepdim=True) * 0.25"], True, False
    ),
    "a constant in the graph": ([(2, 3)], ["v0[..., 0] = 0.25", "v1 = v0 + 1"], False, False),
    "a scan down the columns": (
        [(12, 3, 12)], ["v1 = (v0.cumsum(1) * 2).logsumexp((0, 2))"], False, True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found_by_random_programs(name: str) -> None:
    shapes, lines, dynamic, grad = FOUND[name]
    check(Program(shapes, lines, ["v1"]), dynamic, grad)
