"""What is read in headers of operators, and models whose rules choose by it."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import recorder
import torch
import torch.nn.functional as F
from ascend_recorder import Recorder, record
from stand_in import acceptance, cann
from test_ascend_models import bert, llama, torchvision
from torch import Tensor

from dicp.cache import Cache
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import SimulatorWarning
from dicp.vendor.ascend import probe
from dicp.vendor.ascend.installation import Cann
from dicp.vendor.ascend.probe import (
    EVERY_OPERATOR,
    declared_operators,
    dtype_groups,
    probed,
    usable_operators,
)
from dicp.vendor.ascend.prototypes import PROTOTYPES

REDUCED_FLOATS = {torch.float16, torch.bfloat16}


def usable(text: str) -> probe.Installed:
    return usable_operators(declared_operators([text]))


# ---- declarations --------------------------------------------------------------------------------


def test_ports_of_another_name() -> None:
    text = """
        // REG_OP(Neg) is further down
        REG_OP(SwiGluGrad)
            .INPUT(grad_y, "T") .INPUT(x, "T") /* .INPUT(z, "T") */
            .OUTPUT(grad_x, "T")
            .DATATYPE(T, TensorType({DT_FLOAT, DT_BF16}))
            .ATTR(dim, Int, -1)
        .OP_END_FACTORY_REG(SwiGluGrad)
        REG_OP(Cast).INPUT(x, TensorType::ALL()).OUTPUT(y, TensorType::ALL())
            .OP_END_FACTORY_REG(Cast)
        REG_OP(Neg).INPUT(x, TensorType::NumberType()).OUTPUT(y, TensorType::NumberType())
            .OP_END_FACTORY_REG(Neg)
    """
    found = usable(text)
    assert found.kinds == {"SwiGluGrad", "Neg"}  # the Cast has no dst_type
    assert found.ports == {("SwiGluGrad", "y_grad"): "grad_y", ("SwiGluGrad", "x_grad"): "grad_x"}
    assert found.dtypes["SwiGluGrad", "y_grad"] == {torch.float32, torch.bfloat16}
    assert ("Neg", "x") not in found.dtypes


def test_dtypes_by_the_groups_of_the_header_of_types() -> None:
    groups = dtype_groups("""
        struct TensorType {
          static TensorType FloatingDataType() { return TensorType{DT_DOUBLE, DT_FLOAT}; }
          static TensorType BasicType() {
            return TensorType({DT_COMPLEX64, DT_INT8,
                               DT_BF16});
          }
        };
    """)
    (declared,) = declared_operators(["""
        REG_OP(Add)
            .INPUT(x1, ge::TensorType::FloatingDataType())
            .INPUT(x2, TensorType({BasicType(), DT_BOOL, DT_STRING, DT_FLOAT32}))
            .OUTPUT(y, TensorType::UnknownType())
            .OUTPUT(z, TensorType({DT_INT8}))
            .OP_END_FACTORY_REG(Add)
    """], groups).values()  # fmt: skip
    assert declared.dtypes == {
        "x1": {torch.float64, torch.float32},
        "x2": {torch.int8, torch.bfloat16, torch.bool, torch.float32},
        "z": {torch.int8},
    }


def test_a_dtype_is_taken_where_the_result_has_it_too() -> None:
    row = ".INPUT(x, TensorType({DT_BF16, DT_FLOAT})) .OUTPUT(y, TensorType({DT_FLOAT}))"
    found = usable(f"REG_OP(Lgamma) {row} .OP_END_FACTORY_REG(Lgamma)")
    assert found.dtypes["Lgamma", "x"] == {torch.float32}


@pytest.mark.parametrize(
    "row",
    [
        ".INPUT(x, T) .INPUT(shape, T) .OUTPUT(y, T) .ATTR(axis, Int, 0)",
        ".INPUT(x, T) .INPUT(shape, T) .OUTPUT(y, T) .ATTR(axis, ListInt, 0)"
        " .ATTR(num_axes, Int, -1)",
        ".INPUT(x, T) .DYNAMIC_INPUT(shape, T) .OUTPUT(y, T) .ATTR(axis, Int, 0)"
        " .ATTR(num_axes, Int, -1)",
        ".INPUT(x, T) .INPUT(shape, T) .INPUT(more, T) .OUTPUT(y, T) .ATTR(axis, Int, 0)"
        " .ATTR(num_axes, Int, -1)",
        ".INPUT(x, T) .INPUT(shape, T) .OUTPUT(y, T) .ATTR(axis, Int, 0) .ATTR(num_axes, Int, -1)"
        " .REQUIRED_ATTR(more, Int)",
    ],
    ids=["attribute missing", "its type", "its number", "input more", "attribute more"],
)  # fmt: skip
def test_operators_of_another_form_are_not_used(row: str) -> None:
    right = (".INPUT(x, T) .OPTIONAL_INPUT(shape, T) .OPTIONAL_INPUT(more, T) .OUTPUT(y, T)"
             " .ATTR(axis, Int, 0) .ATTR(num_axes, Int, -1) .ATTR(more, Int, 1)")  # fmt: skip
    assert usable(f"REG_OP(Reshape) {right} .OP_END_FACTORY_REG(Reshape)").kinds == {"Reshape"}
    assert not usable(f"REG_OP(Reshape) {row} .OP_END_FACTORY_REG(Reshape)").kinds


def test_an_operator_that_writes_to_nothing_is_none_that_writes() -> None:
    """One public source has ScatterElementsV2 with a result of its own."""
    row = ".INPUT(data, T) .INPUT(indices, T) .INPUT(updates, T) .OUTPUT(y, T)"
    attrs = '.ATTR(axis, Int, 0) .ATTR(reduction, String, "none")'
    assert not usable(f"REG_OP(ScatterElementsV2) {row} {attrs} .OP_END_FACTORY_REG(X)").kinds


# ---- an installation -----------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [False, True], ids=["by family", "merged"])
@pytest.mark.parametrize("header_set", cann.SETS)
def test_an_installation_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header_set: str, merged: bool
) -> None:
    root = cann.install(tmp_path / "cann", header_set, tmp_path, merged=merged)
    found = probed(Cann(root, "8.2"), Cache(tmp_path / "cache", 1 << 20))
    assert found.kinds == set(PROTOTYPES) & cann.operators(header_set).keys()
    assert found.dtypes["FlashAttentionScore", "query"] == REDUCED_FLOATS
    reads: list[Any] = []
    read = probe.declared_operators
    monkeypatch.setattr(probe, "declared_operators", lambda *a: reads.append(a) or read(*a))
    again = Cache(tmp_path / "cache", 1 << 20)
    assert probed(Cann(root, "8.2"), again) == found and not reads
    header = next(h for h in Cann(root, "").headers if "REG_OP(RealDiv)" in h.read_text())
    header.write_text(header.read_text().replace("REG_OP(RealDiv)", "REG_OP(Other)"))
    os.utime(header, ns=(1, 1))
    assert probed(Cann(root, "8.2"), again).kinds == found.kinds - {"RealDiv"} and reads


def test_merged_headers_count_before_those_they_replace(tmp_path: Path) -> None:
    root = cann.install(tmp_path / "cann", "2023", tmp_path, merged=True)
    old = root / "opp" / "built-in" / "op_proto" / "inc"
    old.mkdir(parents=True)
    (old / "elewise_calculation_ops.h").write_text("REG_OP(Neg) .OP_END_FACTORY_REG(Neg)")
    assert "Neg" in probed(Cann(root, ""), Cache(tmp_path / "cache", 1 << 20)).kinds


ALWAYS_GIVEN = {"inner_precise", "num_key_value_heads"}
"""Attributes whose defaults differ between sets; test_ascend_facts holds that they are given."""


@pytest.mark.parametrize("header_set", cann.SETS)
def test_whatever_rules_may_build_of_usable_operators_is_accepted(header_set: str) -> None:
    """In all dtypes that the prototypes and the probe allow, and with attributes left out."""
    declared, installed = acceptance.header_sets_once()[header_set]
    for kind in installed.kinds:
        prototype, operator = PROTOTYPES[kind], declared[kind]
        for port in (*prototype.inputs, *prototype.outputs):
            name = installed.ports.get((kind, port.name), port.name)
            rows = operator.outputs if port in prototype.outputs else operator.inputs
            listed = next((rows[name + mark] for mark in ("", "?", "*") if name + mark in rows), ())
            leader = prototype.input(port.same_as) if port.same_as else port
            assert leader is not None
            taken = leader.dtypes & installed.dtypes.get((kind, leader.name), leader.dtypes)
            assert not listed or taken <= {cann.DTYPES.get(d) for d in listed}, (kind, name)
        for attr in prototype.attrs:
            _, default = operator.attrs[attr.name]
            given = attr.default is None or attr.name in ALWAYS_GIVEN
            assert given or default is not None, (kind, attr.name)
            assert given or acceptance.plain(attr.default or "") == acceptance.plain(default or "")


# ---- what rules choose ---------------------------------------------------------------------------


def of_set(header_set: str) -> probe.Installed:
    return acceptance.header_sets_once()[header_set][1]


def refused(target: Recorder, header_set: str) -> list[str]:
    """What a set refuses in the sources recorded for it, and what runs eagerly."""
    declared, installed = acceptance.header_sets_once()[header_set]
    graphs = [graph for program in target.programs for graph in program.graphs]
    found = [
        why
        for graph, source in zip(graphs, target.sources(), strict=True)
        for _, why in acceptance.refusals(graph, source, declared, installed.ports)
    ]
    nodes = [node for program in target.programs for node in program.nodes]
    return found + [f"{n.op} is eager: {n.reason}" for n in nodes if n.decision == "eager"]


def resnet() -> tuple[torch.nn.Module, Any]:
    return torchvision.models.resnet50(num_classes=4), lambda m: m(torch.randn(2, 3, 32, 32))


@pytest.mark.sweep
@pytest.mark.parametrize("header_set", cann.SETS)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("model", [bert, llama, resnet])
def test_models_are_whole_with_each_set(model: Any, train: bool, header_set: str) -> None:
    module, call = model()
    module.train(train)
    with torch.set_grad_enabled(train):
        target = record(call, module, operators=of_set(header_set))
    assert [len(program.graphs) for program in target.programs] == [1] * (1 + train)
    assert not refused(target, header_set)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_attention_without_documented_masks_is_composed(dtype: torch.dtype, train: bool) -> None:
    """In 2023 the fused operators take masks of 16 bits alone."""
    q = torch.ones(1, 2, 16, 16, dtype=dtype, requires_grad=train)

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    target = record(attend, q, operators=of_set("2023"))
    assert not refused(target, "2023")
    assert not any("Attention" in kind for kind in target.kinds())
    target = record(attend, q, operators=of_set("2025"))
    assert not refused(target, "2025")
    assert any("Attention" in kind for kind in target.kinds())


MISSING_IN_2023: dict[str, tuple[Any, tuple[int, ...]]] = {
    "BatchNormV3": (lambda x: F.batch_norm(x, None, None, training=True), (2, 4, 3, 3)),
    "GeluV2": (F.gelu, (4, 8)),
    "LayerNormV4": (lambda x: F.layer_norm(x, (8,)), (4, 8)),
    "RmsNorm": (lambda x: F.rms_norm(x, (8,), x[0]), (4, 8)),
    "AddRmsNorm": (lambda x: F.rms_norm(x + x.sin(), (8,), x[0]), (4, 8)),
    "AddLayerNorm": (lambda x: F.layer_norm(x + x.sin(), (8,), x[0], x[1]), (4, 8)),
    "SwiGlu": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (4, 8)),
    "ScatterElementsV2": (
        lambda x: x.index_copy_(0, torch.arange(2), x.new_ones(2, 8)).sum(),
        (4, 8),
    ),
    "Digamma": (torch.digamma, (4, 8)),
    "Lgamma": (torch.lgamma, (4, 8)),
    "AdaptiveAvgPool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), (1, 2, 4, 4, 4)),
}
"""By operator that the facts name: what needs it, forward and backward, and on what sizes."""
WITHOUT_GRADIENT = {"AddRmsNorm", "Digamma", "RmsNorm", "ScatterElementsV2"}
"""No set has an operator for polygamma; training's norm is decomposed; the last one writes to its
input."""


@pytest.mark.parametrize("kind", MISSING_IN_2023)
def test_older_operators_are_composed(kind: str) -> None:
    fn, shape = MISSING_IN_2023[kind]
    x = torch.rand(shape, requires_grad=kind not in WITHOUT_GRADIENT)
    target = record(fn, x, operators=of_set("2023"))
    assert target.kinds() and not refused(target, "2023")
    assert kind not in PROTOTYPES or record(fn, x, operators=EVERY_OPERATOR).kinds()[kind]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fn", [torch.lgamma, torch.digamma])
def test_composed_gamma_functions(
    fn: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(cann.install(tmp_path / "c", "2023", tmp_path)))
    special = [1, 2, 0.0, -0.0, -1, -7, 1e-30, -1e-30, 3e38, -1e30, math.inf, -math.inf, math.nan]
    x = torch.cat([torch.linspace(-9.9, 40, 999), torch.tensor([1 + 1e-6, 2 - 1e-6, *special])])
    x = x.to(dtype)
    torch._dynamo.reset()
    backend = Backend("ascend", runs_on="auto", fallback="error", cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulatorWarning)
        mine = torch.compile(fn, backend=backend)(x)
    eager, exact = fn(x), fn(x.double())
    assert not mine[exact == 0].any()
    finite = exact.isfinite() & eager.isfinite()
    assert torch.equal(mine[~finite].nan_to_num(7.0), eager[~finite].nan_to_num(7.0))
    floor = torch.finfo(dtype).eps * exact.abs() + 1e-7
    off, allowed = ((y.double() - exact).abs() / floor for y in (mine, eager))
    assert off[finite].max() <= 2 * allowed[finite].max()


class Asking(Recorder):
    """Keeps what rules ask of the installation."""

    def __init__(self, operators: probe.Installed) -> None:
        super().__init__(operators)
        self.questions = acceptance.Questions()

    def make_builder(self, fake_mode: Any, config: Any) -> acceptance.Asked:
        return acceptance.Asked(fake_mode, self._operators, self.questions)


@pytest.mark.parametrize(
    ("fn", "differ"),
    [
        (lambda x: x.softmax(-1), set()),
        (lambda x: F.rms_norm(x, (8,), x[0]), {"2023"}),
        (F.gelu, {"2023", "2025"}),
    ],
    ids=["softmax", "rms_norm", "gelu"],
)  # fmt: skip
def test_installations_that_answer_alike_are_lowered_for_once(fn: Any, differ: set[str]) -> None:
    """`make acceptance` relies on it."""
    every, x = Asking(EVERY_OPERATOR), torch.ones(4, 8)
    recorder.record(fn, x, target=every)
    assert every.questions.answers
    for header_set in cann.SETS:
        one = Asking(of_set(header_set))
        recorder.record(fn, x, target=one)
        same = every.questions.same_of(of_set(header_set))
        assert same == (one.sources() == every.sources()) == (header_set not in differ)


def test_what_a_set_does_not_declare_is_found() -> None:
    target = record(lambda x, w: F.rms_norm(x, (8,), w), torch.ones(2, 8), torch.ones(8))
    assert "there is no RmsNorm" in refused(target, "2023") and not refused(target, "2025")
