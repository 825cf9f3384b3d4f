"""Whole models become one GE graph per direction, with their transposes in the products' flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_recorder import Recorder, record
from torch import Tensor, nn

from dicp.graphop.program import Node, Value
from dicp.testing import torchvision_operators

torchvision_operators.define()  # before anything imports torchvision

import torchvision  # noqa: E402
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM  # noqa: E402

pytestmark = pytest.mark.sweep


def bert() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = BertModel(
        BertConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                   intermediate_size=64)
    )  # fmt: skip
    return model, lambda m: m(torch.randint(0, 90, (2, 12))).last_hidden_state


def llama() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2)
    )  # fmt: skip
    return model, lambda m: m(input_ids=torch.randint(0, 90, (2, 12)), use_cache=False).logits


def resnet() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    return torchvision.models.resnet18(num_classes=4), lambda m: m(torch.randn(2, 3, 32, 32))


MODELS = {"bert": bert, "llama": llama, "resnet": resnet}


def recorded(name: str, train: bool) -> Recorder:
    model, call = MODELS[name]()
    model.train(train)
    with torch.set_grad_enabled(train):
        return record(call, model)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_per_direction(name: str, train: bool) -> None:
    target = recorded(name, train)
    assert len(target.programs) == (2 if train else 1)
    for program in target.programs:
        assert len(program.graphs) == 1
        eager = [(n.op, n.reason) for n in program.nodes if n.decision == "eager"]
        assert not eager
    assert_no_needless_transpose(target)


BATCHES = {
    "bert": lambda: torch.randint(0, 90, (3, 12)),
    "llama": lambda: torch.randint(0, 90, (3, 12)),
    "resnet": lambda: torch.randn(3, 3, 32, 32),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_per_direction_for_all_batches(name: str, train: bool) -> None:
    model = MODELS[name]()[0].train(train)
    batch = BATCHES[name]()
    torch._dynamo.mark_dynamic(batch, 0)

    def call(x: Tensor) -> Tensor:
        output = model(x) if name == "resnet" else model(input_ids=x, use_cache=False)
        return output if name == "resnet" else output[0]

    with torch.set_grad_enabled(train):
        target = record(call, batch)
    eager = {(n.op, n.reason) for p in target.programs for n in p.nodes if n.decision == "eager"}
    if name == "resnet" and train:  # GE takes the sizes of these gradients as constants
        reason = "the sizes of a convolution's gradient change from run to run"
        assert eager == {("aten.convolution_backward.default", reason)}
        assert len(target.programs) == 2 and len(target.programs[0].graphs) == 1
    else:
        assert [len(p.graphs) for p in target.programs] == [1] * (2 if train else 1)
        assert not eager
    assert any(-1 in _dims(node) for p in target.programs for node in p.graphs[0].inputs)


def _dims(node: Node) -> list[int]:
    return [s if isinstance(s, int) else -1 for s in node.outputs[0].shape]


def assert_no_needless_transpose(target: Recorder) -> None:
    for node in target.operators():
        for value in node.operands():
            if value.node.kind != "Transpose":
                continue
            assert node.kind != "Transpose", "two transposes in a row"
            if node.kind in ("MatMulV2", "BatchMatMulV2"):
                order = order_of(value.node)
                assert order != [*range(len(order) - 2), len(order) - 1, len(order) - 2]


def order_of(node: Node) -> list[Any]:
    perm = node.inputs["perm"]
    assert isinstance(perm, Value) and perm.known is not None
    return list(perm.known)


def wide_bert() -> nn.Module:
    return BertModel(
        BertConfig(vocab_size=90, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                   intermediate_size=64, attention_probs_dropout_prob=0.0)
    )  # fmt: skip


def wide_llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=90, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2)
    )  # fmt: skip


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("model", [wide_bert, wide_llama])
def test_one_fused_attention_per_layer(model: Callable[[], nn.Module], train: bool) -> None:
    # RotaryMul takes no bfloat16
    half = model is wide_llama and not train
    network = model().to(torch.float16 if half else torch.bfloat16).train(train)

    def call(m: nn.Module) -> Tensor:
        return m(torch.randint(0, 90, (2, 12)), return_dict=False)[0]

    with torch.set_grad_enabled(train):
        kinds = record(call, network).kinds()
    fused = {kind: count for kind, count in kinds.items() if "Attention" in kind}
    forward, backward = "FlashAttentionScore", "FlashAttentionScoreGrad"
    assert fused == ({forward: 2, backward: 2} if train else {"PromptFlashAttention": 2})
    assert kinds["SoftmaxV2"] == 0
    assert train or kinds["Transpose"] == 0


def test_llama_products_carry_their_transposes() -> None:
    target = recorded("llama", train=False)
    products = [n for n in target.operators() if n.kind == "MatMulV2"]
    assert products and all(n.attrs.get("transpose_x2") for n in products)
    per_layer = target.kinds()["Transpose"] / 2
    assert per_layer <= 4  # queries, keys and values to heads, and back


def test_resnet_converts_images_at_its_border_alone() -> None:
    model = resnet()[0].half().eval()  # MaxPoolV3 takes no float32
    with torch.no_grad():
        target = record(lambda m: m(torch.randn(2, 3, 32, 32).half()), model)
    conversions = [n for n in target.operators() if n.kind == "TransData"]
    images = [n for n in conversions if "FRACTAL_Z" not in n.attrs.values()]
    assert len(images) <= 2
    assert target.kinds()["Conv2D"] == 20
