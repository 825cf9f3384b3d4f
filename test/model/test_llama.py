"""Llama: prefill and greedy decode with a key-value cache, and LoRA fine-tuning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import StaticCache

from dicp.testing.accuracy import InDouble

from .fp64 import AgainstEager, check_tensors, no_recompile
from .llama_weights import instruction_tokens, load_llama
from .tiny_llama import VOCABULARY, llama

PROMPT, NEW_TOKENS = 12, 6


@dataclass(frozen=True)
class Decoded:
    tokens: Tensor
    logits: dict[str, Tensor]


def decode(
    model: Any, prompt: Tensor, forward: Callable[..., Any], tokens: Tensor | None = None
) -> Decoded:
    """Greedy decoding: one prefill call, then one call per token; `tokens` forces the choices."""
    config = model.config
    cache = StaticCache(config, max_cache_len=prompt.shape[1] + NEW_TOKENS)
    head_dim = config.hidden_size // config.num_attention_heads
    cache.early_initialization(
        prompt.shape[0], config.num_key_value_heads, head_dim, model.dtype, prompt.device
    )
    inputs, chosen, logits = prompt, [], {}
    for step in range(NEW_TOKENS):
        # Prefill and the first decoding step compile; later ones must not.
        with no_recompile(forward is not model and step > 1):
            last = forward(input_ids=inputs, cache=cache, use_cache=True).logits[:, -1]
        logits[f"token {step}"] = last.clone()
        best = last.argmax(-1, keepdim=True)
        chosen.append(best)
        inputs = best if tokens is None else tokens[:, step : step + 1]
    return Decoded(torch.cat(chosen, 1), logits)


def check_decoding(against_eager: AgainstEager, model: Any, prompt: Tensor) -> None:
    """Compiled greedy decoding chooses eager's tokens, with logits inside the fp64 rule."""
    model, prompt = against_eager.put(model), against_eager.put(prompt)
    double = copy.deepcopy(model).double()
    with torch.no_grad():
        eager = decode(model, prompt, model)
        with InDouble():
            reference = decode(double, prompt, double, eager.tokens)
        compiled = decode(model, prompt, against_eager.compile(model))
    assert torch.equal(compiled.tokens, eager.tokens)
    check_tensors(compiled.logits, eager.logits, reference.logits)


def test_llama_prefill_and_decode(against_eager):
    check_decoding(against_eager, llama(), torch.randint(0, VOCABULARY, (2, PROMPT)))


def test_llama_weights_prefill_and_decode(against_eager, weights):
    model = load_llama(weights("LLAMA_MODEL_DIR"))
    prompt = torch.randint(0, model.config.vocab_size, (1, PROMPT))
    check_decoding(against_eager, model, prompt)


@pytest.mark.sweep
def test_llama_inference_in_bfloat16(against_eager):
    batches = [
        {"input_ids": torch.randint(0, VOCABULARY, shape), "use_cache": False}
        for shape in ((2, 16), (3, 21))
    ]
    against_eager.inference(llama().bfloat16(), *batches)


def check_fine_tuning(
    against_eager: AgainstEager, model: Any, batch_of: Callable[[int], Tensor], rank: int
) -> None:
    """Three steps with adapters on the query and value projections."""
    torch.manual_seed(0)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"],
                      lora_dropout=0.0)  # fmt: skip
    against_eager.training(
        get_peft_model(model, lora),
        lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss,
        batch_of,
        steps=3,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
    )


def test_llama_lora_fine_tuning(against_eager):
    check_fine_tuning(
        against_eager, llama(), lambda n: torch.randint(0, VOCABULARY, (n, 16)), rank=4
    )


def test_llama_weights_lora_fine_tuning(against_eager, weights):
    folder = weights("LLAMA_FINETUNE_DIR")
    model, tokens = load_llama(folder / "base_model"), instruction_tokens(folder, length=64)
    check_fine_tuning(against_eager, model, lambda n: tokens[:n], rank=8)
