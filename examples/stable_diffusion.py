"""A diffusion pipeline draws an image for a prompt: text encoder and UNet are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Annotated, Any

import numpy as np
import torch
import typer
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline
from PIL import Image
from transformers import CLIPTokenizer

from dicp.testing.models.tiny_diffusion import PROMPT_TOKENS, text_encoder, unet
from examples import frame

VARIABLE = "STABLE_DIFFUSION_MODEL_DIR"
HOLDS = "a pipeline of diffusers (model_index.json, text_encoder/, tokenizer/, unet/, vae/)"
NEAR = 2
"""Grey values, of 255, that count as the same."""
OUTPUT = Path(__file__).resolve().parent / "output"


def tiny_pipeline() -> StableDiffusionPipeline:
    """All parts with tiny sizes and random weights; letters are tokens. Images are 32 by 32."""
    encoder = text_encoder()
    start, end = encoder.config.bos_token_id, encoder.config.eos_token_id
    words = [*ascii_lowercase, *(f"{letter}</w>" for letter in ascii_lowercase)]
    vocabulary = {"<|startoftext|>": start, "<|endoftext|>": end}
    vocabulary |= {word: number for number, word in enumerate(words, start + 1)}
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4,
        sample_size=32,
    )  # fmt: skip
    return StableDiffusionPipeline(
        vae=vae.eval(), text_encoder=encoder.eval(), unet=unet().eval(),
        tokenizer=CLIPTokenizer(vocabulary, [], model_max_length=PROMPT_TOKENS),
        scheduler=PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Images (height, width, 3) of bytes, and the share of pixels near eager's."""

    compiled: np.ndarray
    eager: np.ndarray | None = None
    near: float | None = None


def image(pipeline: Any, prompt: str, steps: int, seed: int) -> np.ndarray:
    """The image (height, width, 3) of bytes for a prompt; a seed gives the same first latent."""
    generator = torch.Generator().manual_seed(seed)
    drawn = pipeline(prompt, num_inference_steps=steps, generator=generator).images[0]
    return np.asarray(drawn)


def share_near(image: np.ndarray, other: np.ndarray) -> float:
    """The share of pixels whose grey values differ by at most NEAR."""
    greys = [np.asarray(Image.fromarray(each).convert("L"), np.int16) for each in (image, other)]
    return float((np.abs(greys[0] - greys[1]) <= NEAR).mean())


def main(
    prompt: Annotated[str, typer.Option(help="What to draw.")] = "a lighthouse",
    backend: frame.Backend = "cpugraph",
    dynamic: frame.Dynamic = False,
    device: frame.Device = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the scheduler.")] = 4,
    weights: Annotated[Path | None, frame.weights_folder(VARIABLE, HOLDS)] = None,
    compare: frame.Compare = False,
    vae: Annotated[bool, typer.Option("--vae", help="Compile the decoder, too.")] = False,
    out: Annotated[Path, typer.Option(help="The folder for images.")] = OUTPUT,
    seed: frame.Seed = 0,
) -> Result:
    """Draw an image for a prompt; with --compare, prints the share of pixels near eager's."""
    torch.manual_seed(seed)
    frame.say_random(weights, VARIABLE, HOLDS)
    with frame.loading(weights, HOLDS):
        pipeline = tiny_pipeline() if weights is None else StableDiffusionPipeline.from_pretrained(
            weights, local_files_only=True, safety_checker=None, requires_safety_checker=False
        )  # fmt: skip
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    eager = image(pipeline, prompt, steps, seed) if compare else None
    compiler = frame.Compiler(backend, dynamic)
    decoder = [pipeline.vae.decoder] if vae else []
    for module in (pipeline.text_encoder, pipeline.unet, *decoder):
        module.forward = compiler(module.forward)
    compiled, seconds = frame.timed(image, pipeline, prompt, steps, seed)
    _, steady = frame.timed(image, pipeline, prompt, steps, seed)
    print(f"{seconds:.1f} s with compilation, then {steady:.2f} s")
    near = None if eager is None else share_near(compiled, eager)
    if near is not None:
        print(f"{100 * near:.2f}% of the pixels differ from eager's by at most {NEAR} of 255")
    out.mkdir(parents=True, exist_ok=True)
    for name, drawn in (("stable_diffusion", compiled), ("stable_diffusion_eager", eager)):
        if drawn is not None:
            Image.fromarray(drawn).save(out / f"{name}.png")
            print(out / f"{name}.png")
    return Result(compiled, eager, near)
