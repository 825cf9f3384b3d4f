"""topsgraph: golden C++ of HLIR graphs, formats at the borders, what the simulator refuses, errors.

`pytest test/unit/test_tops.py --update-golden` writes the golden texts anew.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import recorder
import torch
import torch.nn.functional as F
from recorder import Recording, after, portable, prelude
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge import executables
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import (
    CompilerError,
    DeviceError,
    FallbackWarning,
    GraphRejectedError,
    SimulatorForbiddenError,
    SimulatorWarning,
    SpecializationWarning,
)
from dicp.graphop import sdk_toolchain
from dicp.graphop.simulator import HEADER_FLAGS, Headers, Refused
from dicp.graphop.target import GraphUnit
from dicp.graphop.vocabulary import VOCABULARY
from dicp.vendor.ascend.prototypes import PROTOTYPES as GE
from dicp.vendor.ascend.rules.core import NAMES
from dicp.vendor.tops import TopsTarget, codegen, toolchain
from dicp.vendor.tops.forms import Tops
from dicp.vendor.tops.prototypes import OP_TYPES, PROTOTYPES
from dicp.vendor.tops.runtime import Executable
from dicp.vendor.tops.semantics import SEMANTICS
from dicp.vendor.tops.simulator.compiler import Compiler
from dicp.vendor.tops.simulator.shapes import SHAPES
from dicp.vendor.tops.target import GRAPH_FLAGS
from dicp.vendor.tops.toolchain import find_toolchain

GOLDEN = Path(__file__).parent / "golden_tops"
PRELUDE = prelude(
    codegen.FOLDER / "graph.cpp.jinja", operators=0, entry="", regions=(), blocks=(), outputs=""
)
pytestmark = [
    pytest.mark.filterwarnings("ignore::dicp.errors.SimulatorWarning"),
    pytest.mark.usefixtures("shared_builds"),
]


class Recorder(Recording, TopsTarget):
    """The HLIR programs."""

    def sources(self) -> list[str]:
        return [t for p in self.programs for t in self.render(p, Config()).files.values()]

    def kinds(self) -> Counter[str]:
        return Counter(n.kind for p in self.programs for g in p.graphs for n in g.operators)


def record(fn: Callable[..., Any], *inputs: Any, **options: Any) -> Recorder:
    target = Recorder()
    recorder.record(fn, *inputs, dynamic=False, target=target, **options)
    return target


def f32(*shape: int, grad: bool = False) -> Tensor:
    return torch.ones(shape, requires_grad=grad)


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)
    ).eval()


GRAPHS: dict[str, Callable[[], tuple[Callable[..., Any], list[Any]]]] = {
    "pointwise": lambda: (
        lambda x, y: torch.relu(x * 2 + y).where(x > 0, y).half() * torch.inf,
        [f32(4, 1, 8), f32(5, 1)],
    ),
    "reduction": lambda: (
        lambda x: (x.softmax(-1).sum(0), x.amax(1, True), x.argmax(1), x.topk(2)), [f32(6, 5)],
    ),
    "matmul": lambda: (
        lambda x, w, b: F.gelu(F.linear(x, w, b)), [f32(2, 4, 8), f32(6, 8, grad=True), f32(6)],
    ),
    "convolution": lambda: (chain(), [f32(1, 3, 6, 6)]),
    "pooling": lambda: (
        lambda x: F.adaptive_avg_pool2d(F.max_pool2d(x, 3, 2, 1), 1), [f32(1, 3, 7, 7)]
    ),
    "normalization": lambda: (
        lambda x, w, b: F.layer_norm(x, (32,), w, b), [f32(4, 32), f32(32), f32(32)]
    ),
    "indexing": lambda: (
        lambda i, w: F.embedding(i, w),
        [torch.zeros(4, 3, dtype=torch.int64), f32(10, 6, grad=True)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_generated_code_is_golden(name: str, golden: Callable[[Path, str], None]) -> None:
    fn, inputs = GRAPHS[name]()
    with torch.set_grad_enabled(any(x.requires_grad for x in inputs)):
        sources = record(fn, *inputs).sources()
    golden(GOLDEN / f"{name}.txt", portable("\n".join(after(PRELUDE, s) for s in sources)))
    golden(GOLDEN / "prelude.txt", PRELUDE)


def test_generated_code_does_not_change_between_runs() -> None:
    fn, inputs = GRAPHS["matmul"]()
    assert record(fn, *inputs).sources() == record(fn, *inputs).sources()


NUMBERS: dict[torch.dtype, list[float]] = {
    torch.float32: [torch.inf, -torch.inf, torch.nan, -0.0, 1 / 3, 1e-45, 3.4028234663852886e38],
    torch.float64: [torch.inf, torch.nan, -0.0, 1 / 3, 5e-324],
    torch.float16: [65504.0, -torch.inf, torch.nan, -0.0, 1 / 3, 6e-8],
    torch.int64: [-(2**63), 2**63 - 1], torch.int32: [-(2**31)], torch.uint8: [255],
    torch.bool: [True, False],
}  # fmt: skip


def test_constants_keep_every_bit() -> None:
    def fills(x: Tensor) -> list[Tensor]:
        return [torch.full((1,), n, dtype=d) for d, found in NUMBERS.items() for n in found]

    torch._dynamo.reset()
    backend = Backend("tops", cache=False, fallback="error")
    got = torch.compile(lambda x: [x + 1, *fills(x)], backend=backend)(f32(1))[1:]
    for mine, theirs in zip(got, fills(f32(1)), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), theirs


def test_the_headers_of_graphs_are_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PRELUDE + (GOLDEN / "normalization.txt").read_text()
    strict = (*(flag for flag in toolchain.FLAGS if flag != "-w"), "-Winvalid-pch", "-Werror")
    monkeypatch.setattr(toolchain, "FLAGS", strict)
    tools, cache = find_toolchain(Config()), Cache.open(Config(cache_dir=tmp_path))
    headers = (Headers("tops"), cache)
    for graphs in (0, 1, 1):
        assert toolchain.compile_shared(tools, source, symbols=("dicp_graph",), headers=headers)
        assert len(cache.keys("headers")) == graphs
    monkeypatch.setattr(sdk_toolchain, "HEADER_FLAGS", ("-O1", *HEADER_FLAGS))
    with pytest.raises(CompilerError, match="gch"):  # g++ looks at it each time
        toolchain.compile_shared(tools, source, headers=headers)


def test_the_graph_compilers_options_are_a_setting_and_part_of_the_key() -> None:
    other = ("-arch=gcu300", "-resource=1c8s")
    cache, target = Cache.open(Config(cache=False)), TopsTarget()
    plain, changed = (
        target.identity(cache, Config(vendor=vendor)) for vendor in ({}, {"graph_flags": other})
    )
    assert list(plain)[1:] == list(GRAPH_FLAGS) and list(changed)[1:] == list(other)
    assert list(plain)[0] == list(changed)[0] == find_toolchain(Config()).identity


# ---- tables --------------------------------------------------------------------------------------


def test_every_operator_has_its_meaning_its_shapes_and_its_declaration() -> None:
    header = Path(__file__).parents[2] / "dicp/vendor/tops/simulator/include/dtu/hlir_builder"
    declared = (header / "hlir_builder_client_ops.h").read_text()
    for kind in PROTOTYPES:
        assert kind in SEMANTICS and kind in SHAPES
        assert re.search(rf"Op {kind}\(|F\({kind},|\(F, {kind}\)", declared), kind


ASKED_FOR = {"ScatterNDAdd"}
"""Operators of the vocabulary that rules use only where the vendor `takes` them; GE has none."""


def test_vendors_know_the_vocabulary() -> None:
    assert set(Tops.forms) <= set(VOCABULARY)
    for kind, neutral in VOCABULARY.items():
        if kind in ASKED_FOR:
            continue
        own = GE[NAMES.get(kind, kind)]
        theirs = [port.name for port in own.inputs]
        assert theirs[: len(neutral.inputs)] == [port.name for port in neutral.inputs], kind
        assert {a.name for a in neutral.attrs} <= {a.name for a in own.attrs}, kind


# ---- formats -------------------------------------------------------------------------------------


def images(target: Recorder) -> int:
    """Transposes of images, not of filters."""
    nodes = [n for p in target.programs for g in p.graphs for n in g.operators]
    orders = [n.attrs["perm"] for n in nodes if n.kind == "Transpose"]
    return sum(order in ([0, 2, 3, 1], [0, 3, 1, 2]) for order in orders)


def test_a_chain_of_convolutions_has_one_conversion_at_each_border() -> None:
    with torch.no_grad():
        target = record(chain(), f32(1, 3, 6, 6))
    assert target.kinds()["Conv2D"] == 2 and images(target) == 2
    assert not any(n.decision == "eager" for r in target.reports for n in r.nodes)


def test_a_residual_and_a_mean_stay_in_the_convolution_format() -> None:
    first, second = (nn.Conv2d(4, 4, 3, padding=1) for _ in "ab")

    def block(x: Tensor) -> Tensor:
        y = torch.relu(first(x))
        return torch.flatten(F.adaptive_avg_pool2d(torch.relu(second(y) + y), 1), 1)

    with torch.no_grad():
        assert images(record(block, f32(2, 4, 6, 6))) == 1


def test_frozen_filters_are_converted_once() -> None:
    backend = Backend("tops", cache=False, freeze=True)
    model, x = chain(), torch.randn(1, 3, 6, 6)
    with torch.no_grad():
        got = torch.compile(model, backend=backend)(x)
    torch.testing.assert_close(got, model(x))
    texts = [kernel.text for report in backend.reports for kernel in report.kernels]
    once = [t for t in texts if "Transpose" in t and "Conv2D" not in t]
    every = [t for t in texts if "Conv2D" in t]
    assert once and all("perm=[2, 3, 1, 0]" not in t for t in every)


# ---- running -------------------------------------------------------------------------------------


def test_training_step_matches_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Flatten(),
        nn.Linear(8 * 9, 4),
    )  # fmt: skip
    mirror, x = copy.deepcopy(model), torch.randn(2, 3, 11, 11)
    backend = Backend("tops", cache=False)
    for net in (torch.compile(model, backend=backend), mirror):
        net(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), mirror.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(model.buffers(), mirror.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    nodes = [n for report in backend.reports for n in report.nodes]
    eager = [n for n in nodes if n.decision == "eager"]
    assert len(eager) <= 0.05 * len(nodes), eager


def test_exponential_numbers_are_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = "dicp.graphop.rules.creation.uniform_of"
    monkeypatch.setattr(zeros, lambda g, shape, dtype: g.full(shape, 0.0, dtype))
    run = torch.compile(
        lambda x: torch.empty_like(x).exponential_(), backend=Backend("tops", cache=False)
    )
    assert (run(torch.zeros(4)) > 0).all()


def test_random_numbers_follow_the_seed() -> None:
    torch._dynamo.reset()
    drop = torch.compile(lambda x: F.dropout(x, 0.25), backend=Backend("tops", cache=False))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(drop(torch.ones(64, 64)))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert abs((found[0] == 0).float().mean() - 0.25) < 0.03


def test_threads_that_run_one_graph_do_not_mix_their_tensors() -> None:
    torch._dynamo.reset()
    doubled = torch.compile(lambda x: x * 2 + 1, backend=Backend("tops", cache=False))
    doubled(f32(64, 64))

    def right(number: int) -> bool:
        x = torch.full((64, 64), float(number))
        return torch.equal(doubled(x), x * 2 + 1)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(right, range(200)))


def test_more_sizes_than_are_kept_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(executables, "MAX_SIZES", 2)
    compiled = torch.compile(
        lambda x: x.softmax(0), backend=Backend("tops", cache=False), dynamic=True
    )
    with pytest.warns(SpecializationWarning, match="of the sizes s.*shape_buckets") as warned:
        for size in (4, 5, 6, 7):
            torch.testing.assert_close(compiled(f32(size, 3)), f32(size, 3).softmax(0))
    assert len([w for w in warned if w.category is SpecializationWarning]) == 1


def test_each_size_is_compiled_once() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torch.softmax(x @ x.t(), -1), backend=Backend("tops", cache=False), dynamic=True
    )
    for size in (4, 5, 6, 4, 5):
        x = torch.randn(size, 3)
        torch.testing.assert_close(compiled(x), torch.softmax(x @ x.t(), -1))


# ---- what the simulator refuses ------------------------------------------------------------------


def module(*ops: dict[str, Any], outputs: tuple[int, ...] | None = None) -> dict[str, Any]:
    main = {"ops": list(ops), "outputs": list(outputs or (len(ops) - 1,))}
    return {"infers": True, "functions": {"main": main}}


def made(kind: str, operands: list[int], **attrs: Any) -> dict[str, Any]:
    op_type = {"op_type": OP_TYPES[kind]} if kind in OP_TYPES else {}
    return {"kind": kind, "in": operands, "attrs": attrs, "extra": op_type}


def given(dims: list[int], code: int = 1) -> dict[str, Any]:
    return made("Input", [], type=[code, dims])


CONV = {"group": 1, "auto_pad": "NOTSET", "stride": [1, 1], "pad": [0] * 4, "dilation": [1, 1]}
FAULTS = {
    "another dtype": (made("Add", [0, 1]), [given([2]), given([2], 5)], "Add.*input 'y' is int32"),
    "no such dtype": (made("Exp", [0]), [given([2], 5)], "Exp.*does not take int32"),
    "no broadcast": (made("Mul", [0, 1]), [given([2, 3]), given([3])], "Mul.*nothing is broadcast"),
    "rank of a filter": (
        made("Conv2D", [0, 1], layout="NHWC", **CONV), [given([1, 5, 5, 3]), given([3, 3])],
        "Conv2D.*a filter has 4 dimensions",
    ),
    "an NCHW convolution": (
        made("Conv2D", [0, 1], layout="NCHW", **CONV), [given([1, 3, 5, 5]), given([3, 3, 3, 4])],
        "Conv2D.*'NCHW', not 'NHWC'",
    ),
    "an NCHW image": (
        made("Conv2D", [0, 1], layout="NHWC", **CONV), [given([1, 3, 5, 5]), given([3, 3, 3, 4])],
        "Conv2D.*5 channels",
    ),
    "another attribute": (
        made("ReduceSum", [0], keepdim=0, axes=[0]), [given([2])], "ReduceSum.*'keepdim' is 0"
    ),
    "no attribute": (made("ReduceSum", [0], axes=[0]), [given([2])], "ReduceSum.*'keepdim'"),
    "an axis too many": (
        made("ReduceSum", [0], keepdim=False, axes=[2]), [given([2, 2])], "ReduceSum.*axes"
    ),
    "operands too many": (made("Exp", [0, 0]), [given([2])], "Exp.*takes 1 operands, not 2"),
    "no operator": (made("Gammaln", [0]), [given([2])], "Gammaln.*no such operator"),
    "other elements": (
        made("Reshape", [0], type=[1, [7]]), [given([2, 3])], r"Reshape.*\(2, 3\) is no \(7,\)"
    ),
    "a changing size": (
        made("Reshape", [0], type=[1, [-1]]), [given([2, 3])], "Reshape.*not static"
    ),
    "no op_type": (
        {**made("DotGeneral", [0, 0], dims=[[], [], [1], [1]]), "extra": {}}, [given([2, 2])],
        "DotGeneral.*op_type is not 'DotInference'",
    ),
    "an unknown region": (
        made("Scatter", [0, 1, 2], dims=[[], [0], [0], [1]], regions=["add_float32"]),
        [given([4]), given([2, 1], 6), given([2])], "Scatter.*'add_float32'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_refuses_and_names_the_operator(fault: str) -> None:
    wrong, operands, message = FAULTS[fault]
    with pytest.raises(Refused, match=message):
        Compiler(module(*operands, wrong), ()).compile()


def test_the_simulator_compares_types_with_those_stated() -> None:
    graph = module(given([2, 3]), made("Transpose", [0], perm=[1, 0]))
    assert Compiler(graph, ["F32[2,3]", "F32[3,2]"]).compile().kinds == ["Transpose"]
    with pytest.raises(Refused, match=r"Transpose.*F32\[3,2\], dicp states F32\[2,3\]"):
        Compiler(graph, ["F32[2,3]", "F32[2,3]"]).compile()
    with pytest.raises(Refused, match="shape inference is off"):
        Compiler({**graph, "infers": False}, ()).compile()


# ---- errors --------------------------------------------------------------------------------------


def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the simulator states another size for exponentials."""

    def wrong(operands: Any, attrs: Any) -> Any:
        return operands[0].dtype, (7,)

    monkeypatch.setitem(SHAPES, "Exp", wrong)


