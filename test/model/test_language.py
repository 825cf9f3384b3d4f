"""Hugging Face encoders and decoders: BERT, GPT-2 and T5, inference and a training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from dicp.conformance.families.models import VOCABULARY, bert, gpt2


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def padded(batch: int, length: int) -> dict[str, Any]:
    """Token ids whose last rows are shorter, with the mask that says so."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - 5 :] = 0
    return {"input_ids": tokens(batch, length), "attention_mask": mask}


def with_labels(batch: dict[str, Any]) -> dict[str, Any]:
    labels = batch["input_ids"].clone()
    labels[:, ::3] = -100
    return {**batch, "labels": labels}


def loss_of(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch).loss


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=48,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=3,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def test_bert_inference(against_eager):
    against_eager.inference(bert(), padded(2, 24), padded(3, 31))


def test_bert_training(against_eager):
    against_eager.training(bert(), loss_of, lambda n: with_labels(padded(n, 24)))


def test_gpt2_inference(against_eager):
    against_eager.inference(gpt2(), padded(2, 24), padded(3, 31))


def test_gpt2_training(against_eager):
    against_eager.training(gpt2(), loss_of, lambda n: with_labels(padded(n, 24)))


@pytest.mark.sweep
def test_t5_training(against_eager):
    against_eager.training(t5(), loss_of, lambda n: with_labels(padded(n, 16)))
