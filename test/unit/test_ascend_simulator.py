"""The simulator refuses what GE would, runs what it accepts, and each failure has its error."""

from __future__ import annotations

import ctypes
import math
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import (
    DeviceError,
    DeviceMemoryError,
    FallbackWarning,
    GraphRejectedError,
    ModelMismatchError,
    SimulatorForbiddenError,
    SimulatorWarning,
    ToolchainError,
)
from dicp.graphop.target import GraphUnit
from dicp.vendor.ascend import AscendTarget
from dicp.vendor.ascend import target as target_module
from dicp.vendor.ascend.prototypes import PROTOTYPES
from dicp.vendor.ascend.runtime import Driver, Model
from dicp.vendor.ascend.semantics import SEMANTICS
from dicp.vendor.ascend.simulator.compiler import _attr_value
from dicp.vendor.ascend.toolchain import compile_shared, find_toolchain, load_driver

CONFIG = Config(runs_on="simulator")

PRELUDE = """
#include "graph/graph.h"
#include "graph/operator_factory.h"
using Dims = std::vector<int64_t>;
using Operators = std::vector<ge::Operator>;
using Outputs = std::vector<std::pair<ge::Operator, std::vector<size_t>>>;
ge::TensorDesc Desc(const Dims& d, ge::DataType t, ge::Format f = ge::FORMAT_ND) {
  return ge::TensorDesc(ge::Shape(d), f, t);
}
ge::Operator Make(const char* type, const char* name = "made") {
  return ge::OperatorFactory::CreateOperator(name, type);
}
ge::Operator Of(const char* type, ge::Operator& x, const char* name = "made") {
  auto made = Make(type, name);
  made.SetInput("x", x);
  return made;
}
ge::Operator In(int64_t k, const Dims& dims, ge::DataType t, ge::Format f = ge::FORMAT_ND,
                const char* type = "Data", const char* name = "in") {
  auto data = Make(type, name);
  data.SetAttr("index", k);
  data.UpdateOutputDesc("y", Desc(dims, t, f));
  return data;
}
ge::TensorDesc Blocked(const Dims& stored) {
  ge::TensorDesc desc = Desc(stored, ge::DT_FLOAT, ge::FORMAT_NC1HWC0);
  desc.SetOriginShape(ge::Shape({1, 16, 4, 4}));
  desc.SetOriginFormat(ge::FORMAT_NCHW);
  return desc;
}
class Concat : public ge::Operator {
 public:
  Concat(uint32_t count, const ge::Operator& x) : ge::Operator(Make("ConcatD")) {
    DynamicInputRegister("x", count);
    SetInput("x", 0, x);
  }
};
void Out(ge::Graph& g, const ge::Operator& x, const ge::Operator& y) {
  g.SetInputs(Operators{x});
  g.SetOutputs(Outputs{{y, {0}}});
}
"""

FLOAT = "auto x = In(0, {2, 3}, ge::DT_FLOAT); "

IMAGE = ("auto x = In(0, {1}, ge::DT_FLOAT); "
         'x.UpdateOutputDesc("y", Blocked({1, 1, 4, 4, 16})); ')  # fmt: skip

ACCEPTED = FLOAT + 'auto y = Make("Abs"); y.SetInput("x", x); Out(g, x, y);'

PRODUCT = (
    "auto x = In(0, {3, 3}, ge::DT_FLOAT); "
    'auto y = Make("MatMulV2"); y.SetInput("x1", x); y.SetInput("x2", x); Out(g, x, y);'
)

REFERENCE = """
  auto x = In(0, {2, 3}, ge::DT_FLOAT, ge::FORMAT_ND, "RefData");
  auto late = Of("Neg", x, "late"), size = Of("Abs", x, "size");
  auto y = Make("Assign");
  y.SetInput("ref", x);
  y.SetInput("value", size);
  Out(g, x, late);
  g.SetTargets(Operators{y});
"""

WRITTEN = REFERENCE + " y.AddControlInput(late);"

POOLED = (
    "auto x = In(0, {1, 1, 32, 32}, ge::DT_FLOAT16, ge::FORMAT_FORMAT); "
    'auto y = Of("MaxPoolV3", x); y.SetAttr("ksize", Dims{1, 1, SIZE, SIZE}); '
    'y.SetAttr("strides", Dims{1, 1, 1, 1}); y.SetAttr("padding_mode", "CALCULATED"); '
    'y.SetAttr("pads", Dims{0, 0, 0, 0}); y.SetAttr("data_format", "NCHW"); Out(g, x, y);'
)

