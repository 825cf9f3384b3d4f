"""Stable Diffusion: the text encoder and one denoising step of the UNet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPTextModel

from .tiny_diffusion import PROMPT_TOKENS, PROMPT_WIDTH, text_encoder, unet


class DenoisingStep(nn.Module):
    """Encode a prompt and predict the noise of one latent, as one graph."""

    def __init__(self, encoder: nn.Module, unet: nn.Module) -> None:
        super().__init__()
        self.encoder, self.unet = encoder, unet

    def forward(self, ids: torch.Tensor, latent: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        text = self.encoder(input_ids=ids).last_hidden_state
        return self.unet(latent, time, encoder_hidden_states=text).sample


def step_inputs(batch: int, size: int, tokens: int, vocabulary: int) -> dict[str, Any]:
    return {
        "ids": torch.randint(0, vocabulary, (batch, tokens)),
        "latent": torch.randn(batch, 4, size, size),
        "time": torch.full((batch,), 500, dtype=torch.int64),
    }


@pytest.mark.sweep
def test_denoising_step(against_eager):
    model = DenoisingStep(text_encoder(), unet())
    against_eager.inference(
        model, step_inputs(2, 16, PROMPT_TOKENS, 99), step_inputs(3, 16, PROMPT_TOKENS, 99)
    )


@pytest.mark.sweep
def test_unet_training(against_eager):
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        latent, noise, time, text = batch
        predicted = model(latent, time, encoder_hidden_states=text).sample
        return nn.functional.mse_loss(predicted, noise)

    def batch_of(size: int) -> tuple[torch.Tensor, ...]:
        latent, noise = torch.randn(size, 4, 16, 16), torch.randn(size, 4, 16, 16)
        text = torch.randn(size, PROMPT_TOKENS, PROMPT_WIDTH)
        return latent, noise, torch.randint(0, 1000, (size,)), text

    against_eager.training(unet(), loss_of, batch_of)


@pytest.mark.timeout(1200)
def test_stable_diffusion_weights_denoising_step(against_eager, weights):
    from diffusers import UNet2DConditionModel

    folder: Path = weights("STABLE_DIFFUSION_MODEL_DIR")
    encoder = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    model = UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=torch.float32)
    batch = step_inputs(1, model.config.sample_size, 77, encoder.config.vocab_size)
    against_eager.inference(DenoisingStep(encoder, model), batch)
