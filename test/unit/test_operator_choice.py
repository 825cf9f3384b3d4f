"""Options `eager_ops` and `native_ops`: operators that stay eager, operators that must not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import dicp
from dicp.config import Config
from dicp.dynamo_bridge.conversion import operator_table
from dicp.errors import ConfigValueError, DicpWarning, FallbackWarning, UnsupportedOperatorError
from dicp.operator_choice import ASKED_EAGER, OperatorChoice, hidden, names_of
from dicp.target import find_target

aten = torch.ops.aten
TARGETS = ("cpu", "triton", "ascend")
OLD_EAGER = "DIPU_FORCE_FALLBACK_OPS_LIST"
OLD_NATIVE = "DIPU_KEEP_TORCHOP_DEFAULT_IMPL_OPS"


def layer(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    y = F.gelu(F.linear(x, weight))
    state.mul_(0.5)
    return torch.softmax(y.view(-1, 2).t(), -1).sum(0) + state[0]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x, weight = torch.randn(6, 8), torch.randn(8, 8)
    return x.requires_grad_(), weight.requires_grad_(), torch.ones(3)


def report(target: str = "cpu", **options: Any) -> dicp.Explanation:
    torch._dynamo.reset()
    return dicp.explain(layer, *inputs(), backend=target, dynamic=False, options=options)


def failure(fn: Any, *args: Any, **options: Any) -> Exception:
    """The error of compiling `fn`, which Dynamo wraps in its own."""
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed) as caught:
        dicp.explain(fn, *args, backend="cpu", options=options)
    return caught.value.inner_exception


def eager_ops(explanation: Any) -> list[str]:
    return [
        node.op
        for graph in explanation.reports
        for node in graph.nodes
        if node.decision == "eager" and node.reason == ASKED_EAGER
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("pattern", ["gelu", ".*"])
def test_chosen_operators_stay_eager_and_values_stay(
    target: str, symbolic: bool, pattern: str
) -> None:
    found = []

    def run(compiled: Any) -> list[Tensor]:
        x, weight, state = inputs()
        result = compiled(x, weight, state)
        return [result, state, *torch.autograd.grad(result.square().sum(), (x, weight))]

    torch._dynamo.reset()
    backend = dicp.Backend(target, eager_ops=pattern, cache=False)
    for got, wanted in zip(
        run(torch.compile(layer, backend=backend, dynamic=symbolic)), run(layer), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    for graph in backend.reports:
        found += [n.op for n in graph.nodes if n.decision == "eager" and n.reason == ASKED_EAGER]
        computing = [n for n in graph.nodes if n.decision != "eager" and "sym_size" not in n.op]
        assert (pattern == ".*") != any("aten." in n.op for n in computing), computing
    assert "aten.gelu.default" in found
    assert (pattern == "gelu") == (set(found) == {"aten.gelu.default"}), found


def test_the_function_as_written_and_what_it_becomes_are_both_compared() -> None:
    found = eager_ops(report(eager_ops="linear"))
    assert "aten.mm.default" in found, "linear is traced to a product"
    assert "aten.gelu.default" not in found
    assert eager_ops(report(eager_ops=r"aten\.mm\.default")).count("aten.mm.default") == 3


def test_the_gradient_of_a_function_is_not_the_function() -> None:
    found = report(eager_ops="softmax")
    assert "aten._softmax.default" in eager_ops(found)
    assert "aten._softmax_backward_data.default" not in eager_ops(found)


def test_an_operator_has_the_names_of_the_forms_that_become_it() -> None:
    names = names_of(aten.add.Tensor)
    assert {"add", "add.Tensor", "add.out", "add_.Tensor", "add_", "aten.add.Tensor"} <= {*names}
    assert "add.Scalar" not in names and "add.Scalar_out" not in names
    choice = OperatorChoice(eager=("rsqrt.out",))
    assert choice.wants_eager(aten.rsqrt.default) and not choice.wants_eager(aten.sqrt.default)
    assert OperatorChoice(eager=(r".*\.Scalar",)).wants_eager(aten.add.Scalar)


def test_a_chosen_operator_is_not_decomposed() -> None:
    assert "aten.gelu.default" in eager_ops(report("cpu", eager_ops="gelu.out"))


def test_both_options_change_the_cache_key() -> None:
    keys = [Config(**o).key() for o in ({}, {"eager_ops": "add"}, {"native_ops": "add"})]
    keys.append(Config.from_env({OLD_NATIVE: "add"}).key())
    assert all(a != b for k, a in enumerate(keys) for b in keys[:k])


def test_old_variables_are_read() -> None:
    config = Config.from_env({OLD_EAGER: "conv2d, add.out", OLD_NATIVE: "rsqrt.out,_softmax.out"})
    assert config.eager_ops == ("conv2d", "add.out")
    assert config.native_ops == ("rsqrt.out", "_softmax.out")
    assert config.native_ops_preferred
    assert not config.with_options({"native_ops": ["a"]}).native_ops_preferred
    assert not Config.from_env({OLD_NATIVE: "a", "DICP_NATIVE_OPS": "b"}).native_ops_preferred


def test_a_native_operator_left_to_eager_is_an_error() -> None:
    error = failure(torch.linalg.eigvalsh, torch.eye(3), native_ops="linalg_eigvalsh")
    assert isinstance(error, UnsupportedOperatorError) and "linalg_eigh" in error.op
    assert "native_ops forbids" in str(error) and "take the operator out" in str(error)


def test_a_native_operator_that_would_be_decomposed_is_an_error() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.special.entr(x)

    error = failure(fn, torch.rand(3), native_ops=r"special_entr\.default")
    assert isinstance(error, UnsupportedOperatorError) and "special_entr" in error.op
    assert report(native_ops="gelu,linear,softmax").counts["eager"] == 0


def test_a_preference_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OLD_NATIVE, "special_entr.out,linalg_eigvalsh")

    def fn(x: Tensor) -> Tensor:
        return torch.special.entr(x) + torch.linalg.eigvalsh(x @ x.T)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        dicp.explain(fn, torch.rand(3, 3), backend="cpu")
    texts = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert sum("special_entr.default is decomposed" in text for text in texts) == 1
    assert sum("stays an eager call although native_ops names it" in text for text in texts) == 1


def test_an_operator_in_both_options_is_an_error() -> None:
    one = failure(layer, *inputs(), eager_ops="relu,gelu", native_ops="relu")
    assert isinstance(one, ConfigValueError) and "aten.relu.default" in str(one)
    forms = failure(layer, *inputs(), eager_ops="gelu.out", native_ops="gelu.default")
    assert isinstance(forms, ConfigValueError) and "aten.gelu.default" in str(forms)


def test_a_pattern_that_matches_nothing_warns_with_near_names() -> None:
    with pytest.warns(
        DicpWarning, match="'sofmax' is the name of no operator; did you mean .*soft"
    ):
        OperatorChoice.of(Config(eager_ops="sofmax,relu"))


def test_the_table_of_operators_shows_the_choice() -> None:
    choice = OperatorChoice(eager=("relu",), native=("_fft_r2c",))
    rows = {row.op: row for row in operator_table(find_target("cpu"), choice)}
    assert (rows["aten.relu.default"].decision, rows["aten.relu.default"].reason) == (
        "eager", ASKED_EAGER,
    )  # fmt: skip
    assert "an error: native_ops names it" in rows["aten._fft_r2c.default"].reason


def test_passes_see_no_operator_that_stays_eager() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.relu.default, (x,))
    node.meta = {"val": torch.empty(2)}
    OperatorChoice(eager=("relu",)).mark(graph, {}, "")
    with hidden(graph):
        assert node.target != aten.relu.default and str(node.target) == "aten.relu.default"
        assert torch.equal(node.target(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
        assert not graph.find_nodes(op="call_function", target=aten.relu.default)
    assert node.target is aten.relu.default


@pytest.mark.parametrize("options", [{"fallback": "error"}, {"native_ops": "nonzero"}])
def test_parts_that_depend_on_data_are_named(options: dict[str, str]) -> None:
    def fn(x: Tensor) -> Tensor:
        return (x * 2).nonzero() + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        error = failure(fn, torch.rand(3), **options)
    assert isinstance(error, UnsupportedOperatorError) and error.op == "aten.nonzero.default"
    assert "known only at run time (as do aten.add.Tensor (" in str(error)
    assert str(error).count("test_operator_choice.py:") == 2


def test_gradient_of_a_global_pool_of_channels_last_images_is_compiled() -> None:
    """Its gradient writes to all of a tensor of zeros through `as_strided`."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()

    def fn(x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 1).flatten(1).square()

    compiled = torch.compile(fn, backend="cpugraph", options={"fallback": "error"})
    gradients = [torch.autograd.grad(f(x).sum(), x)[0] for f in (fn, compiled)]
    torch.testing.assert_close(*gradients)