def test_a_refused_operator_is_named_with_the_users_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    refusing(monkeypatch)

    def model(x: Tensor) -> Tensor:
        return torch.exp(x + 1) * 2

    backend = Backend("tops", cache=False, dump=tmp_path)
    with pytest.raises(BackendCompilerFailed, match=r"refused operator op\d+ \(Exp\)") as caught:
        torch.compile(model, backend=backend)(torch.ones(3))
    assert isinstance(caught.value.inner_exception, GraphRejectedError)
    words = str(caught.value)
    assert "aten.exp" in words and "test_tops.py" in words and "float32[3] = Exp(" in words
    (log,) = tmp_path.rglob("*compiler_log.txt")
    assert "dicp states F32[3]" in log.read_text() and log.read_text().strip() in words


def test_a_refused_operator_runs_eagerly_where_that_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    refusing(monkeypatch)
    backend = Backend("tops", cache=False, rejected="eager")
    with pytest.warns(FallbackWarning, match="aten.exp"):
        got = torch.compile(lambda x: torch.exp(x + 1), backend=backend)(torch.zeros(3))
    torch.testing.assert_close(got, torch.exp(torch.ones(3)))


def test_a_missing_sdk_is_named_with_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOPS_HOME", "/nowhere/tops")
    with pytest.raises(SimulatorForbiddenError, match="/nowhere/tops/lib/libdtu_sdk.so"):
        find_toolchain(Config(runs_on="device"))
    assert find_toolchain(Config()).simulated
    checks = TopsTarget().doctor(Config(runs_on="device"))
    assert not checks[0].ok and "TopsRider" in checks[0].fix


