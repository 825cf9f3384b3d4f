"""The stages of AOTAutograd and its stored results, with a toy compiler that interprets JSON."""

from __future__ import annotations

import gc
import json
import resource
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from dicp import torch_private
from dicp.cache import Cache
from dicp.dynamo_bridge.aot import compile_graphs
from dicp.dynamo_bridge.aot_graph import CompiledGraph, GraphCompiler, GraphInfo
from dicp.dynamo_bridge.passes.joint import correct_log_sum_exps
from dicp.dynamo_bridge.passes.redundancy import drop_copies, merge_equal_nodes
from dicp.errors import CacheWarning, FallbackWarning, InputLayoutError

# ---- a compiler whose artifact is the graph as JSON ----------------------------------------------


def encoded(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    assert value is None or isinstance(value, bool | int | float | str), value
    return value


def decoded(value: Any, env: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [decoded(item, env) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, name),) = value.items()
    if kind == "node":
        return env[name]
    return torch.device(name) if kind == "device" else getattr(torch, name)


def target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{target.__module__.lstrip('_')}:{target.__name__}"


def target_of(name: str) -> Callable[..., Any]:
    if ":" in name:
        module, attribute = name.split(":")
        return getattr(sys.modules[module], attribute)
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def to_json(gm: fx.GraphModule) -> str:
    nodes = []
    for node in gm.graph.nodes:
        target = target_name(node.target) if node.op == "call_function" else ""
        kwargs = {key: encoded(item) for key, item in node.kwargs.items()}
        nodes.append([node.op, node.name, target, encoded(node.args), kwargs])
    return json.dumps(nodes)


def interpreted(text: str) -> CompiledGraph:
    nodes = json.loads(text)

    def run(inputs: list[Any]) -> Sequence[Any]:
        values = list(inputs)
        inputs.clear()
        env: dict[str, Any] = {}
        for op, name, target, args, kwargs in nodes:
            if op == "placeholder":
                env[name] = values.pop(0)
            elif op == "output":
                return decoded(args[0], env)
            else:
                named = {key: decoded(item, env) for key, item in kwargs.items()}
                env[name] = target_of(target)(*decoded(args, env), **named)
        raise AssertionError("no output")

    return CompiledGraph(text, run)


class Toy(GraphCompiler):
    """A Dynamo backend around compile_graphs that remembers what was asked of it."""

    def __init__(self, cache: Cache | None = None, identity: str = "toy", **options: Any) -> None:
        self.result_cache, self.identity, self.decompositions = cache, identity, {}
        self.__dict__.update(options)
        self.compiled: list[GraphInfo] = []
        self.graphs: list[fx.GraphModule] = []
        self.loaded = 0
        self.events: list[tuple[str, str]] = []

    @property
    def states(self) -> list[str]:
        return [state for state, _ in self.events]

    def compile_graph(
        self, gm: fx.GraphModule, inputs: list[Any], info: GraphInfo
    ) -> CompiledGraph:
        self.compiled.append(info)
        self.graphs.append(gm)
        return interpreted(to_json(gm))

    def load_graph(self, text: str) -> CompiledGraph:
        self.loaded += 1
        return interpreted(text)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graphs(gm, example_inputs, self)

    def on_cache(self, state: str, reason: str) -> None:
        self.events.append((state, reason))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 1 << 30)


def compiled(function: Any, toy: Toy, dynamic: bool | None = False) -> Any:
    """`function` compiled as a process that has nothing in memory would compile it."""
    torch._dynamo.reset()
    return torch.compile(function, backend=toy, dynamic=dynamic)


def cold_and_warm(
    function: Any, cache: Cache, use: Callable[[Any], Any], dynamic: bool | None = False
) -> tuple[Any, Any]:
    """What `use` makes of the compiled function, without and with stored results."""
    cold, warm = Toy(cache), Toy(cache)
    first = use(compiled(function, cold, dynamic))
    second = use(compiled(function, warm, dynamic))
    assert "stored" in cold.states, cold.events
    assert set(warm.states) == {"hit"}, warm.events
    assert cold.compiled and not warm.compiled and warm.loaded == len(cold.compiled)
    return first, second


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)) * x.shape[0])