GRADIENT = (
    "auto x = In(0, {1, 1, 8, 8}, ge::DT_FLOAT, ge::FORMAT_NCHW), "
    'w = In(1, {1, 1, 1, 1}, ge::DT_FLOAT, ge::FORMAT_NCHW, "Data", "w"), '
    's = In(2, {4}, ge::DT_INDEX, ge::FORMAT_ND, "Data", "s"); '
    'auto y = Make("Conv2DBackpropInput"); y.SetInput("input_size", s); '
    'y.SetInput("filter", w); y.SetInput("out_backprop", x); '
    'y.SetAttr("strides", Dims{1, 1, 1, 1}); y.SetAttr("pads", Dims{0, 0, 0, 0}); '
    'y.SetAttr("data_format", "NCHW"); g.SetInputs(Operators{x, w, s}); '
    "g.SetOutputs(Outputs{{y, {0}}});"
)

REFUSED = {
    "operator": (FLOAT + 'auto y = Make("Absolute"); y.SetInput("x", x); Out(g, x, y);',
                 "made: there is no operator 'Absolute'"),
    "input": (FLOAT + 'auto y = Make("Abs"); y.SetInput("z", x); Out(g, x, y);',
              r"made \(Abs\): it has no input 'z'"),
    "missing input": (FLOAT + 'auto y = Make("Add"); y.SetInput("x1", x); Out(g, x, y);',
                      r"made \(Add\): input 'x2' is missing"),
    "output": (FLOAT + 'auto y = Make("Abs"); y.SetInput("x", x); auto z = Make("Neg"); '
               'z.SetInput("x", y, "values"); Out(g, x, z);',
               r"it has no output 'values'"),
    "attribute": (FLOAT + 'auto y = Make("Abs"); y.SetInput("x", x); '
                  'y.SetAttr("axes", Dims{1}); Out(g, x, y);',
                  r"made \(Abs\): it has no attribute 'axes'"),
    "attribute type": (FLOAT + 'auto y = Make("LeakyRelu"); y.SetInput("x", x); '
                       'y.SetAttr("negative_slope", int64_t{1}); Out(g, x, y);',
                       r"'negative_slope' is given as Int, the prototype says Float"),
    "missing attribute": (FLOAT + 'auto y = Make("Cast"); y.SetInput("x", x); Out(g, x, y);',
                          r"made \(Cast\): attribute 'dst_type' is missing"),
    "dtype": ("auto x = In(0, {2, 3}, ge::DT_BOOL); "
              'auto y = Make("Exp"); y.SetInput("x", x); Out(g, x, y);',
              r"made \(Exp\): input 'x' does not take bool"),
    "two dtypes": (FLOAT + 'auto h = Of("Cast", x, "half"); h.SetAttr("dst_type", '
                   'int64_t{ge::DT_FLOAT16}); auto y = Make("Add"); y.SetInput("x1", x); '
                   'y.SetInput("x2", h); Out(g, x, y);',
                   r"input 'x2' is float16, but 'x1' is float32"),
    "format": (IMAGE + 'auto y = Make("SoftmaxV2"); y.SetInput("x", x); Out(g, x, y);',
               r"made \(SoftmaxV2\): input 'x' does not take format NC1HWC0"),
    "storage": (IMAGE + 'auto y = Of("Abs", x); '
                'y.UpdateOutputDesc("y", Blocked({1, 2, 4, 4, 8})); Out(g, x, y);',
                r"made \(Abs\): NC1HWC0 of \[1, 16, 4, 4\] is stored as \[1, 1, 4, 4, 16\], not"),
    "storage's rank": (IMAGE + 'auto y = Of("Abs", x); '
                       'y.UpdateOutputDesc("y", Blocked({1, 16, 4, 4})); Out(g, x, y);',
                       r"is stored as \[1, 1, 4, 4, 16\], not as \[1, 16, 4, 4\]"),
    "shapes": (FLOAT + 'auto y = Make("MatMulV2"); y.SetInput("x1", x); y.SetInput("x2", x); '
               "Out(g, x, y);", r"made \(MatMulV2\): "),
    "dynamic inputs": (FLOAT + 'Concat y(2, x); y.SetAttr("concat_dim", int64_t{0}); '
                       "Out(g, x, y);", "declared with 2 tensors and has 1"),
    "indices": ("auto x = In(3, {2}, ge::DT_FLOAT); "
                'auto y = Make("Abs"); y.SetInput("x", x); Out(g, x, y);', "Data indices are"),
    "undescribed": ('auto x = Make("Data", "in"); auto y = Make("Abs"); '
                    'y.SetInput("x", x); Out(g, x, y);', "its output has no description"),
    "writing to an input": (FLOAT + 'auto y = Make("Assign"); y.SetInput("ref", x); '
                            'y.SetInput("value", x); Out(g, x, y);',
                            r"made \(Assign\): 'ref' is neither a RefData nor handed on"),
    "a late reader": (REFERENCE, r"made \(Assign\): late reads 'ref' and may run later"),
    "the old contents": (WRITTEN + " g.SetOutputs(Outputs{{x, {0}}, {y, {0}}});",
                         r"made \(Assign\): the graph returns 'ref' as it was"),
    "no input": (FLOAT + 'auto y = Of("Abs", x); g.SetOutputs(Outputs{{y, {0}}});',
                 "the graph has no inputs"),
    "an unreached result": (FLOAT + 'float one = 1; auto c = Make("Const", "c"); '
                            'c.SetAttr("value", ge::Tensor(Desc({1}, ge::DT_FLOAT), '
                            'reinterpret_cast<const uint8_t*>(&one), 4)); Out(g, x, Of("Abs", c));',
                            r"made \(Abs\): no path leads to it from an input"),
    "changing sizes": ('auto x = In(0, {-1, 3}, ge::DT_FLOAT); Out(g, x, Of("Abs", x));',
                       r"option input_shape lists \[''\], the inputs are \['in'\]"),
    "an image without a format": (POOLED.replace("FORMAT_FORMAT", "FORMAT_ND").replace("SIZE", "2"),
                                  r"made \(MaxPoolV3\): input 'x' is an image or a filter"),
    "a large window": (POOLED.replace("FORMAT_FORMAT", "FORMAT_NCHW").replace("SIZE", "16"),
                       r"pooling of \[1, 1, 16, 16\] .* is beyond the limits"),
    "a large step": (POOLED.replace("FORMAT_FORMAT", "FORMAT_NCHW").replace("SIZE", "2")
                     .replace("{1, 1, 1, 1}", "{1, 1, 64, 1}"), "is beyond the limits"),
    "sizes of int64": (GRADIENT.replace("INDEX", "INT64"), "'input_size' does not take int64"),
    "sizes that are data": (GRADIENT.replace("INDEX", "INT32"), "'input_size' is no constant"),
    "another axis": (FLOAT + 'auto y = Of("Sort", x); y.SetAttr("axis", int64_t{0}); '
                     "Out(g, x, y);", "it sorts along the last of 2 axes, not along 0"),
    "an empty part": (FLOAT + 'auto y = Of("SplitVD", x); y.SetAttr("size_splits", Dims{0, 3}); '
                      'y.SetAttr("split_dim", int64_t{1}); y.SetAttr("num_split", int64_t{2}); '
                      "Out(g, x, y);", r"parts of \[0, 3\]: each has an element"),
    "value": (FLOAT + 'auto c = Make("Const"); auto y = Make("Add"); y.SetInput("x1", x); '
              'y.SetInput("x2", c); Out(g, x, y);', "'value' is missing"),
}  # fmt: skip