def test_dtypes_that_the_chip_lacks_run_eagerly_and_say_so() -> None:
    target = record(lambda x: torch.relu(x), torch.ones(3, dtype=torch.bfloat16))
    (node,) = [n for r in target.reports for n in r.nodes]
    assert node.decision == "eager" and "bfloat16" in node.reason


def executable() -> tuple[Executable, TopsTarget]:
    """A graph that doubles three numbers."""
    target = Recorder()
    recorder.record(lambda x: x * 2, f32(3), dynamic=False, target=target)
    (graph,) = target.programs[0].graphs
    cache, config, real = Cache.open(Config(cache=False)), Config(runs_on="simulator"), TopsTarget()
    unit = GraphUnit("graph0", real.render_graph(graph, config), real.graph_options(graph, config))
    assert "op" in next(iter(codegen.node_names(graph).values()))
    return real.launch(unit, real._compiled(unit, cache, config), cache, config), real


def test_sizes_and_statuses_of_a_run_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulatorWarning)
        run, _ = executable()
    made_here = torch.empty(3)
    with pytest.raises(DeviceError, match="graph0: the executable takes and gives"):
        run([torch.ones(4)], [made_here])
    run([torch.ones(3)], [made_here])
    assert made_here.tolist() == [2.0, 2.0, 2.0]
    assert run.driver.simulator is not None
    run.driver.simulator.models.clear()
    with pytest.raises(DeviceError, match="topsLaunchExecutableV2") as caught:
        run([torch.ones(3)], [made_here])
    assert caught.value.status == 719 and "graph0" in str(caught.value)
    monkeypatch.setattr(run.driver, "_library", Mock(**{"dicp_unload.return_value": 1}))
    with pytest.raises(DeviceError):
        run.driver.unload(0)


def test_profiler_ranges_name_graph_operators_and_line(tmp_path: Path) -> None:
    compiled, x = torch.compile(lambda x: torch.softmax(x * 2, -1), backend="topsgraph"), f32(4, 8)
    compiled(x)
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    options = {"record_shapes": True, "with_stack": True, "experimental_config": verbose}
    with torch.profiler.profile(**options) as profile:
        compiled(x)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (found,) = [event for event in events if event.get("name", "").startswith("dicp::")]
    assert "softmax" in found["args"]["operators"] and "mul" in found["args"]["operators"], found
    assert "test_tops.py" in found["args"]["source"]
    ranges = [e for e in profile.events() if e.name.startswith("dicp::")]
    assert [event.input_shapes for event in ranges] == [[[4, 8]]]
    assert ranges[0].stack[0].endswith(": <lambda>") and "test_tops.py" in ranges[0].stack[0]