def trained(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    loss = module(x).square().sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in module.parameters())]


def test_preparation_comes_before_tracing_and_not_where_a_result_is_stored(cache: Cache) -> None:
    module, x = Perceptron(), torch.randn(5, 6)
    traced_before: list[int] = []
    for _ in range(2):  # the second one finds the first one's result
        toy = Toy(cache)
        toy.before_capture = lambda toy=toy: traced_before.append(len(toy.compiled))
        trained(compiled(module, toy), x)
        assert traced_before == [0]
    assert not toy.compiled, "it was found"


# ---- without a cache -----------------------------------------------------------------------------


def test_training_and_inference_agree_with_eager() -> None:
    module, x, toy = Net(), torch.randn(5, 6), Toy()
    expected = trained(module, x)
    torch.testing.assert_close(trained(compiled(module, toy), x), expected)
    assert [info.kind for info in toy.compiled] == ["forward", "backward"]
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(module, toy)(x), module(x))
    assert toy.compiled[-1].kind == "inference"
    assert set(toy.states) == {"off"}


def test_graph_info_tells_parameters() -> None:
    module, toy = Net(), Toy()
    trained(compiled(module, toy), torch.randn(5, 6))
    for info, graph in zip(toy.compiled, toy.graphs, strict=True):
        places = graph.graph.find_nodes(op="placeholder")
        shapes = {tuple(places[index].meta["val"].shape) for index in info.static_inputs}
        assert (5, 6) not in shapes
        assert (3, 8) in shapes  # the last weight is used in both directions


def test_joint_passes_run_before_the_split() -> None:
    seen: list[bool] = []

    def passes(joint: fx.GraphModule) -> None:
        names = [node.name for node in joint.graph.find_nodes(op="placeholder")]
        seen.append(any(name.startswith("tangents") for name in names))

    trained(compiled(Net(), Toy(joint_passes=passes)), torch.randn(5, 6))
    assert seen == [True]


