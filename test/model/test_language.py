"""Hugging Face encoders and decoders: BERT, GPT-2 and T5, inference and a training step."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 199


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


def bert() -> BertForMaskedLM:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def gpt2() -> GPT2LMHeadModel:
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )
    model.loss_type = "ForCausalLM"  # not derived from this class's name; unset, it logs a warning
    return model


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


def test_t5_training(against_eager):
    against_eager.training(t5(), loss_of, lambda n: with_labels(padded(n, 16)))