GOOD = [ACCEPTED, PRODUCT, WRITTEN]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    cache = Cache.open(Config())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulatorWarning)
        return Driver(load_driver(find_toolchain(CONFIG), cache), simulated=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """All graphs above, as functions of one shared object."""
    bodies = [*GOOD, *(body for body, _ in REFUSED.values())]
    functions = [f'extern "C" void f{k}(ge::Graph& g) {{ {b} }}' for k, b in enumerate(bodies)]
    path = tmp_path_factory.mktemp("graphs") / "graphs.so"
    path.write_bytes(compile_shared(find_toolchain(CONFIG), PRELUDE + "\n".join(functions)))
    return ctypes.CDLL(str(path))


def build(driver: Driver, library: ctypes.CDLL, number: int) -> bytes:
    address = ctypes.cast(getattr(library, f"f{number}"), ctypes.c_void_p).value
    assert address is not None
    return driver.build(address, "graph", "must_keep_origin_dtype")


def test_a_valid_graph_is_built_loaded_and_run(driver: Driver, library: ctypes.CDLL) -> None:
    model = Model(driver, build(driver, library, 0), "Simulator", dynamic=False)
    x, y = torch.tensor([[-1.0, 2, -3], [4, -5, 6]]), torch.empty(2, 3)
    model([x], [y])
    assert torch.equal(y, x.abs())


def test_a_result_goes_over_an_input_that_nothing_needs_any_more(
    driver: Driver, library: ctypes.CDLL
) -> None:
    model = Model(driver, build(driver, library, 0), "Simulator", dynamic=False)
    x = torch.tensor([[-1.0, 2, -3], [4, -5, 6]])
    model([x], [x])
    assert torch.equal(x, x.abs()) and float(x.sum()) == 21
    product = Model(driver, build(driver, library, 1), "Simulator", dynamic=False)
    x = torch.ones(3, 3)
    with pytest.raises(DeviceError, match="output 0 goes over input 0, which made still reads"):
        product([x], [x])


def test_an_operator_writes_to_a_reference(driver: Driver, library: ctypes.CDLL) -> None:
    model = Model(driver, build(driver, library, 2), "Simulator", dynamic=False)
    x, y = torch.tensor([[-1.0, 2, -3], [4, -5, 6]]), torch.empty(2, 3)
    before = x.clone()
    model([x], [y])
    assert torch.equal(x, before.abs()) and torch.equal(y, -before)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_prototype_forbids_is_refused(
    name: str, driver: Driver, library: ctypes.CDLL
) -> None:
    number = len(GOOD) + list(REFUSED).index(name)
    with pytest.raises(GraphRejectedError, match=REFUSED[name][1]):
        build(driver, library, number)


def test_inputs_of_other_sizes_are_an_error(driver: Driver, library: ctypes.CDLL) -> None:
    model = Model(driver, build(driver, library, 0), "Simulator", dynamic=True)
    with pytest.raises(DeviceError, match=r"sizes \[3, 2\], the model takes \[2, 3\]"):
        model([torch.ones(3, 2)], [torch.empty(3, 2)])
    with pytest.raises(DeviceError, match="its buffer 4 bytes"):
        model([torch.ones(2, 3)], [torch.empty(1)])


def test_models_are_unloaded_while_another_is_built_or_loaded(
    driver: Driver, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the garbage collector does, which may begin in any line of the simulator."""
    data = build(driver, library, 0)
    handles = [driver.load(data, "Simulator") for _ in range(3)]
    assert driver.simulator is not None
    compiled = driver.simulator.compile

    def compile_(*args: Any) -> Any:
        driver.unload(handles.pop())
        return compiled(*args)

    monkeypatch.setattr(driver.simulator, "compile", compile_)

    def work() -> None:
        driver.unload(driver.load(build(driver, library, 0), "Simulator"))
        driver.unload(driver.load(data, "Simulator"))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(200)
    assert not thread.is_alive(), "it waits for itself"
    assert len(handles) == 1


def test_a_damaged_model_is_a_mismatch(driver: Driver) -> None:
    with pytest.raises(ModelMismatchError, match="built for Ascend310 and this device is Simul"):
        driver.load(b"not a model", "Ascend310")


# ---- tables --------------------------------------------------------------------------------------


def test_every_operator_has_a_meaning() -> None:
    assert SEMANTICS.kinds() == set(PROTOTYPES)


def test_meanings_take_the_prototypes_attributes_with_their_defaults() -> None:
    import inspect

    for kind in sorted(SEMANTICS.kinds()):
        function = SEMANTICS[kind].function
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            continue
        for spec in PROTOTYPES[kind].attrs:
            if spec.name in parameters and spec.default is not None:
                default = parameters[spec.name].default
                if isinstance(default, bool):
                    assert str(default).lower() == spec.default, (kind, spec)
                elif isinstance(default, int | float):
                    assert float(default) == float(spec.default.rstrip("f")), (kind, spec)


# ---- toolchain -----------------------------------------------------------------------------------


def test_a_simulator_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", "/nonexistent")
    with pytest.raises(SimulatorForbiddenError, match="no device here.*ASCEND_HOME_PATH"):
        find_toolchain(Config(runs_on="device"))


def cann(folder: Path, version: str) -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "version.cfg").write_text(f"# version\nVersion={version}\n")
    return folder


def test_an_installed_cann_is_found_and_is_part_of_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(cann(tmp_path / "cann", "8.0.RC1")))
    found = find_toolchain(Config(runs_on="device"))
    assert found.cann is not None and found.cann.version == "8.0.RC1"
    assert "CANN 8.0.RC1" in found.identity
    assert find_toolchain(CONFIG).simulated


def test_a_cann_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(cann(tmp_path / "cann", "5.1.2")))
    with pytest.raises(ToolchainError, match=r"CANN 7\.0 or newer.*holds version 5\.1\.2"):
        find_toolchain(Config(runs_on="device"))


def test_a_folder_that_tells_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include").mkdir()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="no file that tells its version"):
        find_toolchain(Config(runs_on="device"))


# ---- failures of the device ----------------------------------------------------------------------


class Failing:
    """A driver library whose functions return one status."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> Any:
            return b"Ascend910B1" if name == "dicp_soc" else self.status

        self.__dict__[name] = function
        return function


def failing(status: int) -> Driver:
    return Driver(Failing(status), simulated=False)


def test_a_device_that_does_not_open() -> None:
    with pytest.raises(DeviceError, match="aclInit failed with status 7: no message"):
        failing(7).open()


def test_a_device_without_memory() -> None:
    driver = failing(207001)
    driver._open.add(0)
    with pytest.raises(DeviceMemoryError, match="out of memory for a model's workspace"):
        driver.load(b"", "Ascend910B1")
    with pytest.raises(DeviceMemoryError, match="for a run"):
        driver.run(1, [], [], False)


class Device:
    """A driver library of a device with some memory, that says how much a model wants."""

    def __init__(self, soc: bytes, wanted: int, status: int) -> None:
        self.soc, self.wanted, self.status = soc, wanted, status

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> Any:
            if name == "dicp_soc":
                return self.soc
            if name != "dicp_load":
                return 0
            wanted = ctypes.cast(args[5], ctypes.POINTER(ctypes.c_uint64))
            wanted[0] = self.wanted
            return self.status

        self.__dict__[name] = function
        return function


def test_the_error_says_how_much_memory_was_wanted() -> None:
    driver = Driver(Device(b"Ascend910B1", 3 << 30, 207001), simulated=False)
    with pytest.raises(DeviceMemoryError, match="and weights .3221225472 bytes."):
        driver.load(b"", "Ascend910B1")


def test_a_model_of_another_chip_is_not_handed_to_the_device() -> None:
    driver = Driver(Device(b"Ascend310P3", 0, 0), simulated=False)
    with pytest.raises(ModelMismatchError, match="built for Ascend910B1 and this device is Ascend"):
        driver.load(b"", "Ascend910B1")


# ---- from torch.compile --------------------------------------------------------------------------


@pytest.fixture
def simulated() -> Iterator[dict[str, Any]]:
    torch._dynamo.reset()
    yield {"runs_on": "simulator", "cache": False}
    torch._dynamo.reset()


def test_the_simulator_warns_once(simulated: dict[str, Any], monkeypatch: Any) -> None:
    target = AscendTarget()
    monkeypatch.setattr("dicp.dynamo_bridge.backend.load_target", lambda name: target)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(2):
            torch._dynamo.reset()
            torch.compile(lambda x, k=k: x + k, backend=Backend("ascend", **simulated))(
                torch.ones(3)
            )
    assert [w.category for w in caught if w.category is SimulatorWarning] == [SimulatorWarning]
    assert target.simulated_counts()["launches"] == 2


PRECISIONS = {
    "keep": "must_keep_origin_dtype",
    "fast": "must_keep_origin_dtype",
    "half": "allow_mix_precision",
}


@pytest.mark.sweep
@pytest.mark.parametrize("precision", PRECISIONS)
def test_float32_is_kept_unless_less_is_asked_for(
    precision: str, simulated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = AscendTarget()
    monkeypatch.setattr("dicp.dynamo_bridge.backend.load_target", lambda name: target)
    backend = Backend("ascend", **simulated, precision=precision)
    torch.compile(lambda x: torch.relu(x), backend=backend)(torch.ones(3))
    (driver,) = target._drivers.values()
    assert driver.simulator is not None
    options = driver.simulator.options
    assert options["ge.exec.precision_mode"] == PRECISIONS[precision]
    assert "ge.exec.allow_hf32" not in options  # documented as reserved


@pytest.mark.parametrize("rejected", ["error", "eager"])
def test_a_refused_operator(
    rejected: str, simulated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, unit: GraphUnit, *rest: Any) -> Mapping[str, bytes]:
        called = re.search(r'Op\("(cos\d+)", "Cos"\)', unit.text)
        if called is not None:
            raise GraphRejectedError("ascend", f"[Node: {called[1]}] no kernel")
        return original(self, unit, *rest)

    original = target_module.AscendTarget.compile
    monkeypatch.setattr(target_module.AscendTarget, "compile", refuse)
    backend = Backend("ascend", **simulated, rejected=rejected)
    compiled = torch.compile(lambda x: torch.cos(torch.exp(x)) + 1, backend=backend)
    x = torch.rand(4)
    if rejected == "eager":
        with pytest.warns(FallbackWarning, match="aten.cos.default runs eagerly.*no kernel"):
            got = compiled(x)
        assert torch.allclose(got, torch.cos(torch.exp(x)) + 1)
        return
    with pytest.raises(Exception, match=r"refused operator cos\d+ \(Cos\), made from aten.cos"):
        compiled(x)


def test_a_stored_model_of_another_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored by a machine with another chip, in a cache folder that both use."""
    options = {"runs_on": "simulator", "cache_dir": tmp_path}
    fn = torch.compile(lambda x: torch.exp(x) + 3, backend=Backend("ascend", **options))
    assert torch.equal(fn(torch.zeros(2)), torch.full((2,), 4.0))
    torch._dynamo.reset()
    monkeypatch.setattr(Driver, "soc", lambda self: "Ascend910B1")
    with pytest.raises(Exception, match="built for Simulator and this device is Ascend910B1"):
        fn(torch.zeros(2))
    torch._dynamo.reset()


def test_no_device_and_no_simulator_to_compile_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    torch._dynamo.reset()
    fn = torch.compile(torch.exp, backend=Backend("ascend", runs_on="device", cache=False))
    with pytest.raises(Exception, match="no device here and runs_on='device' forbids"):
        fn(torch.ones(2))


def test_an_old_cann_runs_eagerly_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(cann(tmp_path / "cann", "6.3.RC2")))
    torch._dynamo.reset()
    options = {"runs_on": "device", "cache": False}
    fn = torch.compile(torch.exp, backend=Backend("ascend", **options))
    with pytest.raises(Exception, match=r"needs CANN 7\.0 or newer: .*holds version 6\.3"):
        fn(torch.ones(2))
    torch._dynamo.reset()
    backend = Backend("ascend", **options, on_compile_error="eager")
    with pytest.warns(FallbackWarning, match="running eagerly: target 'ascend' needs CANN"):
        got = torch.compile(torch.exp, backend=backend)(torch.ones(2))
    assert torch.equal(got, torch.exp(torch.ones(2)))


def test_several_refused_operators_each_run_eagerly(
    simulated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, unit: GraphUnit, *rest: Any) -> Mapping[str, bytes]:
        called = re.search(r'Op\("(\w+)", "(?:Cos|Sin)"\)', unit.text)
        if called is not None:
            raise GraphRejectedError("ascend", f"[Node: {called[1]}] no kernel")
        return original(self, unit, *rest)

    original = target_module.AscendTarget.compile
    monkeypatch.setattr(target_module.AscendTarget, "compile", refuse)
    backend = Backend("ascend", **simulated, rejected="eager")
    fn = torch.compile(lambda x: torch.cos(torch.exp(x)) + torch.sin(x), backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = fn(torch.ones(3))
    texts = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert len(texts) == 2
    assert "aten.cos" in texts[0] + texts[1] and "aten.sin" in texts[0] + texts[1]
    assert torch.allclose(got, torch.cos(torch.exp(torch.ones(3))) + torch.sin(torch.ones(3)))


@pytest.mark.parametrize(
    "number", [1e-5, 0.1, 0.0, -0.0, 1 / 3, 16777217.0, 3e38, math.inf, -math.inf]
)
def test_float_attributes_are_read_as_they_were_written(number: float) -> None:
    """What reaches the compiler is a float32; what was written is the shortest number beside it."""
    stored = ctypes.c_float(number).value
    read = _attr_value("Float", stored.hex())
    assert ctypes.c_float(read).value == stored
    if number in (1e-5, 0.1, 3e38):
        assert read == number != stored
