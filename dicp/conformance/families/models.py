"""Families of models at tiny configurations, with inputs: what the adaptation table runs.

A family's shape keeps the ratios of the model that it is named after: heads to key-value heads, the
width of the feed-forward part to the hidden size. Two layers repeat as any number does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dicp.conformance.families.internlm2 import InternLM2, InternLM2Config
from dicp.errors import FamilyNameError, FamilyPackageError
from dicp.testing import torchvision_operators

VOCABULARY = 67
BATCH, LENGTH = 2, 12
LAYERS = 2
IMAGE_TOKEN, PATCHES = 3, 4
IMAGE = 16
"""The side of an image; the vision part cuts it into PATCHES tokens."""

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A model to build, and what goes in and is trained on.

    shape: which member of the family the ratios are of; empty if there is one alone. package: what
    has to be installed to build it.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    shape: str = ""
    package: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} {self.shape}".strip()

    def __str__(self) -> str:
        return self.title.replace(" ", "-")

    def model(self) -> nn.Module:
        """The model with random weights. Raises FamilyPackageError."""
        try:
            torchvision_operators.define()  # transformers imports torchvision where it is
            importlib.import_module(self.package or "torch")
        except ImportError as error:
            raise FamilyPackageError(self.title, self.package, str(error)) from error
        return self.build()

    def labelled(self) -> Batch:
        """A batch to train on: a third of the tokens has no label."""
        batch = self.batch()
        labels = batch["input_ids"].clone()
        labels[:, ::3] = -100
        return {**batch, "labels": labels}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


def families_named(names: Sequence[str]) -> list[Family]:
    """The families of these names, all shapes of each; all for no name. Raises FamilyNameError."""
    known = sorted({family.name for family in FAMILIES})
    for name in names:
        if name not in known:
            raise FamilyNameError(name, known)
    return [family for family in FAMILIES if not names or family.name in names]


def _transformers() -> ModuleType:
    return importlib.import_module("transformers")


def _decoder(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Builds transformers' class for causal language models of the name."""

    def build() -> nn.Module:
        library = _transformers()
        config = getattr(library, f"{name}Config")(**_DECODER, **sizes)
        model: nn.Module = getattr(library, f"{name}ForCausalLM")(config)
        return model

    return build


_DECODER = {
    "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "max_position_embeddings": 64,
    "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip


def _sizes(hidden: int, inner: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads}  # fmt: skip


def _internlm2() -> nn.Module:
    sizes = {"layers": LAYERS, "heads": 4, "kv_heads": 1}
    return InternLM2(InternLM2Config(VOCABULARY, 32, 112, **sizes))


def bert() -> nn.Module:
    """BERT with the head of its pre-training on masked tokens."""
    library = _transformers()
    config = library.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = library.BertForMaskedLM(config)
    return model


def gpt2() -> nn.Module:
    """GPT-2 with its language model head."""
    library = _transformers()
    config = library.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=LAYERS, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = library.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # unset, it logs a warning
    return model


def _internvl() -> nn.Module:
    library = _transformers()
    vision = library.InternVLVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        image_size=(IMAGE, IMAGE), patch_size=(4, 4),
    )  # fmt: skip
    text = library.Qwen2Config(**_DECODER, **_sizes(32, 88, 4, 2))
    config = library.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN,
        image_seq_length=PATCHES, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = library.InternVLForConditionalGeneration(config)
    return model


def _tokens() -> Batch:
    return {"input_ids": torch.randint(IMAGE_TOKEN + 1, VOCABULARY, (BATCH, LENGTH))}


def _padded() -> Batch:
    """Tokens whose last row is shorter, with the mask that says so."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[-1, LENGTH - 5 :] = 0
    return {**_tokens(), "attention_mask": mask}


def _pictured() -> Batch:
    """Tokens in which those of an image stand first."""
    batch = _tokens()
    batch["input_ids"][:, 1 : 1 + PATCHES] = IMAGE_TOKEN
    return {**batch, "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE)}


def _family(
    name: str, build: Callable[[], nn.Module], batch: Callable[[], Batch] = _tokens, shape: str = ""
) -> Family:
    return Family(name, build, batch, shape, "transformers")


FAMILIES: Sequence[Family] = (
    _family("llama2", _decoder("Llama", **_sizes(32, 86, 4, 4)), shape="7B"),
    _family("llama2", _decoder("Llama", **_sizes(32, 112, 8, 1)), shape="70B"),
    _family(
        "llama3", _decoder("Llama", **_sizes(32, 112, 4, 1), rope_parameters=_LLAMA3_ROPE),
        shape="8B",
    ),
    Family("internlm2", _internlm2, _tokens),
    _family("qwen2", _decoder("Qwen2", **_sizes(32, 176, 4, 2))),
    _family("qwen3", _decoder("Qwen3", **_sizes(32, 96, 4, 2), head_dim=16)),
    _family(
        "qwen3_moe",
        _decoder("Qwen3Moe", **_sizes(32, 96, 4, 2), **_EXPERTS, num_experts=4, head_dim=16),
    ),
    _family(
        "deepseek_v3",
        _decoder(
            "DeepseekV3", **_sizes(32, 80, 4, 4), **_EXPERTS, **_LATENT, n_routed_experts=8,
            n_group=2, topk_group=1, first_k_dense_replace=1,
        ),
    ),
    _family("internvl", _internvl, _pictured),
    _family("bert", bert, _padded),
    _family("gpt2", gpt2, _padded),
)  # fmt: skip
"""One dense layer and one of experts in deepseek_v3; in qwen3_moe both are of experts."""
