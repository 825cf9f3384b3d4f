"""The measured models: real model code, random weights, a step of 10 to 300 ms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.model import Batch, Model, itself, random_classes, random_values
from benchmarks.options import chosen
from dicp.testing import torchvision_operators

torchvision_operators.define()

import diffusers  # noqa: E402
import torchvision  # noqa: E402
import transformers as hf  # noqa: E402

VOCABULARY = 8192
CLASSES = 100


def _logits(output: Any) -> Tensor:
    return output.logits


def _hidden(output: Any) -> Tensor:
    return output.last_hidden_state


def _sample(output: Any) -> Tensor:
    return output.sample


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def _images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size)


def bert(layers: int = 4) -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        intermediate_size=2048,
    )
    return hf.BertModel(config, add_pooling_layer=False)


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=384, n_layer=4, n_head=6, n_positions=256, use_cache=False
    )
    return hf.GPT2LMHeadModel(config)


def llama(layers: int = 4) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=384,
        d_kv=64,
        d_ff=1024,
        num_layers=3,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        use_cache=False,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    return hf.MixtralForCausalLM(config)


def qwen3_moe() -> nn.Module:
    config = hf.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return hf.Qwen3MoeForCausalLM(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        image_size=128,
        num_labels=CLASSES,
    )
    return hf.ViTForImageClassification(config)


def convnext() -> nn.Module:
    config = hf.ConvNextConfig(
        hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 4, 2], num_labels=CLASSES
    )
    return hf.ConvNextForImageClassification(config)


def swin() -> nn.Module:
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=64,
        depths=[2, 2, 4],
        num_heads=[2, 4, 8],
        window_size=[7, 7],
        num_classes=CLASSES,
        stochastic_depth_prob=0.0,
    )


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_source_positions=200,
        max_target_positions=64,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )
    return hf.WhisperForConditionalGeneration(config)


def wav2vec2() -> nn.Module:
    config = hf.Wav2Vec2Config(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=1024,
        conv_dim=(128,) * 7,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    return hf.Wav2Vec2Model(config)


def unet() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(64, 128, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=256,
        attention_head_dim=4,
    )


def unet_batch() -> Batch:
    return {
        "sample": torch.randn(1, 4, 32, 32),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 77, 256),
    }


def whisper_batch() -> Batch:
    return {"input_features": torch.randn(1, 80, 400), "decoder_input_ids": _tokens(1, 48)}


def t5_batch() -> Batch:
    return {"input_ids": _tokens(2, 96), "decoder_input_ids": _tokens(2, 64)}


MODELS = (
    Model(
        "bert",
        "language, encoder",
        bert,
        lambda: {"input_ids": _tokens(4, 128)},
        _hidden,
        random_values,
    ),
    Model(
        "gpt2",
        "language, decoder",
        gpt2,
        lambda: {"input_ids": _tokens(2, 128)},
        _logits,
        random_classes,
    ),
    Model(
        "llama",
        "language, decoder",
        llama,
        lambda: {"input_ids": _tokens(2, 128)},
        _logits,
        random_classes,
    ),
    Model("t5", "language, encoder-decoder", t5, t5_batch, _logits, random_classes),
    Model(
        "mixtral",
        "language, mixture of experts",
        mixtral,
        lambda: {"input_ids": _tokens(2, 64)},
        _logits,
        random_classes,
    ),
    Model(
        "qwen3_moe",
        "language, mixture of experts",
        qwen3_moe,
        lambda: {"input_ids": _tokens(2, 64)},
        _logits,
        random_classes,
    ),
    Model(
        "resnet50",
        "vision, convolution",
        lambda: torchvision.models.resnet50(num_classes=CLASSES, zero_init_residual=True),
        lambda: {"x": _images(4, 128)},
        itself,
        random_classes,
    ),
    Model(
        "mobilenet_v3",
        "vision, depthwise convolution",
        lambda: torchvision.models.mobilenet_v3_large(num_classes=CLASSES, dropout=0.0),
        lambda: {"x": _images(4, 128)},
        itself,
        random_classes,
    ),
    Model(
        "convnext",
        "vision, depthwise convolution",
        convnext,
        lambda: {"pixel_values": _images(2, 128)},
        _logits,
        random_classes,
    ),
    Model(
        "vit",
        "vision, transformer",
        vit,
        lambda: {"pixel_values": _images(4, 128)},
        _logits,
        random_classes,
    ),
    Model(
        "swin",
        "vision, windowed transformer",
        swin,
        lambda: {"x": _images(2, 112)},
        itself,
        random_classes,
    ),
    Model("whisper", "audio, encoder-decoder", whisper, whisper_batch, _logits, random_classes),
    Model(
        "wav2vec2",
        "audio, encoder",
        wav2vec2,
        lambda: {"input_values": torch.randn(1, 16000)},
        _hidden,
        random_values,
    ),
    Model("unet", "diffusion", unet, unet_batch, _sample, random_values),
)


def find(names: tuple[str, ...]) -> list[Model]:
    """The named models in the order of the table, all without names; OptionError on a wrong one."""
    return chosen("models", MODELS, names)
