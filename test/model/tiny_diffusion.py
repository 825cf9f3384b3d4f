"""The models of Stable Diffusion with tiny sizes and random weights."""

from __future__ import annotations

from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

PROMPT_TOKENS, PROMPT_WIDTH = 16, 32
"""Length and width of an encoded prompt of `text_encoder`, which `unet` takes."""


def text_encoder() -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=99,
            hidden_size=PROMPT_WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=PROMPT_TOKENS,
            bos_token_id=0,
            eos_token_id=98,
        )
    )


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel  # takes seconds

    return UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=PROMPT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    )
