"""Any causal language model of transformers writes with `generate`, its forward compiled."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from examples import frame
from examples.text import BYTES, tokenizer

VARIABLE = "HF_MODEL_DIR"
HOLDS = "config.json, *.safetensors and a tokenizer (Hugging Face)"
TINY = {
    "vocab_size": BYTES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "ffn_dim": 128, "word_embed_proj_dim": 64,
    "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 64, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
"""Sizes by their names in configurations; each takes those that it has."""


def tiny_model(name: str) -> Any:
    """A model of a family, such as gpt2 or qwen3, with tiny sizes and random weights."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = get_close_matches(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=5)
        raise frame.ExampleError(f"transformers has no causal model {name!r}; near: {near}")
    kind = type(AutoConfig.for_model(name))
    other = {kind.attribute_map.get(size, size): size for size in TINY}
    taken = {n: TINY[s] for n, s in other.items() if n in inspect.signature(kind).parameters}
    return AutoModelForCausalLM.from_config(kind(**taken))


@dataclass(frozen=True)
class Result:
    """The new tokens of both runs, eager's where it was asked for, and seconds of each run."""

    compiled: list[int]
    seconds: list[float]
    eager: list[int] | None = None


def generate(model: Any, prompt: Sequence[int], seed: int, options: dict[str, Any]) -> list[int]:
    """The tokens that a model writes after a prompt."""
    torch.manual_seed(seed)
    ids = torch.tensor([prompt], device=model.device)
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return found[0, len(prompt) :].tolist()


def main(
    model: Annotated[str, typer.Option(help="A causal model of transformers.")] = "gpt2",
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "Once upon a time",
    backend: frame.Backend = "cpugraph",
    dynamic: frame.Dynamic = True,
    device: frame.Device = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 16,
    weights: Annotated[Path | None, frame.weights_folder(VARIABLE, HOLDS)] = None,
    compare: frame.Compare = False,
    do_sample: Annotated[bool, typer.Option("--do-sample", help="Draw tokens.")] = False,
    top_k: Annotated[int, typer.Option(min=0)] = 50,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(min=0.0)] = 1.0,
    seed: frame.Seed = 0,
) -> Result:
    """Continue a text by `generate`; prints it twice, and where eager's tokens differ."""
    torch.manual_seed(seed)
    frame.say_random(weights, VARIABLE, HOLDS)
    with frame.loading(weights, HOLDS):
        net = AutoModelForCausalLM.from_pretrained(weights) if weights else tiny_model(model)
        tokens = tokenizer(weights)
    net.to(device).eval()
    options: dict[str, Any] = {
        "max_new_tokens": steps, "do_sample": do_sample, "repetition_penalty": repetition_penalty
    }  # fmt: skip
    if do_sample:
        options |= {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    ids = tokens.encode(prompt)
    if not ids:
        raise frame.ExampleError("the prompt has no token: give --prompt a text")
    eager = generate(net, ids, seed, options) if compare else None
    net.forward = frame.Compiler(backend, dynamic)(net.forward)
    runs = [frame.timed(generate, net, ids, seed, options) for _ in range(2)]
    result = Result(runs[0][0], [seconds for _, seconds in runs], eager)
    print(f"{prompt}{tokens.decode(result.compiled, skip_special_tokens=True)}")
    print("{:.1f} s with compilation, then {:.2f} s".format(*result.seconds))
    if eager is not None:
        differ = [k for k, pair in enumerate(zip(result.compiled, eager, strict=False))
                  if pair[0] != pair[1]]  # fmt: skip
        print(f"new token {differ[0] + 1} differs from eager's" if differ
              else f"all {len(eager)} tokens are eager's")  # fmt: skip
    return result