@pytest.mark.parametrize(("recompute", "held"), [(False, 1), (True, 0)])
def test_operands_of_products_are_computed_anew(recompute: bool, held: int) -> None:
    """The gradient of `down` reads what the backward graph has all the parts of."""

    def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
        return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

    toy = Toy(recomputes_operands=recompute)
    shapes = [(5, 4), (4, 7), (4, 7), (7, 4)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    results = compiled(gated, toy)(*inputs)
    gradients = torch.autograd.grad(results.sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad(gated(*inputs).sum(), inputs))
    _, backward = toy.graphs
    saved = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    assert [value.numel() for value in saved].count(5 * 7) == 2 + held  # one lies transposed


def test_nested_containers_are_flattened() -> None:
    toy = Toy()
    gm = fx.symbolic_trace(lambda x, pair: (x + pair[0] * pair[1],))
    a, b, c = torch.randn(3), torch.randn(3), torch.randn(3)
    run = toy(gm, [a, [b, c]])
    torch.testing.assert_close(run(a, [b, c])[0], a + b * c)


def test_nested_inputs_that_kernels_cannot_read_run_eagerly() -> None:
    def unreadable(gm: fx.GraphModule, inputs: list[Any], info: GraphInfo) -> CompiledGraph:
        def run(inputs: list[Any]) -> Any:
            given = [x.layout for x in inputs]
            inputs.clear()
            raise InputLayoutError(0, given[0])

        return CompiledGraph("", run)

    gm = fx.symbolic_trace(lambda pair: (pair[0].to_dense() * pair[1],))
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    run = Toy(compile_graph=unreadable)(gm, [[a, b]])
    for _ in range(2):
        with pytest.warns(FallbackWarning, match="layout torch._mkldnn"):
            torch.testing.assert_close(run([a.to_mkldnn(), b])[0], a * b)


def test_backward_twice_with_retained_graph() -> None:
    module, x = Net(), torch.randn(5, 6)
    run = compiled(module, Toy())
    trained(run, x)  # compiled by a backward that lets go of its inputs
    loss = run(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_failure_leaves_the_eager_model_usable() -> None:
    def broken(gm: fx.GraphModule, inputs: list[Any], info: GraphInfo) -> CompiledGraph:
        raise ValueError("no such instruction")

    module, x = Net(), torch.randn(5, 6)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(Exception, match="no such instruction"):
        compiled(module, Toy(compile_graph=broken))(x)
    torch.testing.assert_close(module.state_dict(), before)
    assert len(trained(module, x)) == 7
    assert len(trained(compiled(module, Toy()), x)) == 7
    assert torch_private.functorch_config.cse and torch_private.functorch_config.donated_buffer


def test_merged_nodes_keep_their_sources() -> None:
    gm = _graph(lambda x: x.sin() * x.sin(), torch.ones(3))
    merge_equal_nodes(gm.graph)
    (sine,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert sine.meta["dicp_sources"] == ("aten.sin.default (sin)", "aten.sin.default (sin_1)")


def test_log_sum_exps_of_attention_in_float64() -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    gm = _graph(lambda x: torch_private.ATTENTION_FORWARD(x, x, x), x)
    (attention,) = gm.graph.find_nodes(op="call_function", target=torch_private.ATTENTION_FORWARD)
    result, log_sum_exps = attention.users
    wrong = log_sum_exps.meta["val"].float()  # as PyTorch 2.11 infers it
    attention.meta["val"], log_sum_exps.meta["val"] = (result.meta["val"], wrong), wrong
    correct_log_sum_exps(gm.graph)
    assert attention.meta["val"][1].dtype is log_sum_exps.meta["val"].dtype is torch.float64
    assert result.meta["val"].dtype is torch.float64


def test_collection_is_on_again() -> None:
    compiled(torch.sin, Toy())(torch.ones(3))
    assert gc.isenabled()


def test_objects_made_while_compiling_are_old() -> None:
    toy = Toy()
    toy(fx.symbolic_trace(lambda x: (x.sin(),)), [torch.ones(3)])
    assert any(item is toy.graphs[0] for item in gc.get_objects(generation=2))


def test_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    try:
        Toy()(fx.symbolic_trace(lambda x: (x.sin(),)), [torch.ones(3)])
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


# ---- stored results ------------------------------------------------------------------------------


def test_frames_of_a_compilation_lie_in_one_chunk() -> None:
    """Mapping a chunk at each call costs a page fault, at the depth where a chunk ends."""

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def calls() -> int:
        before = faults()
        for _ in range(300):
            (lambda: None)()
        return faults() - before

    def below(frames: int) -> int:
        return below(frames - 1) if frames else calls()

    found: list[int] = []

    def work(gm: fx.GraphModule, inputs: list[Any], info: GraphInfo) -> CompiledGraph:
        found.append(max(map(below, range(200))))
        return interpreted(to_json(gm))

    trained(compiled(Perceptron(), Toy(compile_graph=work)), torch.randn(4, 6))
    assert max(map(below, range(200))) >= 300, "no depth ends a chunk of CPython's own size"
    assert len(found) == 2 and max(found) < 100


def test_training_from_stored_results(cache: Cache) -> None:
    module, x = Net(), torch.randn(5, 6)
    expected = trained(module, x)
    first, second = cold_and_warm(module, cache, lambda run: trained(run, x))
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)


def test_inference_from_stored_results(cache: Cache) -> None:
    module, x = Net().eval(), torch.randn(5, 6)
    with torch.no_grad():
        first, second = cold_and_warm(module, cache, lambda run: run(x))
        torch.testing.assert_close((first, second), (module(x), module(x)))


def test_inputs_are_mutated(cache: Cache) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        y[1:].add_(x[1:])
        return x + y

    def use(run: Any) -> list[torch.Tensor]:
        x, y = torch.ones(4), torch.arange(4.0)
        return [run(x, y), x, y]

    first, second = cold_and_warm(function, cache, use)
    torch.testing.assert_close((first, second), (use(function), use(function)))


class Counted(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, w)
        with torch.no_grad():
            self.count += 1
        return y / (self.count + 1)


def multiply_by_former_value(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    former = x.clone()
    x.mul_(2)
    return nn.functional.linear(x, w) * former.sin()


def square_former_value(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    former = x.t() + 1
    x.mul_(2)
    return nn.functional.linear(former * former, w)


@pytest.mark.parametrize("program", [Counted(), multiply_by_former_value, square_former_value])
def test_backward_reads_inputs_as_they_were(program: Callable[..., Any], cache: Cache) -> None:
    """The partitioner would save an input for backward that forward overwrites."""

    def use(run: Any) -> list[torch.Tensor]:
        x = torch.arange(1.0, 5).reshape(2, 2).requires_grad_()
        w = torch.ones(2, 2, requires_grad=True)
        if isinstance(program, Counted):
            program.count.zero_()
        y = run(x * 1.5, w)
        y.sum().backward()
        assert x.grad is not None and w.grad is not None
        return [y.detach(), x.grad, w.grad]

    first, second = cold_and_warm(program, cache, use)
    expected = use(program)
    torch.testing.assert_close((first, second), (expected, expected))


def separate() -> tuple[torch.Tensor, ...]:
    return torch.zeros(3), torch.zeros(4)[1:]


def shared() -> tuple[torch.Tensor, ...]:
    memory = torch.zeros(4)
    return memory[:3], memory[1:]


def in_reverse() -> tuple[torch.Tensor, ...]:
    return shared()[::-1]


def further_apart() -> tuple[torch.Tensor, ...]:
    memory = torch.zeros(4, 2)
    return memory.view(-1)[:3], memory.view(-1)[1:4]


def first_written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


def test_shared_memory_of_inputs_is_in_the_key(cache: Cache) -> None:
    """Views of one tensor, one of them written, are compiled as one input."""
    for inputs in (separate, shared, further_apart, separate, shared):
        left, right = inputs(), inputs()
        got, expected = compiled(first_written, Toy(cache))(*left), first_written(*right)
        torch.testing.assert_close((got, *left), (expected, *right))


@pytest.mark.parametrize("first", [separate, shared, in_reverse, further_apart])
def test_one_program_is_called_with_inputs_that_share_other_memory(
    first: Callable[[], tuple[torch.Tensor, ...]], cache: Cache
) -> None:
    """PyTorch has no guard on that."""
    for _ in ("traced", "stored"):
        run = compiled(first_written, Toy(cache))
        for inputs in (first, shared, separate, in_reverse, further_apart, first):
            left, right = inputs(), inputs()
            got, expected = run(*left), first_written(*right)
            torch.testing.assert_close((got, *left), (expected, *right))


def test_outputs_that_are_views_and_aliases(cache: Cache) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return x, x[1:], x.t(), y, y.view(-1), y[0]

    def use(run: Any) -> Any:
        x = torch.arange(6.0).reshape(2, 3)
        outputs = run(x)
        x.add_(1)
        outputs[3].add_(10)
        shared = [output.untyped_storage().data_ptr() for output in outputs]
        return outputs, [output.stride() for output in outputs], [shared.index(s) for s in shared]

    expected = use(function)
    first, second = cold_and_warm(function, cache, use)
    torch.testing.assert_close((first, second), (expected, expected))


def test_views_that_carry_gradients(cache: Cache) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * w).t(), w[0]

    def use(run: Any) -> Any:
        x = torch.arange(6.0).reshape(2, 3)
        w = torch.ones(2, 3, requires_grad=True)
        scaled, row = run(x, w)
        (scaled.square().sum() + row.sum()).backward()
        return scaled.detach(), w.grad, scaled.requires_grad, row._is_view()

    expected = use(function)
    first, second = cold_and_warm(function, cache, use)
    torch.testing.assert_close((first, second), (expected, expected))


def test_what_requires_no_gradient(cache: Cache) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * w, x + 1, (x * w).detach(), (x > 0)

    def use(run: Any) -> list[bool]:
        outputs = run(torch.ones(3), torch.ones(3, requires_grad=True))
        outputs[0].sum().backward()  # results are stored when all graphs are compiled
        return [output.requires_grad for output in outputs]

    assert cold_and_warm(function, cache, use) == ([True, False, False, False],) * 2


def test_gradient_mode_and_requires_grad_are_in_the_key(cache: Cache) -> None:
    module, x = Net().eval(), torch.randn(5, 6)
    with torch.no_grad():
        compiled(module, Toy(cache))(x)
    toy = Toy(cache)
    trained(compiled(module, toy), x)
    assert toy.states[0] == "miss"
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    toy = Toy(cache)
    assert not compiled(module, toy)(x).requires_grad
    assert toy.states[0] == "miss"


def test_autocast_is_in_the_key(cache: Cache) -> None:
    module, x = Net().eval(), torch.randn(5, 6)

    def use(run: Any) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return run(x)

    with torch.no_grad():
        assert compiled(module, Toy(cache))(x).dtype == torch.float32
    first, second = cold_and_warm(module, cache, use)
    assert first.dtype == second.dtype == torch.bfloat16
    torch.testing.assert_close((first, second), (use(module), use(module)))


def test_random_numbers_repeat_under_a_seed(cache: Cache) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) + torch.rand_like(x) + torch.rand_like(x)

    def use(run: Any) -> torch.Tensor:
        torch.manual_seed(7)
        x = torch.ones(100, requires_grad=True)
        y = run(x)
        y.sum().backward()
        assert x.grad is not None
        return torch.stack([y.detach(), x.grad])

    first, second = cold_and_warm(function, cache, use)
    torch.testing.assert_close((first, second), (use(function), use(function)))


def test_guards_on_sizes_hold_again(cache: Cache) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] * 2 < 20 else x * 3

    cold = Toy(cache)
    run = compiled(function, cold, dynamic=True)
    run(torch.ones(4)), run(torch.ones(5)), run(torch.ones(30))
    assert [state for state in cold.states if state != "stored"] == ["miss", "miss"]

    warm = Toy(cache)
    run = compiled(function, warm, dynamic=True)
    for size in (7, 40, 8, 12):
        torch.testing.assert_close(run(torch.ones(size)), function(torch.ones(size)))
    assert warm.states == ["hit", "hit"] and not warm.compiled


def test_guards_taken_while_compiling_are_stored(cache: Cache) -> None:
    class Specializing(Toy):
        def compile_graph(
            self, gm: fx.GraphModule, inputs: list[Any], info: GraphInfo
        ) -> CompiledGraph:
            first = next(value for value in inputs if isinstance(value, torch.SymInt))
            bool(first > 10)
            return super().compile_graph(gm, inputs, info)

    run = compiled(torch.sin, Specializing(cache), dynamic=True)
    run(torch.ones(4))
    toy = Specializing(cache)
    run = compiled(torch.sin, toy, dynamic=True)
    run(torch.ones(20))
    assert toy.states == ["miss", "stored"]
    run(torch.ones(5))
    assert toy.states == ["miss", "stored", "hit"]


def test_every_guard_counts_beside_one_of_alternatives(cache: Cache) -> None:
    """Guards are joined by "and": an "or" in one of them must not make the others optional."""

    class Specializing(Toy):
        def compile_graph(
            self, gm: fx.GraphModule, inputs: list[Any], info: GraphInfo
        ) -> CompiledGraph:
            rows, columns = (value for value in inputs if isinstance(value, torch.SymInt))
            bool(rows < columns)
            bool((rows * columns == 12) | (columns > 3))
            return super().compile_graph(gm, inputs, info)

    compiled(torch.sin, Specializing(cache), dynamic=True)(torch.ones(2, 5))
    toy = Specializing(cache)
    compiled(torch.sin, toy, dynamic=True)(torch.ones(4, 3))
    assert toy.states == ["miss", "stored"]


def test_dynamic_training(cache: Cache) -> None:
    module = Perceptron()

    def use(run: Any) -> list[list[torch.Tensor]]:
        return [trained(run, torch.ones(size, 6)) for size in (4, 7, 9)]

    first, second = cold_and_warm(module, cache, use, dynamic=True)
    torch.testing.assert_close((first, second), (use(module), use(module)))


def test_tensor_subclass(cache: Cache) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def use(run: Any) -> list[torch.Tensor]:
        x = TwoTensor(torch.ones(3), torch.full((3,), 2.0)).requires_grad_()
        y = run(x)
        y.sum().backward()
        return [y.a.detach(), y.b.detach(), x.grad.a, x.grad.b]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = cold_and_warm(lambda x: x.sin() * 3, cache, use)
        torch.testing.assert_close((first, second), (use(lambda x: x.sin() * 3),) * 2)


def test_other_identity_misses(cache: Cache) -> None:
    x = torch.ones(3)
    compiled(torch.sin, Toy(cache, "toy 1"))(x)
    toy = Toy(cache, "toy 2")
    compiled(torch.sin, toy)(x)
    assert toy.states == ["miss", "stored"] and toy.compiled


def _files(cache: Cache, name: str) -> list[Path]:
    return sorted(cache.info().folder.rglob(name))


def test_damaged_entry_is_rebuilt_with_a_warning(cache: Cache) -> None:
    x = torch.ones(3)
    compiled(torch.sin, Toy(cache))(x)
    (path,) = _files(cache, "result")
    path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR." + path.read_bytes())
    toy = Toy(cache)
    with pytest.warns(CacheWarning):
        torch.testing.assert_close(compiled(torch.sin, toy)(x), x.sin())
    assert toy.states == ["miss", "stored"]
    toy = Toy(cache)
    compiled(torch.sin, toy)(x)
    assert toy.states == ["hit"]


def test_entry_that_does_not_load_is_rebuilt_with_a_warning(cache: Cache) -> None:
    def lost(text: str) -> CompiledGraph:
        raise FileNotFoundError("kernel.so")

    x = torch.ones(3)
    compiled(torch.sin, Toy(cache))(x)
    toy = Toy(cache, load_graph=lost)
    with pytest.warns(CacheWarning, match=r"kernel\.so"):
        torch.testing.assert_close(compiled(torch.sin, toy)(x), x.sin())
    assert toy.states == ["damaged", "stored"]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 3 * gradient * ctx.saved_tensors[0]


def test_custom_autograd_function_is_not_stored(cache: Cache) -> None:
    x = torch.ones(3, requires_grad=True)
    toy = Toy(cache)
    compiled(Squared.apply, toy)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 3.0))
    assert toy.states == ["bypass"] and "autograd_function_apply" in toy.events[0][1]


