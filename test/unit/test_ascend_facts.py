"""What public headers and documents of CANN demand of single operators, held in what is generated.

The simulator refuses what breaks these rules; here is what conversion makes instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ascend_recorder import Recorder, record
from stand_in import cann
from torch import Tensor

from dicp.config import Config
from dicp.errors import CompilerError
from dicp.graphop.prototype import Port, Prototype
from dicp.vendor.ascend.formats import IMAGES
from dicp.vendor.ascend.prototypes import PROTOTYPES
from dicp.vendor.ascend.toolchain import compile_shared, find_toolchain

HALF = torch.bfloat16

# ---- tables --------------------------------------------------------------------------------------


def listed(kind: str, side: str, port: Port) -> set[torch.dtype]:
    """The dtypes that any header set lists for a port; empty where none does."""
    found: set[torch.dtype] = set()
    for header_set in cann.SETS:
        operator = cann.operators(header_set).get(kind)
        rows = {} if operator is None else getattr(operator, side)
        marked = (port.name, f"{port.name}?", f"{port.name}*")
        names = next((rows[name] for name in marked if name in rows), ())
        found |= {cann.DTYPES[name] for name in names if name in cann.DTYPES}
    return found


@pytest.mark.parametrize("kind", sorted(PROTOTYPES))
def test_dtypes_are_listed_by_a_header_set(kind: str) -> None:
    prototype = PROTOTYPES[kind]
    for side in ("inputs", "outputs"):
        for port in getattr(prototype, side):
            known = listed(kind, side, port)
            taken = _of(prototype, port)
            assert not known or taken <= known, (port.name, taken - known)


def _of(prototype: Prototype, port: Port) -> frozenset[torch.dtype]:
    leader = prototype.input(port.same_as) if port.same_as else port
    assert leader is not None
    return leader.dtypes


@pytest.mark.parametrize(
    ("kind", "port", "dtype"),
    [
        ("Cummin", "indices", torch.int32),
        ("Cummax", "indices", torch.int32),
        ("Conv2DBackpropFilter", "y", torch.float32),
        ("Conv3DBackpropFilter", "y", torch.float32),
        ("Conv2DBackpropFilter", "filter_size", torch.int32),
        ("Conv2DBackpropInput", "input_size", torch.int32),
        ("AvgPoolV2Grad", "orig_input_shape", torch.int32),
        ("CumulativeLogsumexp", "axis", torch.int32),
        ("LayerNormV4", "normalized_shape", torch.int32),
    ],
)
def test_dtypes_that_are_given(kind: str, port: str, dtype: torch.dtype) -> None:
    prototype = PROTOTYPES[kind]
    (found,) = (p for p in (*prototype.inputs, *prototype.outputs) if p.name == port)
    assert found.dtypes == {dtype}


@pytest.mark.parametrize("kind", ["TensorScatterAdd", "AdaptiveAvgPool3d", "AdaptiveAvgPool3dGrad"])
def test_operators_that_are_experimental_or_in_no_public_header(kind: str) -> None:
    assert kind not in PROTOTYPES


# ---- conversions ---------------------------------------------------------------------------------


def f32(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=grad)


IMAGE = (1, 2, 80, 80)
INDEX = torch.tensor([0, 2])
CASES: dict[str, tuple[Callable[..., Any], list[Any], str, str]] = {
    "indices are cast": (lambda x: x.cummax(0), [f32(4, 3)], "Cummax Cast", ""),
    "sort along the last axis": (lambda x: x.sort(0), [f32(4, 3)], "Sort Transpose", ""),
    "a window within the limits": (
        lambda x: F.max_pool2d(x, 15), [f32(*IMAGE, dtype=torch.float16)], "MaxPoolV3", ""
    ),
    "a large window": (
        lambda x: F.max_pool2d(x, 16), [f32(*IMAGE, dtype=torch.float16)], "", "MaxPoolV3"
    ),
    "a large stride": (
        lambda x: F.max_pool2d(x, 2, 64), [f32(*IMAGE, dtype=torch.float16)], "", "MaxPoolV3"
    ),
    "a divisor within the limits": (
        lambda x: F.avg_pool2d(x, 2, divisor_override=255), [f32(*IMAGE)], "AvgPoolV2", ""
    ),
    "a large divisor": (
        lambda x: F.avg_pool2d(x, 2, divisor_override=256), [f32(*IMAGE)], "", "AvgPoolV2"
    ),
    "a transposed convolution": (
        lambda x, w: F.conv_transpose2d(x, w), [f32(*IMAGE, dtype=torch.float16),
        f32(2, 2, 3, 3, dtype=torch.float16)], "Conv2DTranspose", "",
    ),
    "a dilated transposed convolution": (
        lambda x, w: F.conv_transpose2d(x, w, dilation=2), [f32(*IMAGE, dtype=torch.float16),
        f32(2, 2, 3, 3, dtype=torch.float16)], "", "Conv2DTranspose",
    ),
    "parts": (lambda x: [p + 1 for p in x.split([1, 3])], [f32(4, 3)], "SplitVD", ""),
    "an empty part": (lambda x: [p + 1 for p in x.split([0, 4])], [f32(4, 3)], "", "SplitVD"),
    "batch norm in training": (
        lambda x: F.batch_norm(x, f32(2), f32(2), training=True), [f32(*IMAGE)], "BatchNormV3", ""
    ),
    "batch norm in inference": (
        lambda x: F.batch_norm(x, f32(2), f32(2)), [f32(*IMAGE)], "BNInfer", "BatchNormV3"
    ),
    "scatter_add": (
        lambda x, y: x.scatter_add(0, INDEX[:, None], y), [f32(3, 1), f32(2, 1)],
        "ScatterElements", "TensorScatterAdd",
    ),
    "accumulation": (
        lambda x, y: x.index_put((INDEX,), y, accumulate=True), [f32(3, 4), f32(2, 4)],
        "ScatterElements", "TensorScatterAdd",
    ),
    "accumulation at pairs": (
        lambda x, y: x.index_put((INDEX, INDEX), y, accumulate=True), [f32(3, 4), f32(2)],
        "ScatterElements", "TensorScatterAdd",
    ),
    "a bias of 16 bits": (
        lambda x, w, b: F.conv2d(x, w, b), [f32(*IMAGE, dtype=HALF), f32(2, 2, 3, 3, dtype=HALF),
        f32(2, dtype=HALF)], "Conv2D Add", "",
    ),
    "gradients of 16-bit filters": (
        lambda x, w: F.conv2d(x, w), [f32(*IMAGE, dtype=HALF), f32(2, 2, 3, 3, dtype=HALF,
        grad=True)], "Conv2DBackpropFilter Cast", "",
    ),
    "volumes": (lambda x: F.adaptive_avg_pool3d(x, 2), [f32(1, 2, 4, 4, 4)], "ReduceSum", ""),
}  # fmt: skip


def recorded(name: str) -> Recorder:
    fn, inputs, *_ = CASES[name]
    return record(fn, *inputs)


@pytest.mark.parametrize("name", CASES)
def test_what_conversion_makes(name: str) -> None:
    *_, wanted, unwanted = CASES[name]
    kinds = recorded(name).kinds()
    assert all(kinds[kind] for kind in wanted.split()), kinds
    assert not any(kinds[kind] for kind in unwanted.split()), kinds


def test_convolutions_take_images_with_formats_and_sizes_as_constants() -> None:
    x, w = f32(1, 2, 8, 8, grad=True), f32(2, 2, 3, 3, grad=True)
    forward, backward = record(F.conv2d, x, w, layout=False).sources()
    assert len(re.findall(r'Input\("Data", .*ge::FORMAT_NCHW\)\);', forward)) == 2
    sizes = re.findall(r'\.In\("(?:input|filter)_size", (\w+)\)', backward)
    assert sizes and all(f"auto {name} = Constant<int32_t>" in backward for name in sizes)
    (plain,) = record(lambda x: x + 1, f32(1, 2, 8, 8)).sources()
    assert "FORMAT" not in plain[plain.index("Input(") :].split("Input(")[-1]


PICTURES: dict[str, tuple[Callable[..., Any], str, tuple[int, ...], int]] = {
    "a pooling": (lambda x: F.max_pool2d(x, 2), "NCHW", (1, 2, 8, 8), 1),
    "an average": (lambda x: F.avg_pool2d(x, 2), "NCHW", (1, 2, 8, 8), 1),
    "an adaptive average": (lambda x: F.adaptive_avg_pool2d(x, 3), "NCHW", (1, 2, 8, 8), 1),
    "a norm in inference": (
        lambda x: F.batch_norm(x, x[0, :, 0, 0], x[0, :, 0, 0]), "NCHW", (1, 2, 8, 8), 1
    ),
    "a norm in training": (
        lambda x: F.batch_norm(x, None, None, training=True), "NCHW", (2, 2, 8, 8), 1
    ),
    "a volume": (lambda x: F.conv3d(x, x), "NCDHW", (1, 1, 3, 3, 3), 1),
}  # fmt: skip
"""What is made of images, the format and the sizes of these, and how many there are."""


@pytest.mark.parametrize("name", PICTURES)
def test_images_are_declared_with_their_format(name: str) -> None:
    fn, fmt, shape, count = PICTURES[name]
    (source,) = record(fn, f32(*shape, dtype=torch.float16), layout=False).sources()
    formats = re.findall(r'Input\("Data", .*ge::FORMAT_(\w+)\)\);', source)
    assert formats == [fmt] * count


def test_formats_of_all_that_work_on_images() -> None:
    """The simulator refuses plain data at each of these."""
    assert {k for k in PROTOTYPES if re.search(r"Conv|Pool|^BN|BatchNorm", k)} == IMAGES.keys()
    for kind, ports in IMAGES.items():
        prototype = PROTOTYPES[kind]
        images = {p.name for p in (*prototype.inputs, *prototype.outputs)}
        assert set(ports) <= images and {"x", "y", "dx", "filter"} & images <= set(ports), kind


def test_unlisted_dtypes_are_eager_with_the_reason_or_cast() -> None:
    target = record(lambda x: F.hardswish(x), f32(4, dtype=torch.float64))
    eager = [n.reason for p in target.programs for n in p.nodes if n.decision == "eager"]
    assert not target.kinds()["HardSwish"] and all("float64" in reason for reason in eager)
    assert record(lambda x, y: x & y, f32(4).bool(), f32(4).bool()).kinds()["LogicalAnd"]
    kinds = record(lambda c, x: torch.where(c, x, ~x), f32(4).bool(), f32(4).bool()).kinds()
    assert kinds["SelectV2"] and kinds["Cast"]
    kinds = record(lambda x: torch.cat([x, x * 2]), f32(4, dtype=torch.float64)).kinds()
    assert kinds["ConcatD"] and kinds["Bitcast"]
    kinds = record(lambda x: x.roll(1, 0), f32(4, 3, dtype=torch.int16)).kinds()
    assert kinds["Roll"] and kinds["Cast"] == 2


@pytest.mark.parametrize(
    ("rows", "grad", "given"),
    [(4, False, "num_key_value_heads"), (1, False, "num_key_value_heads"),
     (4, True, "inner_precise")],
    ids=["PromptFlashAttention", "IncreFlashAttention", "FlashAttentionScore"],
)  # fmt: skip
def test_attention_leaves_nothing_to_what_headers_disagree_about(
    rows: int, grad: bool, given: str
) -> None:
    """padding_mask became pse_shift, and the defaults of two attributes changed."""
    q, k = (f32(1, 2, n, 16, dtype=HALF, grad=grad) for n in (rows, 4))
    target = record(F.scaled_dot_product_attention, q, k, k)
    fused = [op for op in target.operators() if "FlashAttention" in op.kind]
    assert len(fused) == 1 + grad
    for op in fused:
        assert given in op.attrs
        assert not {"padding_mask", "pse_shift", "real_shift"} & {
            port for port, value in op.inputs.items() if value is not None
        }
    for source in target.sources():
        assert f'("{given}", ' in source and "padding_mask" not in source


# ---- the public interface ------------------------------------------------------------------------

OVERLOADS: dict[str, tuple[str, ...]] = {
    "Graph& Graph::SetInputs": ("V<Operator>",),
    "Graph& Graph::SetOutputs": (
        "V<Operator>", "V<P<Operator, std::vector<size_t>>>", "V<P<Operator, std::string>>",
        "V<P<Operator, AscendString>>",
    ),
    "Graph& Graph::SetTargets": ("V<Operator>",),
    "Operator& Operator::SetInput": (
        "N, const Operator&", "N, const Operator&, N", "N, const Operator&, uint32_t",
        "uint32_t, const Operator&, uint32_t", "N, const OutHandler&",
    ),
    "Operator& Operator::AddControlInput": ("const Operator&",),
    "graphStatus Operator::UpdateInputDesc": ("N, const TensorDesc&",),
    "graphStatus Operator::UpdateOutputDesc": ("N, const TensorDesc&",),
    "Operator& Operator::SetAttr": (
        "N, int64_t", "N, int32_t", "N, uint32_t", "N, float", "N, bool", "N, V<int64_t>",
        "N, V<int32_t>", "N, V<uint32_t>", "N, V<float>", "N, V<bool>", "N, V<uint8_t>",
        "N, std::initializer_list<int64_t>&&", "N, const Tensor&", "N, V<Tensor>",
        "N, V<std::vector<int64_t>>", "N, V<DataType>", "N, const DataType&",
        "N, const NamedAttrs&", "N, V<NamedAttrs>", "N, AttrValue&&",
    ),
}  # fmt: skip
"""The parameters that public headers of CANN give functions which generated graphs may call, as V a
constant vector, P a pair, N a name: there is one overload with strings, one with characters."""


def test_every_overload_is_declared() -> None:
    lines = [
        "using namespace ge;",
        "template <class T> using V = const std::vector<T>&;",
        "template <class T, class U> using P = std::pair<T, U>;",
    ]
    for function, overloads in OVERLOADS.items():
        result, name = function.split(" ")
        owner = name.partition("::")[0]
        for parameters in overloads:
            for spelled in ("const char*", "const std::string&") if "N" in parameters else ("",):
                given = re.sub(r"\bN\b", spelled, parameters)
                type_ = f"{result} ({owner}::*)({given})"
                lines.append(f"auto f{len(lines)} = static_cast<{type_}>(&{name});")
    tools = find_toolchain(Config(runs_on="simulator"))
    assert compile_shared(tools, '#include "graph/graph.h"\n' + "\n".join(lines))


BODIES = {
    "outputs of no type": ("graph.SetOutputs({{x, {0}}});", "ambiguous"),
    "an input of no type": ('x.SetInput("x", {});', "ambiguous"),
    "an indexed input from outside": ('x.SetInput("x", 0, x);', "protected|private|no match"),
    "a registration from outside": ('x.DynamicInputRegister("x", 2);', "protected"),
    "a temporary": ("graph.SetInputs(Operators{x}).NoSuchCall();", "NoSuchCall"),
}


@pytest.mark.parametrize("name", BODIES)
def test_headers_refuse_what_ge_refuses(name: str) -> None:
    body, message = BODIES[name]
    source = (
        '#include "graph/graph.h"\n#include "graph/operator_factory.h"\n'
        "using Operators = std::vector<ge::Operator>;\n"
        'extern "C" void define(ge::Graph& graph) {\n'
        '  auto x = ge::OperatorFactory::CreateOperator("x", "Data");\n'
    )
    tools = find_toolchain(Config(runs_on="simulator"))
    assert compile_shared(tools, source + "graph.SetInputs(Operators{x});}")
    with pytest.raises(CompilerError, match=message):
        compile_shared(tools, f"{source}  {body}\n}}")