def test_custom_operator_is_not_stored(cache: Cache) -> None:
    @torch.library.custom_op("dicp_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    toy = Toy(cache)
    run = compiled(lambda x: twice(x) + 1, toy)
    torch.testing.assert_close(run(torch.ones(3)), torch.full((3,), 3.0))
    assert toy.states == ["bypass"] and "dicp_test::twice" in toy.events[0][1]


def test_nested_inputs_are_not_stored(
    cache: Cache, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    rows, toy = [torch.ones(2), torch.ones(3)], Toy(cache)
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    compiled(torch.sin, toy)(x)
    assert toy.states == ["bypass"] and "nested" in toy.events[0][1]
    assert not caplog.records and not recwarn.list


def test_graph_without_a_stored_form(cache: Cache) -> None:
    def opaque(gm: fx.GraphModule, inputs: list[Any], info: GraphInfo) -> CompiledGraph:
        return CompiledGraph(None, interpreted(to_json(gm)).executable)

    x, toy = torch.ones(3), Toy(cache, compile_graph=opaque)
    torch.testing.assert_close(compiled(torch.sin, toy)(x), x.sin())
    assert toy.states == ["miss", "bypass"] and not _files(cache, "result")


@pytest.mark.parametrize(
    ("function", "state"),
    [(torch.Tensor.detach, "bypass"), (torch.argmax, "stored")],
)
def test_graph_that_detaches_its_results(cache: Cache, function: Any, state: str) -> None:
    """PyTorch traces some graphs so by mistake: such a result would stay without gradients."""
    x, toy = torch.ones(3, requires_grad=True), Toy(cache)
    compiled(lambda x: function(x + 1), toy)(x)
    assert toy.states == ["miss", state]
    toy = Toy(cache)
    with torch.no_grad():
        compiled(lambda x: function(x + 2), toy)(x)
    assert toy.states == ["miss", "stored"]


def test_outside_dynamo_nothing_is_stored(cache: Cache) -> None:
    toy, x = Toy(cache), torch.ones(3)
    run = toy(fx.symbolic_trace(lambda x: (x.sin(),)), [x])
    torch.testing.assert_close(run(x)[0], x.sin())
    assert toy.states == ["bypass"]


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    from support.forked import COMPILER, server  # this file as a program does not find it

    runs = [
        server(*COMPILER).run([__file__, tmp_path / "cache"], check=True).stdout.splitlines()[-1]
        for _ in range(2)
    ]
    first, second = map(json.loads, runs)
    assert first["compiled"] == 5 and second["compiled"] == 0
    assert second["states"] == ["hit"] * 3
    assert first["values"] == pytest.approx(second["values"])


def _process(folder: str) -> None:
    torch.manual_seed(0)
    toy = Toy(Cache(Path(folder), 1 << 30))
    module = Net()
    static = trained(torch.compile(module, backend=toy, dynamic=False), torch.ones(5, 6))
    torch._dynamo.reset()
    dynamic = trained(torch.compile(Perceptron(), backend=toy, dynamic=True), torch.ones(7, 6))
    with torch.no_grad():
        inference = torch.compile(torch.sin, backend=toy)(torch.ones(3))
    values = [float(value.sum()) for value in (*static, *dynamic, inference)]
    print(json.dumps({"compiled": len(toy.compiled), "states": toy.states, "values": values}))


# ---- common subexpressions -----------------------------------------------------------------------


def _graph(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*inputs)


def _sums_around_a_write(x: torch.Tensor) -> torch.Tensor:
    view = x[:]
    before = view.sum()
    x.mul_(2)
    return before + view.sum()


@pytest.mark.parametrize(
    ("function", "merged"),
    [
        (lambda x: x.sin() * 2 + x.sin() * 2, True),
        (lambda x: x.sum([0], dtype=torch.float64) * x.sum([0], dtype=torch.float64), True),
        (lambda x: (x + 1) * (x + 1.0), False),
        (lambda x: (x / 0.0) * (x / -0.0), False),
        (lambda x: torch.rand_like(x) - torch.rand_like(x), False),
        (lambda x: torch.empty_like(x) * 0 - torch.empty_like(x) * 0, False),
        (lambda x: (x.sin(), x.sin()), False),
        (_sums_around_a_write, False),
    ],
)
def test_equal_nodes_are_merged(function: Callable[..., Any], merged: bool) -> None:
    gm = _graph(function, torch.ones(3))
    assert merge_equal_nodes(gm.graph) == merged
    gm.graph.lint()
    gm.recompile()
    if "rand" not in gm.code and "empty" not in gm.code:
        torch.testing.assert_close(gm(torch.ones(3)), function(torch.ones(3)))


def _written(x: torch.Tensor) -> torch.Tensor:
    copy = x.clone()
    x.mul_(2)
    return copy + x


@pytest.mark.parametrize(
    ("function", "dropped"),
    [
        (lambda x: x.sin().clone().exp() * 2, True),
        (lambda x: x.sin().t().clone().t().exp() * 2, True),
        (lambda x: x.sin().t().clone(memory_format=torch.contiguous_format) * 2, False),
        (lambda x: x.clone() * 2, False),
        (_written, False),
        (lambda x: x.sin().clone(), False),
        (lambda x: x.sin().clone().t(), False),
        (lambda x: (s := x.sin(), s.clone() * 2), False),
    ],
)
def test_copies_are_dropped(function: Callable[..., Any], dropped: bool) -> None:
    gm = _graph(function, torch.ones(3, 2))
    assert drop_copies(gm.graph) == dropped
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(torch.ones(3, 2)), function(torch.ones(3, 2)))


# ---- the release window --------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu", "2.13.0a0+git12"])
def test_supported_release(version: str) -> None:
    torch_private.check_release(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "3.0.0+cu130"])
def test_unsupported_release(version: str) -> None:
    with pytest.raises(ImportError, match=r"needs PyTorch 2\.11 to 2\.13 and found " + version[:4]):
        torch_private.check_release(version)


if __name__ == "__main__":
    _process(sys.argv[1])
